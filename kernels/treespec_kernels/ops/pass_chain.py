"""Entry of programmatic dependent launch (`launch/predecessors.py`): the kernels of a pass, with and without PDL."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treespec_kernels.attention.qkv_rope import qkv_rope_triton
from treespec_kernels.attention.tree_attention import TreeAttentionConfig, plan_tree_attention, tree_attention_triton
from treespec_kernels.comparison import same_bits
from treespec_kernels.launch.graph_capture import GraphMemory, capture_replay
from treespec_kernels.launch.triton_launch import LaunchConfig, is_interpreted, takes_pdl
from treespec_kernels.linear.lm_head import BlockStats, LmHeadConfig, lm_head_triton
from treespec_kernels.linear.rms_norm import Norm, rms_norm_triton
from treespec_kernels.linear.row_linear import row_linear_partials_triton, row_linear_triton
from treespec_kernels.ops.linear import EPS, PLAIN, QUANTIZED_ROW_LINEAR, ROW_LINEAR, key_of, layer_case, random_weight
from treespec_kernels.ops.op import Case, Inputs, Op
from treespec_kernels.ops.shapes import PAGE_SIZE, Setting
from treespec_kernels.tuning.testing import tree_attention_inputs, tree_parents

LAYERS = 4
REPLAYS = 50  # runs of the check, with all memory poisoned in between


class PassChain:
    """Some layers of a Llama and its LM head, over one random tree for each stacked model.

    All layers share weights and buffers, so that kernels overwrite memory that others have just read.
    """

    def __init__(self, setting: Setting, nodes: int, layers: Mapping[str, Case], generator: torch.Generator):
        """Create the weights, tables and buffers. `layers`: cases of the linear layers, by name."""
        shape, device, groups = setting.shape, setting.device, setting.groups
        hidden, head_dim, rows = shape.hidden_size, shape.head_dim, groups * nodes
        self.setting, self.nodes = setting, nodes
        self.configs = {name: case.default for name, case in layers.items()}
        self.weights = {layer.name: random_weight(setting, layer, generator) for layer in shape.linear_layers}
        self.start = setting.random(generator, rows, hidden)  # the residual stream before the first layer
        self.norm = Norm(setting.random(generator, *setting.stack, hidden), EPS)
        self.head = setting.random(generator, *setting.stack, shape.vocab_size, hidden, scale=hidden**-0.5)
        self.head_config = LmHeadConfig.default(setting.dtype, shape.vocab_size, hidden, setting.target)
        if is_interpreted():
            self.head_config = replace(self.head_config, block_m=16, block_n=64, block_k=64)
        seed = generator.initial_seed()
        host = torch.Generator().manual_seed(seed)
        trees = [tree_parents("random", nodes, host) for _ in range(groups)]
        inputs = tree_attention_inputs([setting.context] * groups, trees, shape.attention, device=device, seed=seed)
        attention = TreeAttentionConfig.default(setting.dtype, head_dim, setting.target)
        self.attention = inputs.rows
        self.plan = plan_tree_attention(**inputs.plan, shape=shape.attention, device=device, config=attention)
        self.rotation = setting.random_fp32(generator, setting.context + nodes, 2, head_dim)
        self.positions = setting.context + inputs.rows["depths"]
        slots = setting.context + torch.arange(nodes, device=device).repeat(groups)
        pages = inputs.rows["page_table"][inputs.rows["row_request"].long(), slots // PAGE_SIZE].long()
        self.pages, self.offsets = pages, slots % PAGE_SIZE
        self.slots = pages * PAGE_SIZE + self.offsets
        self.kv_layer = torch.stack([inputs.k_cache, inputs.v_cache])
        empty = partial(torch.empty, dtype=setting.dtype, device=device)
        self.stream, self.normed = empty(rows, hidden), empty(rows, hidden)
        self.q, self.mixed = (empty(rows, shape.num_heads, head_dim) for _ in range(2))
        self.inner, self.logits = empty(rows, shape.intermediate_size), empty(rows, shape.vocab_size)
        width = max(layer.out_features * self.configs[layer.name].split_k for layer in shape.linear_layers)
        self.partials = torch.empty(rows * width, dtype=torch.float32, device=device)
        self.stats = BlockStats.empty(rows, -(-shape.vocab_size // self.head_config.block_n), device)

    def poison(self) -> None:
        """Fill the buffers that a run writes before reading with values that differ from all results."""
        rows = self.stream, self.normed, self.partials, self.q, self.mixed, self.inner, self.logits
        for tensor in (*rows, *self.stats, *self.plan.partials):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        self.kv_layer[:, self.pages, :, self.offsets] = torch.nan

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        """The residual stream, its norm, the last attention output, the KV cache, and the LM head's results."""
        return self.stream, self.normed, self.mixed, self.kv_layer, self.logits, *self.stats

    def run(self, pdl: bool) -> tuple[torch.Tensor, ...]:
        """Run the passes' kernels, and return `results`."""
        cache, shape = self.kv_layer, self.setting.shape
        self.stream.copy_(self.start)  # the first launch follows a copy
        rms_norm_triton(self.stream, self.norm, out=self.normed, pdl=pdl)
        for _ in range(LAYERS):
            qkv = self._partials("qkv", self.normed, pdl)
            qkv_rope_triton(qkv, self.rotation, self.positions, self.slots, cache, self.q, pdl=pdl)
            tree_attention_triton(self.q, *cache, **self.attention, plan=self.plan, out=self.mixed, pdl=pdl)
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
        return self.results

    def _partials(self, name: str, x: torch.Tensor, pdl: bool) -> torch.Tensor:
        x, weight = self._grouped(x), self.weights[name]
        return row_linear_partials_triton(x, weight, config=self.configs[name], workspace=self.partials, pdl=pdl)

    def _add(self, name: str, x: torch.Tensor, pdl: bool) -> None:
        """Add a layer's product to the residual stream, and normalise the sum."""
        product = self._partials(name, x, pdl)
        rms_norm_triton(product, self.norm, residual=self.stream, out=self.normed, pdl=pdl)

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """View [groups * rows, n] as [groups, rows, n]; unchanged for one model."""
        return x if self.setting.groups == 1 else x.view(self.setting.groups, self.nodes, -1)


def _check(case: Case, config: Any) -> None:
    """Compare the results of `REPLAYS` runs of a captured chain with the chain without PDL, bit by bit.

    All memory is poisoned between runs, so a kernel that reads too early does not find the previous results.
    """
    chain: PassChain = case.inputs[0].arguments["chain"]
    if case.expected is None:
        chain.poison()
        case.expected = {name: tensor.clone() for name, tensor in case.run(LaunchConfig()).items()}
        finite = (case.expected["result.0"], case.expected["result.4"])
        assert all(tensor.isfinite().all() for tensor in finite), "the chain computes NaN or infinity"
    _poison_and_compare(case, lambda: case.run(config))
    if case.device.type == "cuda":
        replay = capture_replay(lambda: case.run(config), GraphMemory.of(case.device))
        for _ in range(REPLAYS):
            _poison_and_compare(case, replay)


def _poison_and_compare(case: Case, run: Callable[[], object]) -> None:
    chain: PassChain = case.inputs[0].arguments["chain"]
    chain.poison()
    run()
    assert case.expected is not None
    for index, (actual, expected) in enumerate(zip(chain.results, case.expected.values(), strict=True)):
        assert same_bits(actual, expected), f"result {index} of the chain differs from the chain without PDL"


def _configs(case: Case) -> list[LaunchConfig]:
    return [LaunchConfig(), LaunchConfig(pdl=True)] if takes_pdl(case.device) else [LaunchConfig()]


def _cases(op: Op, setting: Setting) -> list[Case]:
    """Return cases of a tree (with most of the weight) and of plain decoding."""
    shape, form, groups = setting.shape, setting.shape.quantized, setting.groups
    key = key_of(setting, hidden_size=shape.hidden_size, groups=groups)
    head = groups * shape.vocab_size * shape.hidden_size * setting.dtype.itemsize
    linear = ROW_LINEAR if form is None else QUANTIZED_ROW_LINEAR

    def case(nodes: int, weight: float) -> Case:
        layers = {layer.name: layer_case(linear, setting, layer, nodes) for layer in shape.linear_layers}
        load = f"nodes {nodes}" + (f", int{form.bits}" if form is not None else "")
        moved = LAYERS * sum(layer.bytes for layer in layers.values()) + head

        def make(generator: torch.Generator) -> Inputs:
            return Inputs({"chain": PassChain(setting, nodes, layers, generator)})

        return Case(op, setting, key, load, make, moved, weight)

    return [case(1, PLAIN), case(setting.nodes, 1.0 - PLAIN)] if setting.nodes > 1 else [case(1, 1.0)]


PROGRAMMATIC_LAUNCH = Op(
    "programmatic_launch",
    lambda chain: chain.run(False),
    lambda chain, config: chain.run(bool(config.pdl)),
    _cases,
    _configs,
    check=_check,
)

OPS = (PROGRAMMATIC_LAUNCH,)
