"""Workload of programmatic dependent launch (`launch/predecessors.py`): the kernels of a pass, with and without PDL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from treespec_kernels.aot.kernel_spec import PAGE_SIZE
from treespec_kernels.attention.qkv_rope import qkv_rope_triton
from treespec_kernels.attention.tree_attention import (
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
    tree_attention_triton,
)
from treespec_kernels.launch.graph_capture import GraphMemory, captured
from treespec_kernels.launch.triton_launch import LaunchConfig, takes_pdl, target_of
from treespec_kernels.linear.lm_head import BlockStats, LmHeadConfig, lm_head_triton
from treespec_kernels.linear.rms_norm import rms_norm_triton
from treespec_kernels.linear.row_linear import row_linear_partials_triton, row_linear_triton
from treespec_kernels.tuning.testing import TreeAttentionInputs, tree_attention_inputs, tree_parents

from .base import Setting, Tensors, Workload, same_bits
from .quantized_row_linear import QuantizedRowLinearWorkload
from .row_linear import PLAIN, RowLinearWorkload

LAYERS = 4
REPLAYS = 50  # runs of the check, with all memory poisoned between them
EPS = 1e-5


@dataclass(frozen=True, eq=False)
class Chain:
    """Weights, tables, and all buffers that the chain of kernels writes.

    Layers share buffers, so that kernels overwrite memory that others have just read.
    """

    start: torch.Tensor  # [rows, hidden], the residual stream before the first layer
    norm: torch.Tensor
    weights: dict[str, Any]  # by name of the linear layer
    head: torch.Tensor
    rotation: torch.Tensor
    positions: torch.Tensor
    attention: TreeAttentionInputs
    plan: TreeAttentionPlan
    places: tuple[torch.Tensor, torch.Tensor]  # page of each row, and offset in the page
    kv_layer: torch.Tensor
    slots: torch.Tensor
    stream: torch.Tensor
    normed: torch.Tensor
    partials: torch.Tensor
    q: torch.Tensor
    mixed: torch.Tensor
    inner: torch.Tensor
    logits: torch.Tensor
    stats: BlockStats

    def poison(self) -> None:
        """Fill the buffers that a run writes before it reads them with values that no result has."""
        plan = self.plan
        for tensor in (
            *(self.stream, self.normed, self.partials, self.q, self.mixed, self.inner, self.logits, *self.stats),
            *(plan.partial_acc, plan.partial_max, plan.partial_sum),
        ):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        pages, offsets = self.places
        self.kv_layer[:, pages, :, offsets] = torch.nan


class ProgrammaticLaunchWorkload(Workload[Chain]):
    """Some layers of a Llama and its LM head, over one tree of `nodes` nodes for each stacked model.

    All layers share one set of weights. Results must be bit-identical to those of the same kernels launched without
    PDL.
    """

    op = "programmatic_launch"

    def __init__(self, setting: Setting, nodes: int, weight: float):
        super().__init__(setting)
        shape = setting.shape
        self.nodes, self.rows, self.weight = nodes, setting.groups * nodes, weight
        kind = RowLinearWorkload if shape.quantized is None else QuantizedRowLinearWorkload
        self._linear = {layer.name: kind(setting, *layer[1:3], nodes, layer.silu_gate) for layer in shape.linear_layers}
        target = target_of(self.device)
        self._head = LmHeadConfig.default(self.dtype, shape.vocab_size, shape.hidden_size, target)
        self._attention = TreeAttentionConfig.default(self.dtype, shape.head_dim, target)
        if setting.fixed_order_dot:
            self._head = replace(self._head, block_m=16, block_n=64, block_k=64, fixed_order_dot=True)
            self._attention = replace(self._attention, fixed_order_dot=True)
        self.key = self.key_of(hidden_size=shape.hidden_size, groups=setting.groups)
        form = shape.quantized
        self.load = f"nodes {nodes}" + (f", int{form.bits}" if form is not None else "")
        head = setting.groups * shape.vocab_size * shape.hidden_size
        self.bytes = LAYERS * sum(layer.bytes for layer in self._linear.values()) + head * self.dtype.itemsize
        self.flops = LAYERS * sum(layer.flops for layer in self._linear.values()) + 2 * nodes * head

    def candidates(self) -> list[Any]:
        return [LaunchConfig(), LaunchConfig(pdl=True)] if takes_pdl(self.device) else [LaunchConfig()]

    def make(self, generator: torch.Generator) -> Chain:
        shape, rows, device = self.setting.shape, self.rows, self.device
        hidden, head_dim = shape.hidden_size, shape.head_dim
        host = torch.Generator().manual_seed(generator.initial_seed())
        inputs = tree_attention_inputs(
            [self.setting.context] * self.setting.groups,
            [tree_parents("random", self.nodes, host) for _ in range(self.setting.groups)],
            **shape.attention,
            device=device,
            seed=generator.initial_seed(),
        )
        plan = plan_tree_attention(**inputs.plan, **shape.attention, device=device, config=self._attention)
        slots = self.setting.context + torch.arange(self.nodes, device=device).repeat(self.setting.groups)
        pages = inputs.rows["page_table"][inputs.rows["row_request"].long(), slots // PAGE_SIZE].long()
        stack = self.setting.stack
        widths = [layer.sizes[1] * layer.default.split_k for layer in self._linear.values()]
        num_positions = self.setting.context + self.nodes

        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=self.dtype, device=device)

        return Chain(
            start=self.random(generator, rows, hidden),
            norm=self.random(generator, *stack, hidden),
            weights={name: layer.make(generator).weight for name, layer in self._linear.items()},
            head=self.random(generator, *stack, shape.vocab_size, hidden, scale=hidden**-0.5),
            rotation=torch.randn(num_positions, 2, head_dim, generator=generator, device=device, dtype=torch.float32),
            positions=self.setting.context + inputs.rows["depths"],
            attention=inputs,
            plan=plan,
            places=(pages, slots % PAGE_SIZE),
            kv_layer=torch.stack([inputs.k_cache, inputs.v_cache]),
            slots=pages * PAGE_SIZE + slots % PAGE_SIZE,
            stream=empty(rows, hidden),
            normed=empty(rows, hidden),
            partials=torch.empty(rows * max(widths), dtype=torch.float32, device=device),
            q=empty(rows, shape.num_heads, head_dim),
            mixed=empty(rows, shape.num_heads, head_dim),
            inner=empty(rows, shape.intermediate_size),
            logits=empty(rows, shape.vocab_size),
            stats=BlockStats.empty(rows, -(-shape.vocab_size // self._head.block_n), device),
        )

    def run(self, config: Any, copy: int = 0) -> Tensors:
        """Return the residual stream, its norm, the last attention output, the KV cache, and the LM head's results."""
        chain, pdl = self.inputs[copy], bool(config.pdl)
        cache = chain.kv_layer
        chain.stream.copy_(chain.start)  # the first launch follows a copy
        rms_norm_triton(chain.stream, chain.norm, EPS, out=chain.normed, pdl=pdl)
        for _ in range(LAYERS):
            qkv = self._partials(chain, "qkv", chain.normed, pdl)
            qkv_rope_triton(qkv, chain.rotation, chain.positions, chain.slots, cache, chain.q, pdl=pdl)
            tree_attention_triton(
                chain.q, cache[0], cache[1], **chain.attention.rows, plan=chain.plan, out=chain.mixed, pdl=pdl
            )
            self._add(chain, "o", chain.mixed.view(self.rows, -1), pdl)
            self._gate_up(chain, pdl)
            self._add(chain, "down", chain.inner, pdl)
        lm_head_triton(
            self._grouped(chain.normed),
            chain.head,
            config=self._head,
            logits=chain.logits,
            stats=chain.stats,
            pdl=pdl,
        )
        return chain.stream, chain.normed, chain.mixed, cache, chain.logits, *chain.stats

    def _partials(self, chain: Chain, name: str, x: torch.Tensor, pdl: bool) -> torch.Tensor:
        return row_linear_partials_triton(
            self._grouped(x),
            chain.weights[name],
            config=self._linear[name].default,
            workspace=chain.partials,
            pdl=pdl,
        )

    def _add(self, chain: Chain, name: str, x: torch.Tensor, pdl: bool) -> None:
        """Add a layer's product to the residual stream, and normalise the sum."""
        product = self._partials(chain, name, x, pdl)
        rms_norm_triton(product, chain.norm, EPS, residual=chain.stream, out=chain.normed, pdl=pdl)

    def _gate_up(self, chain: Chain, pdl: bool) -> None:
        name, shape = ("gate_up" if self.setting.shape.gated else "up"), self.setting.shape
        row_linear_triton(
            self._grouped(chain.normed),
            chain.weights[name],
            silu_gate=shape.gated,
            activation=shape.activation,
            config=self._linear[name].default,
            out=self._grouped(chain.inner),
            workspace=chain.partials,
            pdl=pdl,
        )

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """View [groups * rows, n] as [groups, rows, n]; unchanged for one model."""
        return x if self.setting.groups == 1 else x.view(self.setting.groups, self.nodes, -1)

    def check(self, config: Any) -> None:
        """Compare the results of `REPLAYS` runs of a captured chain with those of the chain without PDL, bit by bit.

        All memory is poisoned between runs, so that a kernel that reads too early does not find the previous results.
        """
        chain = self.inputs[0]
        if self._expected is None:
            chain.poison()
            self._expected = self.expected()
        chain.poison()
        self.compare(self.run(config), self._expected, config)
        replay, repeats = self._captured(config)
        for _ in range(repeats):
            chain.poison()
            self.compare(replay(), self._expected, config)

    def _captured(self, config: Any) -> tuple[Callable[[], Tensors], int]:
        if self.device.type != "cuda":
            return (lambda: self.run(config)), 1
        results: list[Tensors] = []
        graph = captured(lambda: results.append(self.run(config)), GraphMemory.of(self.device))

        def replay() -> Tensors:
            graph.replay()
            return results[0]

        return replay, REPLAYS

    def expected(self) -> Tensors:
        found = tuple(part.clone() for part in self.run(LaunchConfig()))
        assert all(part.isfinite().all() for part in (found[0], found[-4])), "the chain computes NaN or infinity"
        return found

    def compare(self, actual: Tensors, expected: Tensors, config: Any) -> None:
        for index, (own, right) in enumerate(zip(actual, expected, strict=True)):
            assert same_bits(own, right), f"result {index} of the chain differs from that of the chain without PDL"


def workloads(setting: Setting) -> list[Workload]:
    """Return workloads of a tree, with most of the weight, and of plain decoding."""
    return [ProgrammaticLaunchWorkload(setting, nodes, weight) for nodes, weight in _nodes(setting).items()]


def _nodes(setting: Setting) -> dict[int, float]:
    return {1: PLAIN, setting.nodes: 1.0 - PLAIN} if setting.nodes > 1 else {1: 1.0}
