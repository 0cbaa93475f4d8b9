"""The headline: trees give the tokens and the logits, bit for bit, of plain decoding."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import Run, assert_every_node_exact, assert_exact, run, threads
from tests.helpers.models import (
    OracleDrafter,
    at_fixed_costs,
    exact_in,
    exact_in_compiled,
    greedy,
    open_llm,
    quick,
    quick_start,
    random_prompts,
    replace_drafters,
    tiny,
    tiny_llm,
    wide,
)
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM, SpecConfig
from treespec.errors import ExactnessError
from treespec.models import attention
from treespec.models.decoder import Decoder
from treespec.startup.selftest import differing_rows
from treespec_kernels.attention import tree_attention_cpu
from treespec_kernels.linear.linear import Linear, onednn_available
from treespec_weights import default_names

SUBSETS = quick([(0,), (0, 1, 2)], [(0, 1, 2)])
LENGTHS = (1, 2, 9, 31, 50, 62, 63, 64, 65, 90, 126)  # 11 requests for 8 slots; outputs cross positions 64 and 128
TOKENS = 12
SPECS = {
    "naive": SpecConfig(nodes=5, verification="naive"),
    "16": SpecConfig(nodes=16),
    "40": SpecConfig(nodes=40, max_depth=4),
    "auto": SpecConfig(),
    "static 3-2-1": SpecConfig(branching=(3, 2, 1)),
    "static star": SpecConfig(branching=(12,)),
    "static chain": SpecConfig(branching=(1, 1, 1, 1, 1)),
    "rejection": SpecConfig(nodes=12, verification="rejection"),
    "traversal": SpecConfig(nodes=12, verification="traversal"),
}


exact_in_all_passes = pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        pytest.param(torch.float32, False, id="float32"),
        pytest.param(torch.bfloat16, False, id="bfloat16", marks=pytest.mark.slow),
        pytest.param(torch.float32, True, id="float32, compiled", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param(torch.bfloat16, True, id="bfloat16, compiled", marks=needs_compiler),
    ],
)


@functools.cache
def plain_run(
    dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, tokens: int = TOKENS, compiled: bool = False
) -> Run:
    """Plain decoding of the same prompts by an engine that has no drafts."""
    return run(tiny_llm(dtype, (), compile=compiled), random_prompts(lengths), greedy(tokens))


@exact_in_all_passes
@pytest.mark.parametrize("ssms", SUBSETS)
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype, ssms: tuple[int, ...], compiled: bool) -> None:
    plain, llm = plain_run(dtype, compiled=compiled), tiny_llm(dtype, ssms, compile=compiled)
    for name in SPECS if len(ssms) == 3 else ("16", "auto"):
        tree = assert_exact(llm, plain, SPECS[name])
        assert tree.acceptance_length > 1.2, f"{name}: nothing was accepted, so nothing was shown"


ENGINES: dict[str, dict[str, Any]] = {
    "chunks of one": {"max_num_batched_tokens": 1},
    "three at a time, chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 3},
    "gathered attention": {"attention": "cpu-gathered"},
}


@exact_in
@pytest.mark.parametrize("name", quick(ENGINES, ("three at a time, chunks of 7", "gathered attention")))
def test_max_num_batched_tokenss_batch_size_and_attention_change_nothing(dtype: torch.dtype, name: str) -> None:
    llm = tiny_llm(dtype, (0, 2), compile=False, **ENGINES[name])
    for spec in ("off", SPECS["16"]):
        assert_exact(llm, plain_run(dtype, (1, 62, 65, 126), 10), spec)


def test_float16_runs_with_a_fixed_row_count() -> None:
    """No row-invariant linear layers there: every pass is padded to one row count, also in a full batch of trees."""
    target, drafts = tiny(torch.float16)
    llm = open_llm(target, drafts[:1], dtype="float16", max_num_seqs=16)
    assert llm.config.dtype == torch.float16
    plain = run(llm, random_prompts([3 + i for i in range(16)]), greedy(6))
    assert assert_exact(llm, plain, SpecConfig(nodes=40, max_depth=3)).acceptance_length > 1.2


@pytest.mark.parametrize("count", quick((1, 2), (2,)))
@exact_in
def test_threads(dtype: torch.dtype, count: int) -> None:
    """Behind contexts of several tiles."""
    with threads(count):
        llm = wide_llm(dtype, count)
        plain = run(llm, random_prompts((700, 129, 5)), greedy(10))
        tree = assert_exact(llm, plain, SpecConfig(nodes=40, max_depth=4))
        assert tree.acceptance_length > 1.2


@functools.cache
def wide_llm(dtype: torch.dtype, count: int) -> LLM:
    """`count` keeps engines of different thread counts apart."""
    target, draft = wide(dtype)
    return open_llm(target, [draft], max_model_len=768, compile=False)


@exact_in_all_passes
def test_every_node_has_the_bits_of_plain_decoding(dtype: torch.dtype, compiled: bool) -> None:
    assert_every_node_exact(tiny_llm(dtype, compile=compiled), SPECS["40"])


@pytest.mark.parametrize("spec", quick(("off", "16", "auto"), ("16",)))
def test_company_in_the_batch_changes_nothing(spec: str) -> None:
    chosen = SPECS.get(spec, spec)
    llm, prompts = tiny_llm(compile=False), random_prompts((5, 64, 80))
    alone = [run(llm, [prompt], greedy(12), "off") for prompt in prompts]
    crowd = random_prompts((1, 70, 33, 128, 12, 64, 3, 9, 17), seed=9)
    for order in ([*prompts[::-1], *crowd], [crowd[0], prompts[1], *crowd, prompts[0], prompts[2]]):
        together = run(llm, order, [greedy(3 + i % 5 if p in crowd else 12) for i, p in enumerate(order)], chosen)
        assert not together.unequal
        for one in alone:
            assert together.tokens[order.index(one.prompts[0])] == one.tokens[0]
            assert all(torch.equal(together.logits[p], one.logits[p]) for p in one.logits)


@exact_in
@pytest.mark.parametrize("depth", quick((1, 4, 12), (4, 12)))
def test_an_oracle_loses_nothing(dtype: torch.dtype, depth: int) -> None:
    """The true continuation among wrong siblings: every pass emits depth + 1 tokens, until max_tokens cuts the last."""
    plain = oracle_truth(dtype)
    for wrong, bushy in ((0, False), (2, depth % 2 == 0)):
        oracle = OracleDrafter(plain.sequences, depth, wrong=wrong, bushy=bushy)
        llm = oracle_llm(dtype)
        replace_drafters(llm, oracle)
        tree = assert_exact(llm, plain, SpecConfig(nodes=64, max_depth=12))
        for output in tree.outputs:
            assert output.metrics.target_passes == -(-ORACLE_TOKENS // (depth + 1))
            assert output.metrics.accepted_by_source["oracle"] == ORACLE_TOKENS - output.metrics.target_passes
            assert oracle.committed[output.request_id][0] == depth + 1
        assert sorted(oracle.released) == sorted(output.request_id for output in tree.outputs)


ORACLE_TOKENS = 28


@functools.cache
def oracle_truth(dtype: torch.dtype) -> Run:
    return plain_run(dtype, (3, 30, 62, 64, 100), ORACLE_TOKENS)


@functools.cache
def oracle_llm(dtype: torch.dtype) -> LLM:
    return open_llm(tiny(dtype)[0], [OracleDrafter([], 1)], compile=False)


@pytest.mark.skipif("target" not in default_names(), reason="no embedded models in this checkout")
@exact_in_compiled
def test_the_embedded_models(dtype: torch.dtype) -> None:
    with quick_start(differing_rows):
        llm = LLM(device="cpu", dtype=dtype, max_model_len=256)
    at_fixed_costs(llm.engine.host.planner)
    prompts = ["def fibonacci(n):\n", "The result is"]
    ids = [llm.get_tokenizer().encode(prompt) for prompt in prompts]
    plain = run(llm, ids, greedy(16), "off")
    for spec in (SpecConfig(nodes=16), SpecConfig()):
        tree = assert_exact(llm, plain, spec)
    assert tree.acceptance_length > 1.2


# --- the self-test at start


def faulty_engine(*fault: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(*fault)
        linear = "onednn" if onednn_available(torch.float32) else "torch"  # asked for: nothing else is tried
        return open_llm(tiny()[0], prove=True, attention="cpu-packed", linear=linear)


def bits_by_rows(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A matrix product whose last bit depends on how many rows there are."""

    def product(self: Linear, x: Tensor, *rest: Any) -> Tensor:
        y = original(self, x, *rest)
        return y * (1 + 2**-22) if len(x) % 3 == 1 else y

    return product


def wrong_tiles(q: Tensor, *rest: Any) -> Tensor:
    """Attention whose sums depend on the number of rows."""
    out = tree_attention_cpu.tree_attention_cpu(q, *rest)
    return out * (1 + 2**-22) if len(q) > 8 else out


@pytest.mark.slow
def test_the_self_test_refuses_what_is_not_exact() -> None:
    assert faulty_engine().config.exact
    faults: list[tuple[Any, Any, Any]] = [
        (Linear, "__call__", bits_by_rows(Linear.__call__)),
        (Linear, "activated", bits_by_rows(Linear.activated)),
        (attention.CpuAttention, "__call__", staticmethod(wrong_tiles)),
        (Decoder, "logits", lambda self, hidden, rows=None, f=Decoder.logits: f(self, hidden, rows) * len(hidden)),
    ]
    for fault in faults:
        with pytest.raises(ExactnessError, match="plain decoding"):
            faulty_engine(*fault)
