"""Captured target passes of rounds that go step by step, on a simulated GPU."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.calls import failing
from tests.helpers.drafting import make_target
from tests.helpers.heads_made import TargetShape, write_eagle3
from tests.helpers.models import OracleDrafter, greedy, make_llama, new_folder, open_llm, tokens_of
from tests.interpreted.engines import LONG, ON_GPU, PROMPTS, SHORT, TREES, step_by_step, told
from tests.simulated_gpu import Gpu, simulated_gpu
from treespec import LLM, SamplingParams, SpecConfig
from treespec.drawing.recording import watch
from treespec.graphs import batch_round, target_pass
from treespec.graphs.stack_passes import TreePass
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.launch.switches import without
from treespec_kernels.linear.lm_head import LmHead


def unchanged(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor, which captured rounds do not serve."""
    return logits


def by_steps(count: int, **params: Any) -> SamplingParams:
    return greedy(count, logits_processors=[unchanged], **params)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    """One for all cases, as its engine must not outlive it."""
    with simulated_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def target(gpu: Gpu) -> Path:
    return make_llama(new_folder("passes") / "target", 0, torch.float16, **LONG)


def written(target: Path, prompts: list[list[int]] = SHORT, **options: Any) -> list[list[int]]:
    llm = open_llm(target, [], spec="off", **options, **ON_GPU)
    return tokens_of(llm.generate(prompts, greedy(6)))


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    """Behind `SHORT`."""
    return written(target)


def with_a_drafter(
    target: Path,
    plain: list[list[int]],
    depth: int = 2,
    wrong: int = 2,
    prompts: list[list[int]] = SHORT,
    **options: Any,
) -> LLM:
    """An engine whose rounds go step by step, with a drafter that knows the output."""
    oracle = OracleDrafter([[*p, *tokens] for p, tokens in zip(prompts, plain, strict=True)], depth, wrong, vocab=64)
    llm = open_llm(target, [oracle], spec=TREES, max_num_seqs=2, **options, **ON_GPU)
    for source in llm.engine.sources.others:
        source.is_captured = False  # like a draft with another tokenizer
    return llm


def test_trees_of_a_drafter(gpu: Gpu, target: Path) -> None:
    """Log-probabilities show every bit of the logits; a request leaves the batch before the other."""
    plain = written(target, PROMPTS)
    llm = with_a_drafter(target, plain, prompts=PROMPTS)
    passes = llm.engine.runner.captured
    params = [by_steps(3, logprobs=3), by_steps(6, logprobs=3, temperature=0.8, seed=5)]
    with without("captured_passes"):
        expected = told(llm, PROMPTS, params, TREES)
    assert passes.num_graphs == 0
    assert told(llm, PROMPTS, params, TREES) == expected
    before = gpu.replays
    outputs = llm.generate(PROMPTS, greedy(6), spec=TREES)
    assert tokens_of(outputs) == plain and all(output.metrics.acceptance_length > 1.5 for output in outputs)
    assert gpu.replays > before
    found = passes.num_graphs
    gpu.launches.backwards = True
    assert tokens_of(llm.generate(PROMPTS, greedy(6), spec=TREES)) == plain
    gpu.launches.backwards = False
    assert passes.num_graphs == found > 0
    llm.engine.check_integrity()


@pytest.mark.parametrize("options", [{"exact": False}, {"quantization": "int8"}], ids=["vendor products", "int8"])
def test_other_products(target: Path, options: dict[str, Any]) -> None:
    plain = written(target, **options)
    llm = with_a_drafter(target, plain, **options)
    outputs = llm.generate(SHORT, greedy(6), spec=TREES)
    assert tokens_of(outputs) == plain and all(output.metrics.acceptance_length > 1.5 for output in outputs)
    assert llm.engine.runner.captured.num_graphs > 0


def test_trees_that_are_too_large_for_graphs(target: Path, plain: list[list[int]]) -> None:
    """The engine was built for 8 nodes and depth 2; a call may ask for more."""
    llm = with_a_drafter(target, plain, 4, wrong=4)
    limits = llm.engine.captured.rounds.limits
    assert limits.nodes[-1] == 8 and limits.max_depth == 2
    for larger in (SpecConfig(nodes=12, max_depth=2), SpecConfig(nodes=8, max_depth=4)):
        with watch(llm.engine) as rounds:
            assert tokens_of(llm.generate(SHORT, greedy(6), spec=larger)) == plain
        assert any(len(each.tree) > 8 or each.tree.depths.max() > 2 for each in rounds)
    llm.engine.check_integrity()


def test_states_that_a_head_reads(gpu: Gpu) -> None:
    shape = TargetShape(32, 48, 2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    target, head = make_target(shape, torch.float16), new_folder("head")
    write_eagle3(head, shape, layout="specforge", seed=1, draft_vocab=48, own_embedding=False, boundaries=(0, 1))
    llm = open_llm(target, [head], spec=TREES, max_num_seqs=2, **ON_GPU)
    spec = SpecConfig(nodes=8, max_depth=2, sources=("ssm",))
    passes, llm.engine.runner.captured = llm.engine.runner.captured, None

    def run() -> list[Any]:
        outputs = llm.generate(SHORT[1:], by_steps(4), spec=spec)
        return [(o.outputs[0].token_ids, o.metrics.accepted_by_source, o.metrics.target_passes) for o in outputs]

    expected = run()
    llm.engine.runner.captured = passes
    assert run() == expected and passes.num_graphs > 0


@pytest.mark.parametrize("raises", [False, True])
def test_where_graphs_do_not_run(
    target: Path, plain: list[list[int]], raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokens are right, and what a graph left in the cache is overwritten."""
    llm = with_a_drafter(target, plain)
    fails = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    logits = TreePass.logits

    def differing(*rows: Any) -> LmHead:
        found = logits(*rows)
        [request] = llm.engine.scheduler.running
        page, offset = divmod(request.context_len, PAGE_SIZE)
        llm.engine.cache.pools[0][:, :, request.pages[page], :, offset:] = torch.nan
        return found._replace(logits=found.logits + 1)

    planted = (target_pass, "run_then_capture", fails) if raises else (TreePass, "logits", differing)
    with mock.patch.object(*planted), caplog.at_level(logging.WARNING, "treespec"):
        first = llm.generate(SHORT[:1], greedy(1), spec=TREES)
    assert tokens_of(first) == [plain[0][:1]]
    assert ("cannot capture" if raises else "differs in bits") in caplog.text
    assert llm.engine.runner.captured.num_graphs == 0
    assert tokens_of(llm.generate(SHORT, greedy(6), spec=TREES)) == plain


def test_a_graph_that_cannot_be_captured_later(
    gpu: Gpu, target: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The round has run by then, so nothing is lost; others keep their graphs, and its launches are made one by one."""
    llm = open_llm(target, [], spec="off", max_num_seqs=2, **ON_GPU)
    expected = [tokens[:3] for tokens in plain]
    assert tokens_of(llm.generate(SHORT, greedy(3))) == expected
    full = torch.OutOfMemoryError("CUDA out of memory")
    params = greedy(3, temperature=0.8, seed=3)
    with failing(batch_round, "capture_replay", full) as captures, caplog.at_level(logging.WARNING, "treespec"):
        sampled = tokens_of(llm.generate(SHORT, params))
        calls = captures.call_count
        assert calls and "cannot capture" in caplog.text
        assert tokens_of(llm.generate(SHORT, params)) == sampled
        before = gpu.replays
        assert tokens_of(llm.generate(SHORT, greedy(3))) == expected and gpu.replays > before
    assert captures.call_count == calls
    with step_by_step(llm):
        assert tokens_of(llm.generate(SHORT, params)) == sampled
    llm.engine.check_integrity()


def test_max_num_batched_tokenss_by_free_memory(gpu: Gpu) -> None:
    """Larger chunks if their buffers, mostly logits, leave the memory to the cache; 512 rows in any case."""
    target = make_llama(new_folder("wide") / "target", 0, torch.float16, **(LONG | {"vocab_size": 150_000}))
    chunks = []
    for gib in (1.7, 1.9, 8.0):
        gpu.free = int(gib * 2**30)
        llm = open_llm(target, [], spec="off", max_num_seqs=1, **ON_GPU)
        chunks.append(llm.config.max_num_batched_tokens)
    assert chunks == [512, 1024, 2048]
