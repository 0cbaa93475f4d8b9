"""Entry of programmatic dependent launch (`launch/predecessors.py`): the kernels of a pass, with and without PDL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from treespec_kernels.attention.qkv_rope import qkv_rope_triton
from treespec_kernels.attention.tree_attention import (
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
    tree_attention_triton,
)
from treespec_kernels.launch.graph_capture import GraphMemory, captured
from treespec_kernels.launch.triton_launch import LaunchConfig, takes_pdl
from treespec_kernels.linear.lm_head import BlockStats, LmHeadConfig, lm_head_triton
from treespec_kernels.linear.rms_norm import rms_norm_triton
from treespec_kernels.linear.row_linear import row_linear_partials_triton, row_linear_triton
from treespec_kernels.ops.linear import EPS, PLAIN, key_of, layer_case, random_weight
from treespec_kernels.ops.op import Case, Inputs, Op, Results
from treespec_kernels.ops.shapes import PAGE_SIZE, Setting
from treespec_kernels.tuning.testing import TreeAttentionInputs, same_bits, tree_attention_inputs, tree_parents

LAYERS = 4
REPLAYS = 50  # runs of the check, with all memory poisoned between them


@dataclass(frozen=True, eq=False)
class Chain:
    """Some layers of a Llama and its LM head, over one tree for each stacked model: weights, tables and buffers.

    All layers share one set of weights, and buffers, so that kernels overwrite memory that others have just read.
    """

    setting: Setting
    nodes: int
    start: torch.Tensor  # [rows, hidden], the residual stream before the first layer
    norm: torch.Tensor
    weights: dict[str, Any]  # by name of the linear layer
    configs: dict[str, Any]
    head: torch.Tensor
    head_config: LmHeadConfig
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

    def run(self, pdl: bool) -> tuple[torch.Tensor, ...]:
        """Return the residual stream, its norm, the last attention output, the KV cache, and the LM head's results."""
        cache, shape = self.kv_layer, self.setting.shape
        self.stream.copy_(self.start)  # the first launch follows a copy
        rms_norm_triton(self.stream, self.norm, EPS, out=self.normed, pdl=pdl)
        for _ in range(LAYERS):
            qkv = self._partials("qkv", self.normed, pdl)
            qkv_rope_triton(qkv, self.rotation, self.positions, self.slots, cache, self.q, pdl=pdl)
            tree_attention_triton(
                self.q, cache[0], cache[1], **self.attention.rows, plan=self.plan, out=self.mixed, pdl=pdl
            )
            self._add("o", self.mixed.view(len(self.mixed), -1), pdl)
            name = "gate_up" if shape.gated else "up"
            row_linear_triton(
                self._grouped(self.normed),
                self.weights[name],
                silu_gate=shape.gated,
                activation=shape.activation,
                config=self.configs[name],
                out=self._grouped(self.inner),
                workspace=self.partials,
                pdl=pdl,
            )
            self._add("down", self.inner, pdl)
        x, config = self._grouped(self.normed), self.head_config
        lm_head_triton(x, self.head, config=config, logits=self.logits, stats=self.stats, pdl=pdl)
        return self.stream, self.normed, self.mixed, cache, self.logits, *self.stats

    def _partials(self, name: str, x: torch.Tensor, pdl: bool) -> torch.Tensor:
        x, weight = self._grouped(x), self.weights[name]
        return row_linear_partials_triton(x, weight, config=self.configs[name], workspace=self.partials, pdl=pdl)

    def _add(self, name: str, x: torch.Tensor, pdl: bool) -> None:
        """Add a layer's product to the residual stream, and normalise the sum."""
        product = self._partials(name, x, pdl)
        rms_norm_triton(product, self.norm, EPS, residual=self.stream, out=self.normed, pdl=pdl)

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """View [groups * rows, n] as [groups, rows, n]; unchanged for one model."""
        return x if self.setting.groups == 1 else x.view(self.setting.groups, self.nodes, -1)


def chain_of(setting: Setting, nodes: int, generator: torch.Generator) -> Chain:
    """Create a chain over a random tree of `nodes` nodes."""
    shape, device, groups = setting.shape, setting.device, setting.groups
    hidden, head_dim, rows = shape.hidden_size, shape.head_dim, groups * nodes
    head, attention = (
        LmHeadConfig.default(setting.dtype, shape.vocab_size, hidden, setting.target),
        TreeAttentionConfig.default(setting.dtype, head_dim, setting.target),
    )
    if setting.fixed_order_dot:
        head = replace(head, block_m=16, block_n=64, block_k=64, fixed_order_dot=True)
        attention = replace(attention, fixed_order_dot=True)
    configs = {layer.name: layer_case(setting, layer, nodes).default for layer in shape.linear_layers}
    widths = [layer.out_features * configs[layer.name].split_k for layer in shape.linear_layers]
    seed = generator.initial_seed()
    host = torch.Generator().manual_seed(seed)
    trees = [tree_parents("random", nodes, host) for _ in range(groups)]
    inputs = tree_attention_inputs([setting.context] * groups, trees, **shape.attention, device=device, seed=seed)
    slots = setting.context + torch.arange(nodes, device=device).repeat(groups)
    pages = inputs.rows["page_table"][inputs.rows["row_request"].long(), slots // PAGE_SIZE].long()

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=setting.dtype, device=device)

    return Chain(
        setting=setting,
        nodes=nodes,
        start=setting.random(generator, rows, hidden),
        norm=setting.random(generator, *setting.stack, hidden),
        weights={layer.name: random_weight(setting, layer, generator) for layer in shape.linear_layers},
        configs=configs,
        head=setting.random(generator, *setting.stack, shape.vocab_size, hidden, scale=hidden**-0.5),
        head_config=head,
        rotation=setting.random_fp32(generator, setting.context + nodes, 2, head_dim),
        positions=setting.context + inputs.rows["depths"],
        attention=inputs,
        plan=plan_tree_attention(**inputs.plan, **shape.attention, device=device, config=attention),
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
        stats=BlockStats.empty(rows, -(-shape.vocab_size // head.block_n), device),
    )


def _check(case: Case, config: Any) -> None:
    """Compare the results of `REPLAYS` runs of a captured chain with those of the chain without PDL, bit by bit.

    All memory is poisoned between runs, so that a kernel that reads too early does not find the previous results.
    """
    chain: Chain = case.inputs[0].arguments["chain"]
    if case.expected is None:
        chain.poison()
        case.expected = {name: tensor.clone() for name, tensor in case.run(LaunchConfig()).items()}
        finite = (case.expected["result.0"], case.expected["result.4"])
        assert all(tensor.isfinite().all() for tensor in finite), "the chain computes NaN or infinity"
    chain.poison()
    expected = case.expected
    _compare(case.run(config), expected)
    replay, repeats = _captured(case, config)
    for _ in range(repeats):
        chain.poison()
        _compare(replay(), expected)


def _captured(case: Case, config: Any) -> tuple[Callable[[], Results], int]:
    if case.device.type != "cuda":
        return (lambda: case.run(config)), 1
    results: list[Results] = []
    graph = captured(lambda: results.append(case.run(config)), GraphMemory.of(case.device))

    def replay() -> Results:
        graph.replay()
        return results[0]

    return replay, REPLAYS


def _compare(actual: Results, expected: Results) -> None:
    for index, (own, right) in enumerate(zip(actual.values(), expected.values(), strict=True)):
        assert same_bits(own, right), f"result {index} of the chain differs from that of the chain without PDL"


def _configs(case: Case) -> list[LaunchConfig]:
    return [LaunchConfig(), LaunchConfig(pdl=True)] if takes_pdl(case.device) else [LaunchConfig()]


def _cases(setting: Setting) -> list[Case]:
    """Return cases of a tree, with most of the weight, and of plain decoding."""
    shape, form = setting.shape, setting.shape.quantized
    head = setting.groups * shape.vocab_size * shape.hidden_size

    def case(nodes: int, weight: float) -> Case:
        layers = [layer_case(setting, layer, nodes) for layer in shape.linear_layers]
        return Case(
            PROGRAMMATIC_LAUNCH,
            setting,
            key_of(setting, hidden_size=shape.hidden_size, groups=setting.groups),
            f"nodes {nodes}" + (f", int{form.bits}" if form is not None else ""),
            lambda generator: Inputs({"chain": chain_of(setting, nodes, generator)}),
            LAYERS * sum(layer.bytes for layer in layers) + head * setting.dtype.itemsize,
            LAYERS * sum(layer.flops for layer in layers) + 2 * nodes * head,
            weight,
        )

    nodes = {1: PLAIN, setting.nodes: 1.0 - PLAIN} if setting.nodes > 1 else {1: 1.0}
    return [case(count, weight) for count, weight in nodes.items()]


PROGRAMMATIC_LAUNCH = Op(
    "programmatic_launch",
    lambda chain: chain.run(False),
    lambda chain, config: chain.run(bool(config.pdl)),
    _cases,
    _configs,
    check=_check,
)

OPS = (PROGRAMMATIC_LAUNCH,)
