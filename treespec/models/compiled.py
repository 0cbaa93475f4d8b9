"""Decoder for small models on a CPU whose forward pass is a single C++ call, compiled on this machine.

It passes the same self-test as the eager decoder: trees are bit-identical to plain decoding with the same decoder. Its
bits differ from the eager decoder's.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.errors import KernelError, ModelError
from treespec.models.decoder import Decoder, Pass, StreamInput
from treespec.models.hidden_states import HiddenStates, without_scales
from treespec.models.layer import COMPILED, take_experts, take_inputs, take_layer, take_projection
from treespec.models.low_rank import LowRank, updates_by_matrix
from treespec.models.model_config import ModelConfig
from treespec.models.norms import take_head_norm
from treespec.models.per_layer import take_input_table
from treespec.models.recurrent import MAX_KERNEL, STATE_LANES, recurrent_sizes, take_mixer
from treespec.utils.memory import drop_mapped
from treespec_kernels.attention.tree_batch import RequestRows, UpdatedRows, updated_rows
from treespec_kernels.cpu.compiled_experts import CompiledExperts, MlpWeights
from treespec_kernels.cpu.compiled_plan import CompiledPlan, TreeBatch, plan_compiled
from treespec_kernels.cpu.compiled_updates import CompiledUpdates
from treespec_kernels.cpu.cpu_library import CompileError, build_together, find_compiler
from treespec_kernels.cpu.decoder_cpu import (
    Architecture,
    CompiledLayerWeights,
    CompiledModel,
    InputTable,
)
from treespec_kernels.cpu.decoder_library import build, form_of, unsupported_reason
from treespec_kernels.cpu.growth_cpu import growth_library
from treespec_kernels.cpu.lookup_cpu import lookup_library
from treespec_kernels.linear.quantized import BlockWeight
from treespec_weights.blocks import Blocks, Weights
from treespec_weights.progress import tracked


def check_compiled(configs: Sequence[ModelConfig], dtype: torch.dtype, device: torch.device, folder: Path) -> None:
    """Build the libraries for an engine's models in `folder`, in parallel, before anything is loaded.

    Raises KernelError if the device is not a CPU, the compiler is missing or fails, or a model is unsupported.
    """
    if device.type != "cpu":
        raise KernelError(f"compile=True needs a CPU, the device is {device}; use compile=False")
    for config in configs:
        shape = config.shape
        inputs = [shape.per_layer_size] if shape.per_layer_size else []
        reason = unsupported_reason(shape.hidden_size, [*shape.mlp_sizes, *inputs], shape.head_dim, dtype)
        if (recurrent := shape.recurrent) is not None:
            sizes = recurrent.key_dim, recurrent.value_dim
            if recurrent.kernel > MAX_KERNEL or any(size % STATE_LANES for size in sizes):
                reason = f"a convolution of {recurrent.kernel} tokens, or states of {sizes}: no multiples of 16"
        if reason:
            raise KernelError(f"{config.folder}: compile=True does not support {reason}; use compile=False")
    head_dims = dict.fromkeys(config.shape.head_dim for config in configs)
    with suppress(CompileError):  # `_libraries` reports the error
        compiler = find_compiler()
        build_together(
            [partial(build, compiler, head_dim, dtype, folder) for head_dim in head_dims]
            + [partial(library, compiler, folder) for library in (growth_library, lookup_library)]
        )
    for head_dim in head_dims:
        _libraries(head_dim, dtype, folder)


def _libraries(head_dim: int, dtype: torch.dtype, folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the libraries of the forward pass and of tree growth."""
    try:
        compiler = find_compiler()
        return build(compiler, head_dim, dtype, folder), growth_library(compiler, folder)
    except (CompileError, OSError) as error:
        raise KernelError(f"compile=True: {error}; name a C++ compiler in CXX, or use compile=False") from error


def _forms_of(weight: Any) -> list[object]:
    """Return the forms of a product's matrices."""
    return [form_of(part) for part in (weight if isinstance(weight, list) else [weight])]


class CompiledDecoder(Decoder):
    """A `Decoder` whose passes run in the compiled library."""

    library: ctypes.CDLL
    growth: ctypes.CDLL

    def __init__(self, config: ModelConfig, weights: Weights, folder: Path, integer: bool = False):
        self._folder, self._integer, self._joined = folder, integer, torch.empty(0, dtype=torch.float32, device="cpu")
        unquantized = weights["final_norm" if isinstance(weights["embed"], Blocks) else "embed"]
        attention: Any = SimpleNamespace(name="compiled", cache_dtype=unquantized.dtype)  # a part of the pass
        super().__init__(config, weights, attention, "compiled", min_rows=1)

    def _take(self, weights: Weights) -> None:
        config = self.config
        architecture = Architecture(
            self.heads,
            self.kv_heads,
            config.norm_eps,
            config.query_scale,
            config.activation,
            config.rules.norm == "layer",
            config.parallel,
            len(config.ropes),
            self.first_scale,
            config.score_cap,
            config.shape.wide_qk_norm,
            config.rules.norm_after_rope,
            config.shape.output_gate,
            **recurrent_sizes(config),
            widest_head=config.shape.widest_head,
            value_scale=config.value_scale,
        )
        blocks = self.embed_blocks
        embed = self.embed if blocks is None else BlockWeight(blocks.kind, blocks.rows, blocks.release)
        dense = [head] if isinstance(head := weights.get("lm_head"), Tensor) else []
        inputs = None
        if config.shape.per_layer_size:
            table, gain, scale, eps = take_input_table(weights, config, self.dtype)
            rows = BlockWeight(table.kind, table.rows, table.release) if isinstance(table, Blocks) else table
            inputs = InputTable(rows, take_projection(weights, "", ("input_project",)), gain, scale, eps)
        self.library, self.growth = _libraries(self.head_dim, self.dtype, self._folder)
        self.model = CompiledModel(
            self.library,
            self.dtype,
            architecture,
            embed,
            self.positions,
            self._take_layers(weights),
            (weights.pop("final_norm"), weights.pop("final_norm_bias", None)),
            take_projection(weights, "", ("lm_head",)) if "lm_head" in weights else embed,
            torch.get_num_threads(),
            self._integer,
            inputs,
        )
        drop_mapped(dense)
        self.entries = self.model.entries if config.logit_cap is None else None  # with a cap, `probs` takes more calls

    def _take_layers(self, weights: Weights) -> Iterator[CompiledLayerWeights]:
        """Yield each layer's weights; they are dropped from memory before the next layer."""
        config, shape = self.config, self.config.shape
        planes = shape.planes(range(shape.num_layers))
        for i, kind in tracked(f"packing {config.folder.name}", [*enumerate(config.layers)]):
            prefix = f"layers.{i}."
            head_norm, sizes = take_head_norm(weights, i, shape), shape.layer(i)
            dense = [value for name, value in weights.items() if name.startswith(prefix) and isinstance(value, Tensor)]
            parts = take_layer(weights, i, COMPILED, joins=False) | take_inputs(weights, i)
            parts["sinks"] = weights.pop(f"{prefix}sinks", None)
            if kind.recurrent:
                parts |= take_mixer(weights, prefix, config)
            if kind.sparse:
                parts["experts"] = self._take_experts(weights, i)
            parts |= {"head_norm": head_norm, "ropes": kind.ropes, "window": kind.window, "plane": planes[i]}
            parts |= {"num_kv_heads": sizes.num_kv_heads, "parts": sizes.head_dim // self.head_dim}
            yield CompiledLayerWeights(**parts, owns_kv=sizes.kv_of == i)
            del parts
            drop_mapped(dense)

    def _take_experts(self, weights: Weights, i: int) -> CompiledExperts:
        config = self.config.shape.experts
        assert config is not None
        taken = take_experts(weights, i, config.count, COMPILED, joins=False)
        forms = {tuple(_forms_of(expert["gate_up"]) + _forms_of(expert["down"])) for expert in taken.experts}
        if len(forms) > 1:
            raise ModelError(
                f"{self.config.folder}: the experts of layer {i} are not all quantised alike; use compile=False"
            )
        return CompiledExperts(
            taken.router,
            taken.router_bias,
            taken.correction,
            taken.shared_scale,
            [MlpWeights(**expert) for expert in taken.experts],
            config.top_k,
            config.scoring,
            config.normalized,
            config.scale,
            config.groups,
            config.chosen_groups,
            None if taken.latent is None else (taken.latent["latent_in"], taken.latent["latent_out"]),
            taken.scales,
            taken.norms,
        )

    def weight_forms(self) -> Sequence[object]:
        return self.model.weight_forms

    def _select_layers(self, layers: Sequence[int]) -> None:
        kinds = [self.config.layers[i] for i in layers]
        windows = [self.windows[self.config.windows.index(kind.window)] for kind in kinds]
        self.model = self.model.keep(layers, windows, self.config.shape.planes(layers))

    @property
    def compiled(self) -> "CompiledDecoder":
        return self

    @property
    def nbytes(self) -> int:
        dequantized = self.embed.nbytes if self.embed_blocks is not None and "embed" in vars(self) else 0
        return self.model.nbytes + dequantized

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        plan = plan_compiled(requests, self.config.first_rotation, self.config.shape.recurrent is not None)
        updated = updated_rows((rows.adapter, rows.num_rows) for rows in requests)
        return self.layout(plan, int(plan.positions.numpy().max()) + 1, updated)

    def layout(self, plan: CompiledPlan, num_positions: int, updated: Sequence[UpdatedRows] = ()) -> Pass:
        """Return a pass over planned rows, all at positions below `num_positions`."""
        learned = None if self.positions is None else self._learned_at(plan.positions.numpy())
        return Pass(plan.num_rows, self.rotations_to(num_positions), plan.slots, plan, learned, updated)

    def updates(self, matrices: Mapping[str, LowRank]) -> CompiledUpdates:
        return CompiledUpdates(self.library, updates_by_matrix(self.config, matrices, COMPILED))

    def rotations_to(self, num_positions: int) -> Tensor:
        """Return cos and signed sin of every rope by position, fp32 [>= num_positions, 2 * num_ropes, head_dim]."""
        if num_positions > len(self._joined) - self.config.short_context:
            tables = [rotation.table(num_positions) for rotation in self.rotations]
            length = min(map(len, tables), default=0)
            no_ropes = torch.empty(0, 0, self.head_dim, dtype=torch.float32, device="cpu")
            self._joined = torch.cat([table[:length] for table in tables], 1) if tables[1:] else [*tables, no_ropes][0]
        return self._joined

    def forward(self, tokens: Tensor, layout: Pass, kv: Tensor, num_layers: int | None = None) -> Tensor:
        plan, rotation, updated = layout.attention, layout.rotation, layout.updated
        final = self.model.forward(tokens, plan, rotation, kv, num_layers, layout.positions, updated=updated)
        if plan.states is not None:
            plan.states.finish()
        return final

    @property
    def has_tree_logits(self) -> bool:
        """Whether one call computes the logits of whole trees."""
        return self.positions is None and self.config.logit_cap is None and self.head_vocabulary is None

    def tree_logits(
        self,
        trees: TreeBatch,
        kv: Tensor,
        adapters: Sequence[Any],  # by tree, as `RequestRows.adapter`
    ) -> Tensor | None:
        """Run a pass over whole trees, as `CompiledModel.tree_logits`; None if it takes more than one call."""
        if not self.has_tree_logits:
            return None
        updated = updated_rows(zip(adapters, trees.sizes, strict=True)) if any(adapters) else ()
        return self.model.tree_logits(trees, self.rotations_to(trees.num_positions), kv, updated)

    def forward_with_states(
        self, tokens: Tensor, layout: Pass, kv: Tensor, of: Sequence[int], stream: StreamInput | None = None
    ) -> HiddenStates:
        streams = torch.empty(len(tokens), len(of), self.model.hidden_size, dtype=self.dtype, device="cpu")
        rows, qkv = (None, None) if stream is None else stream
        plan, rotation, positions = layout.attention, layout.rotation, layout.positions
        arguments = rows, qkv, streams, of, layout.updated
        final = self.model.forward(tokens, plan, rotation, kv, None, positions, *arguments)
        if plan.states is not None:
            plan.states.finish()
        if (normed := self.config.shape.num_layers + 1) in of:
            streams[:, of.index(normed)] = final
        return HiddenStates(final, without_scales(streams, of, self.config))

    def write_context(self, rows: Tensor, layout: Pass, kv: Tensor) -> None:
        self.model.write_context(rows.contiguous(), layout.attention, layout.rotation, kv)

    def probs(self, hidden: Tensor) -> Tensor:
        return super().probs(hidden) if self.config.logit_cap is not None else self.model.probs(hidden)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.best(logits)

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        logits = self.model.logits(hidden if rows is None else F.embedding(torch.as_tensor(rows, device="cpu"), hidden))
        return self._finish_logits(logits)
