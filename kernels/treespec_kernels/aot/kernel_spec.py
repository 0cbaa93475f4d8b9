"""Model shapes and kernel specs: the input of the ahead-of-time compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.linear.rms_norm import NormKind

PAGE_SIZE = 64
# Formats compiled for a shape without a format: int8 per channel, int4 per group, and int4 with zero points as in AWQ.
AOT_FORMS = (WeightForm(8), WeightForm(4, 128), WeightForm(4, 128, True))
TRITON_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class LinearLayer(NamedTuple):
    """A linear layer with weight [out_features, in_features]; with silu_gate, out_features counts gates and ups."""

    name: str
    out_features: int
    in_features: int
    silu_gate: bool = False


@dataclass(frozen=True)
class KernelShape:
    """Properties of a model that its kernels depend on; defaults are those of Llama.

    Args:
        dtype, head_dim, num_heads, num_kv_heads, hidden_size, intermediate_size, vocab_size: dtype and sizes.
        norm: kind of norm of the residual stream; a model with LayerNorm has biases in all layers.
        post_norms: whether the outputs of attention and MLP are normalised before the residual add.
        qk_norm: whether the heads of Q and K are normalised.
        rotary: whether Q and K are rotated by position.
        gated, activation: whether the MLP has a gate projection, and its activation.
        capped: whether attention scores and logits have soft caps.
        quantized: format of the linear layers; None if they are not quantised.
    """

    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    norm: NormKind = "rms"
    post_norms: bool = False
    qk_norm: bool = False
    rotary: bool = True
    gated: bool = True
    activation: str = "silu"
    capped: bool = False
    quantized: WeightForm | None = None

    @property
    def linear_layers(self) -> tuple[LinearLayer, ...]:
        """Linear layers of one decoder layer, in execution order."""
        width, hidden, intermediate = self.num_heads * self.head_dim, self.hidden_size, self.intermediate_size
        return (
            LinearLayer("qkv", width + 2 * self.num_kv_heads * self.head_dim, hidden),
            LinearLayer("o", hidden, width),
            LinearLayer("gate_up", 2 * intermediate, hidden, True)
            if self.gated
            else LinearLayer("up", intermediate, hidden),
            LinearLayer("down", hidden, intermediate),
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention(self) -> dict[str, Any]:
        """Sizes of tree attention, as keyword arguments of its plans and layouts."""
        names = ("num_heads", "num_kv_heads", "head_dim", "dtype")
        return {name: getattr(self, name) for name in names}

    @property
    def element(self) -> str:
        """Triton's name of the dtype."""
        return TRITON_TYPES[self.dtype]


@dataclass(frozen=True)
class KernelSpec:
    """Signature, constants and launch options to compile one kernel with.

    Args:
        kernel: the `triton.jit` function.
        types: argument name to Triton type ("*bf16", "fp32", "i64"). Other arguments default to i32 if they are named
            `stride_*` or `num_*`, and otherwise to pointers to int32.
        constants: the constexpr arguments.
        options: num_warps, num_stages, enable_fp_fusion.
        config: describes the kernel in the report.
        first: the spec of the kernel's first tile, if this one is of a larger tile that must give a row the same bits.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, int | bool | str | float]
    options: dict[str, Any]
    config: dict[str, Any]
    first: KernelSpec | None = None
