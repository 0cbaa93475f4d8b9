"""Requests come and go: continuous batching, metrics, and what aborts, early leavers and Ctrl-C leave behind."""

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest

from tests.helpers.calls import by_the_host, calls_of, failing
from tests.helpers.models import greedy, open_llm, random_prompts, tiny, tiny_llm, tokens_of
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import around_steps, checked
from treespec import LLM, SpecConfig

TREE = SpecConfig(nodes=16, max_depth=5)


# --- continuous batching


def test_slots_are_refilled_at_once() -> None:
    """Plain decoding, one token a step: occupancy of every step is known."""
    llm = tiny_llm(ssms=(), max_num_seqs=2)
    with checked(llm) as running:
        a, b, c, d = llm.generate(random_prompts((2, 2, 2, 2)), [greedy(n) for n in (2, 5, 3, 1)], "off")
    names = {a.request_id: "a", b.request_id: "b", c.request_id: "c", d.request_id: "d"}
    # After each step: a ends in step 2, c enters in step 3 beside b; both end in step 5; d enters and ends in step 6.
    assert ["".join(sorted(names[r] for r in now)) for now in running] == ["ab", "b", "bc", "bc", "", ""]


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """Prompts are computed in chunks beside the decoding of others; every step stays within the prefill budget."""
    llm = tiny_llm(ssms=(0,), max_num_seqs=3, max_num_batched_tokens=16)
    with calls_of(llm.engine.runner, "prefill") as prefilled, checked(llm) as running:
        short, long, other = llm.generate(random_prompts((3, 100, 20)), [greedy(4), greedy(4), greedy(9)], "off")
    rows = [sum(counts) for _, counts in prefilled]
    assert max(rows) == 16 and sum(rows) == 2 + 99 + 19
    ended = [short.request_id not in now for now in running].index(True)
    assert ended == 3, "the short request did not wait for the long prompt"
    assert long.metrics.prefill_passes == 7  # at least half of the 16 rows from its second step on
    assert other.metrics.prefill_passes == 2
    assert all(m.target_passes == m.generated_tokens for m in (short.metrics, long.metrics, other.metrics))


def test_prompts_delay_other_requests_by_a_bounded_time() -> None:
    """Beside a request that decodes, a step has as many prompt rows as take 0.1 s at the last measured speed."""
    llm, rows = tiny_llm(ssms=(), max_num_seqs=2, max_num_batched_tokens=80), []
    scheduler = llm.engine.scheduler
    observe = scheduler.observe_prefill

    def slow(num_rows: int, seconds: float) -> None:
        rows.append(num_rows)
        observe(num_rows, num_rows * 0.1 / 50)

    with mock.patch.object(scheduler, "observe_prefill", slow):
        llm.generate(random_prompts((3, 220)), greedy(8), "off")
        assert rows == [80, 50, 50, 41], "nobody decodes beside the first 80"
        rows.clear()
        llm.generate(random_prompts((220,)), greedy(8), "off")
    assert rows == [80, 80, 59]


def test_ssms_read_a_prompt_in_parts_beside_other_requests() -> None:
    """They draft once they have read it; until then, the request is decoded without them."""
    llm, reads, reasons = open_llm(tiny()[0], tiny()[1][:1], max_num_seqs=2), [], []
    ssms = llm.engine.sources.ssms
    assert ssms is not None
    read = ssms.read

    def noting(*args: Any) -> None:
        before = ssms.drafted.read_tokens
        read(*args)
        reads.extend([ssms.drafted.read_tokens - before] if args[1] else [])

    prompts = random_prompts((2, 200))
    ssms.read = noting  # type: ignore[method-assign]
    with mock.patch("treespec.planning.planner.MAX_STALL", 40e-12):  # the engine's costs say 1e-12 s per token
        with llm.add_round_observer(lambda record: reasons.append(record.plain_reasons)):
            together = llm.generate(prompts, greedy(30))
        assert reads[0] == max(reads) == 40 and any("reading" in each for each in reasons)
        reads.clear()
        (alone,) = llm.generate(prompts[1:], greedy(30))
    assert max(reads) >= 199
    plain = llm.generate(prompts, greedy(30), "off")
    assert tokens_of([*together, alone]) == tokens_of([*plain, plain[1]])


# --- figures


def test_metrics_are_consistent() -> None:
    llm = tiny_llm()
    prompts = random_prompts((2, 30, 70))
    for spec in (TREE, SpecConfig(), "off"):
        for output in llm.generate(prompts, [greedy(n, seed=n) for n in (5, 17, 30)], spec):
            m = output.metrics
            assert m.generated_tokens == len(output.outputs[0].token_ids) == m.seed
            assert m.acceptance_length == m.generated_tokens / m.target_passes
            assert m.prefill_passes == 1
            assert m.ttft is not None and 0 < m.ttft <= m.seconds
            if spec == "off":
                assert m.acceptance_length == 1.0 and m.nodes_verified == m.target_passes
                assert m.accepted_by_source == {} == m.accepted_only_by_source


def test_stats_add_up() -> None:
    llm = open_llm(tiny()[0], tiny()[1], max_num_seqs=4, compile=False)
    assert llm.stats()["requests"] == llm.stats()["target_passes"] == llm.stats()["prefill_tokens"] == 0
    assert llm.stats()["acceptance_length"] == llm.stats()["acceptance_rate"] == 0.0
    outputs = llm.generate(random_prompts((1, 30, 70, 5, 9)), greedy(12), TREE)
    outputs += llm.generate(random_prompts((4, 8)), greedy(7), "off")
    stats = llm.stats()
    assert stats["requests"] == 7 and stats["failed_requests"] == 0
    for key in ("target_passes", "generated_tokens", "accepted_tokens", "nodes_verified"):
        assert stats[key] == sum(getattr(output.metrics, key) for output in outputs), key
    by_source = [Counter(output.metrics.accepted_by_source) for output in outputs]
    assert stats["accepted_by_source"] == sum(by_source, Counter())
    assert stats["prefill_tokens"] == sum(len(output.prompt_token_ids) - 1 for output in outputs)
    assert stats["acceptance_length"] == stats["generated_tokens"] / stats["target_passes"]
    assert stats["avg_tokens_per_round"] == stats["acceptance_length"]
    drafted = sum(output.metrics.nodes_verified - output.metrics.target_passes for output in outputs)
    assert 0 < stats["acceptance_rate"] == stats["accepted_tokens"] / drafted < 1
    assert stats["rounds"] >= max(output.metrics.target_passes for output in outputs)
    assert stats["drafts"] == ["ssm-1", "ssm-2", "ssm-3"]
    assert (stats["max_num_seqs"], stats["max_model_len"]) == (4, 256)
    frozen = stats["frozen"]
    assert frozen["dtype"] == "float32" and frozen["device"] == "cpu" and frozen["exact"] is True
    assert frozen["attention"] == "cpu-packed" and frozen["threads"] >= 1
    assert stats["memory"]["kv_cache"] == llm.engine.cache.nbytes
    before = llm.stats()
    before["accepted_by_source"].clear()
    assert llm.stats()["accepted_by_source"], "stats hands out its own books"


# --- leaving early


def test_abort_of_a_waiting_and_of_an_unknown_request() -> None:
    llm = tiny_llm(ssms=(), max_num_seqs=1)
    steps = itertools.count(1)

    @contextmanager
    def abort_before_the_second() -> Iterator[None]:
        if next(steps) == 2:
            llm.abort(llm.engine.scheduler.waiting[0].request_id)
            llm.abort("never heard of")
        yield

    with around_steps(llm, abort_before_the_second):
        a, b, c = llm.generate(random_prompts((3, 4, 5)), greedy(4))
    assert [o.outputs[0].finish_reason for o in (a, b, c)] == ["length", "abort", "length"]
    assert b.outputs[0].token_ids == [] and b.metrics.target_passes == 0 and b.metrics.acceptance_length == 0.0
    assert len(c.outputs[0].token_ids) == 4
    llm.abort(a.request_id)
    assert_clean(llm)


PLACES: dict[str, Callable[[LLM], tuple[Any, str]]] = {
    "prefill": lambda llm: (llm.engine.runner, "prefill"),
    "read": lambda llm: (llm.engine.sources.ssms, "prefill"),
    "copy": lambda llm: (llm.engine.cache, "copy_slots"),
    "fork": lambda llm: (llm.engine.sources.ssms, "fork"),
    "draft": lambda llm: (llm.engine.sources.ssms, "propose"),
    "forward": lambda llm: (llm.engine.runner, "logits"),
    "commit": lambda llm: (llm.engine.cache, "commit"),
    "native round": lambda llm: (llm.engine.host.rounds, "next"),
    "update": lambda llm: (llm.engine, "update"),
    "observe": lambda llm: (llm.engine.host.planner, "observe"),
}


def test_leaving_a_stream_frees_its_slot() -> None:
    llm = tiny_llm()
    for _ in llm.stream(random_prompts((30,))[0], greedy(60), TREE):
        assert len(llm.engine.scheduler.running) == 1
        break
    gc.collect()
    assert_clean(llm)
    stream = llm.stream(random_prompts((30,))[0], greedy(60), TREE)
    next(stream)
    stream.close()
    assert_clean(llm)
    never_started = llm.stream(random_prompts((30,))[0], greedy(60), TREE)
    del never_started
    assert_clean(llm)


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_frees_everything(place: str) -> None:
    llm, params = tiny_llm(), greedy(5, temperature=0.8, seed=1, n=2)
    steps = by_the_host(llm) if place in ("draft", "forward", "commit") else nullcontext()
    prompts = random_prompts((1, 30, 64, 70, 5, 5))  # four of twelve samples wait
    before = llm.stats()["requests"]

    with steps:
        with failing(*PLACES[place](llm), KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, TREE)
        assert_clean(llm)
        assert llm.stats()["requests"] == before + 2 * len(prompts)
        stream = llm.stream(prompts[1], greedy(40), TREE)
        next(stream)
        if place in ("draft", "forward", "commit", "native round", "update", "observe"):  # amid rounds
            with failing(*PLACES[place](llm), KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                list(stream)  # the planner observes several rounds together
        del stream
    assert_clean(llm)
    fresh = tiny_llm(max_num_seqs=4).generate(prompts, params, "off")
    assert tokens_of(llm.generate(prompts, params, TREE)) == tokens_of(fresh)
