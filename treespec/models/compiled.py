"""The decoder with its pass compiled by the machine's C++ compiler: one call for all layers, for small models on a CPU.

Another implementation of the same passes under the same self-test. Its bits are its own: equal for plain decoding and
trees, not equal to the eager decoder's.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.config import ModelConfig
from treespec.errors import KernelError
from treespec.models.decoder import Decoder, Pass
from treespec.models.quantized import take_projection
from treespec_kernels.decoder_cpu import (
    CompiledModel,
    CompileError,
    LayerWeights,
    build,
    find_compiler,
    misfit,
    plan_compiled,
)
from treespec_kernels.tree_batch import RequestRows


class CompiledAttention:
    """Tree attention inside the compiled pass: it can be planned, not called.

    Args:
        dtype: of the model, and of its K and V in the cache.
    """

    name = "compiled"

    def __init__(self, dtype: torch.dtype):
        self.cache_dtype = dtype

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> Any:
        return plan_compiled(requests)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float, cap: float | None = None
    ) -> Tensor:
        raise AssertionError("the compiled pass attends in one call with everything else")


def check_compiled(config: ModelConfig, dtype: torch.dtype, device: torch.device, folder: Path) -> None:
    """Build what a model's passes need into `folder`, before anything is loaded.

    Raises:
        KernelError: another device than a CPU, no compiler or one that fails, or a model that does not fit.
    """
    if device.type != "cpu":
        raise KernelError(f"compile=True is for a CPU, the device is {device}; use compile=False")
    shape = config.shape
    reason = _uncovered(config) or misfit(shape.hidden_size, shape.intermediate_size, shape.head_dim, dtype)
    if reason:
        raise KernelError(f"{config.folder}: compile=True does not support {reason}; use compile=False")
    _library(shape.head_dim, dtype, folder)


def _library(head_dim: int, dtype: torch.dtype, folder: Path) -> ctypes.CDLL:
    try:
        return build(find_compiler(), head_dim, dtype, folder)
    except (CompileError, OSError) as error:
        raise KernelError(f"compile=True: {error}; name a C++ compiler in CXX, or use compile=False") from error


def _uncovered(config: ModelConfig) -> str | None:
    """What the library does not compute of a model, or None."""
    shape, rules = config.shape, config.rules
    parts = {
        "LayerNorm": rules.norm == "layer",
        "RMSNorm that scales by 1 + w": rules.norm == "rms_plus_one",
        "norms of heads": shape.qk_norm,
        "norms of what is added to the residual stream": shape.post_norms,
        "an MLP without a gate": not shape.gated,
        f"the activation {config.activation}": config.activation != "silu",
        "a parallel residual": config.parallel,
        "learned positions": shape.learned_positions > 0,
        "several ropes": len(config.ropes) > 1,
        "attention within a window": config.windows != (None,),
        "capped scores": config.score_cap is not None,
        "capped logits": config.logit_cap is not None,
        "scaled embeddings": config.embed_scale != 1.0,
        f"scores scaled by {config.query_scale:.4g}": config.query_scale != shape.head_dim**-0.5,
    }
    found = [part for part, needed in parts.items() if needed]
    return ", ".join(found) if found else None


class CompiledDecoder(Decoder):
    """A `Decoder` whose passes run in the compiled library.

    Args:
        config, weights: as the decoder's.
        folder: where libraries are kept.

    Raises:
        KernelError: the library cannot be built.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], folder: Path):
        self._folder = folder
        super().__init__(config, weights, CompiledAttention(weights["embed"].dtype), "compiled", min_rows=1)

    def _take(self, weights: dict[str, Tensor]) -> None:
        shape = self.config.shape

        def stacked(i: int, *names: str) -> Tensor | None:
            parts = [weights.pop(f"layers.{i}.{name}", None) for name in names]
            present = [part for part in parts if part is not None]
            return torch.cat(present) if present else None

        def needed(i: int, *names: str) -> Tensor:
            tensor = stacked(i, *names)
            assert tensor is not None
            return tensor

        layers = [
            LayerWeights(
                needed(i, "attn_norm"), needed(i, "mlp_norm"),
                take_projection(weights, f"layers.{i}.", ("q", "k", "v")), stacked(i, "q_bias", "k_bias", "v_bias"),
                take_projection(weights, f"layers.{i}.", ("o",)), stacked(i, "o_bias"),
                take_projection(weights, f"layers.{i}.", ("gate", "up")), stacked(i, "gate_bias", "up_bias"),
                take_projection(weights, f"layers.{i}.", ("down",)), stacked(i, "down_bias"),
            )
            for i in range(shape.num_layers)
        ]  # fmt: skip
        head = self.embed if shape.tied else weights.pop("lm_head")
        self.model = CompiledModel(
            _library(self.head_dim, self.dtype, self._folder), self.embed, layers, weights.pop("final_norm"), head,
            self.heads, self.kv_heads, self.head_dim, self.config.norm_eps, torch.get_num_threads(),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        positions = np.concatenate([rows.positions for rows in requests])
        plan = plan_compiled(requests)
        return Pass(plan.num_rows, self.rotations[0].at(positions), plan.slots, plan)

    def forward(self, tokens: Tensor, layout: Pass, kv: Tensor, num_layers: int | None = None) -> Tensor:
        return self.model.forward(tokens, layout.attention, layout.rotation, kv[:num_layers], len(kv[:num_layers]))

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        return self.model.logits(hidden if rows is None else F.embedding(torch.as_tensor(rows), hidden))
