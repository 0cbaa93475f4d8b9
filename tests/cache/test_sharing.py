"""Samples of one prompt share its pages: the same tokens and bits, fewer pages, and no write that another would see."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_poison import POISON, poisoned
from tests.helpers.exactness import differences
from tests.helpers.models import exact_in, open_llm, quick, random_prompts, tiny, tiny_llm
from tests.helpers.sharing import Driven, assert_clean, drive, few_pages, guarded, part_ways, samples
from treespec import LLM, SpecConfig
from treespec.cache.kv_cache import pages_for
from treespec.request import Request
from treespec.tree import TokenTree

LENGTHS = (1, 63, 64, 130)
COUNTS = (3, 8, 5, 6, 1)  # more than run at a time, and the leader ends first
NODES = SpecConfig(nodes=8, max_depth=3, sources=("ssm",))  # what it drafts depends on the SSMs alone
ALL: tuple[int, ...] = (0, 1, 2)


def compare(
    llm: LLM, prompt: list[int], spec: Any, counts: Any = COUNTS, crowded: bool = False
) -> tuple[Driven, Driven, list[Request]]:
    """Drive samples on their own and as a group, `crowded` in pages for the largest: what they saw, and the group's.
    Their tokens and bits are the same."""
    alone = drive(llm, samples(llm, prompt, counts, spec, group=False))
    group = samples(llm, prompt, counts, spec)
    largest = pages_for(max(map(llm.engine.scheduler.slots_needed, group)))
    with few_pages(llm, largest) if crowded else nullcontext():
        shared = drive(llm, group)
    assert differences(alone, shared) == []
    assert_clean(llm)
    return alone, shared, group


@exact_in
@pytest.mark.parametrize(
    "ssms, spec",
    [((), "off"), ((), SpecConfig(nodes=8)), (ALL, NODES), (ALL, SpecConfig())],
    ids=["plain", "lookup", "nodes", "auto"],
)
@pytest.mark.parametrize("length", quick(LENGTHS, (64, 130)))
def test_tokens_and_bits_are_those_of_samples_on_their_own(
    length: int, ssms: tuple[int, ...], spec: Any, dtype: torch.dtype
) -> None:
    llm = tiny_llm(dtype, ssms, max_num_seqs=3)
    before = llm.stats()["prefill_tokens"]
    alone, shared, group = compare(llm, random_prompts((length,), seed=length)[0], spec)
    assert [request.num_generated for request in group] == list(COUNTS)
    assert len({tuple(request.tokens[:-1]) for request in group}) > 1, "the samples all say the same"
    assert [request.prefill_passes for request in group] == [int(length > 1)] + [0] * (len(group) - 1)
    assert llm.stats()["prefill_tokens"] - before == (len(group) + 1) * (length - 1)
    if spec == NODES:  # the SSMs' K/V and mixture weights are the same too: so are their trees
        assert alone.logits.keys() == shared.logits.keys()


@pytest.mark.parametrize("spec", ["off", NODES], ids=["off", "nodes"])
def test_fewer_pages_are_held(spec: Any) -> None:
    llm = tiny_llm(max_num_seqs=3)
    alone, shared, _ = compare(llm, random_prompts((200,))[0], spec, (9, 12, 15))
    assert alone.peak - shared.peak == 2 * 3, "two of three samples share three full pages"
    assert max(map(len, shared.running)) == 3


def test_samples_wait_for_the_prompt_and_let_others_pass() -> None:
    llm = tiny_llm(ssms=(), max_num_seqs=4, max_num_batched_tokens=32)
    group = samples(llm, random_prompts((100,))[0], (6,) * 5)
    (other,) = samples(llm, [5, 6], (30,), group=False)
    driven = drive(llm, [*group, other])
    assert all(now == [group[0], other] for now in driven.running[:4])
    assert driven.running[4] == [group[0], other, group[1], group[2]]
    assert [request.prefill_passes for request in group] == [4, 0, 0, 0, 0]
    assert_clean(llm)


@pytest.mark.parametrize("length", quick((1, 65, 130), (65,)))
@pytest.mark.parametrize("spec", ["off", NODES], ids=["off", "nodes"])
def test_one_at_a_time_in_pages_for_one(length: int, spec: Any) -> None:
    """The pages that the group keeps are the next sample's own: nothing is computed twice, and nothing is stuck."""
    llm = tiny_llm(max_num_seqs=1)
    _, _, group = compare(llm, random_prompts((length,), seed=3)[0], spec, (5, 9, 2, 7), crowded=True)
    assert sum(request.prefill_passes for request in group) == (length > 1)


def test_kept_pages_do_not_block_an_earlier_request() -> None:
    """A request between two samples needs every page: the second sample computes the prompt anew."""
    llm = tiny_llm(max_num_seqs=2)
    first, second = samples(llm, random_prompts((130,))[0], (3, 8), NODES)
    (large,) = samples(llm, random_prompts((150,))[0], (60,), NODES, group=False)
    with few_pages(llm, pages_for(llm.engine.scheduler.slots_needed(large))):
        driven = drive(llm, [first, large, second], lambda *_: None)
    assert all(len(now) <= 1 for now in driven.running)
    assert first.finished_at < large.first_token_at < large.finished_at < second.first_token_at
    assert (first.prefill_passes, second.prefill_passes) == (1, 1)
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert_clean(llm)


@pytest.mark.parametrize("when", quick((1, 3, 4, 6), (1, 4)))
@pytest.mark.parametrize("who", [[0], [0, 1, 2], [3, 4, 5]])
@pytest.mark.parametrize("seqs", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_aborts(who: list[int], when: int, seqs: int) -> None:
    llm = tiny_llm(ssms=(0,), max_num_seqs=seqs, max_num_batched_tokens=64)
    prompt = random_prompts((130,), seed=5)[0]
    group, steps = samples(llm, prompt, (9,) * 6, NODES), 0
    with guarded(llm), pytest.MonkeyPatch.context() as patch:
        checked = llm.engine.step

        def step_then_abort() -> Any:
            nonlocal steps
            touched, steps = checked(), steps + 1
            for sample in who if steps == when else ():
                llm.abort(group[sample].request_id)
                llm.engine.cache.check_integrity()
                llm.engine.scheduler.check_integrity()
            return touched

        patch.setattr(llm.engine, "step", step_then_abort)
        for _ in llm.rounds.run(group):
            pass
    truth = max((request.tokens for request in group), key=len)
    for request in group:
        gone = request.finish_reason == "abort"
        assert gone or len(request.tokens) == 139
        assert request.tokens == truth[: len(request.tokens)]
        assert not gone or request.sample in who
    computed_by = [request.sample for request in group if request.prefill_passes]
    assert len(computed_by) == 1 + (who[0] == 0 and when < 3), "only a leader that left too early is replaced"
    assert_clean(llm)


# --- errors


def failing(sample: int, at: int) -> Any:
    """Noise, and NaN instead of a sample's token number `at`."""

    def change(request: Request, tree: TokenTree, logits: Tensor) -> None:
        part_ways(request, tree, logits)
        if request.sample == sample and request.group is not None:
            logits[torch.from_numpy(request.num_generated + tree.depths >= at)] = float("nan")

    return change


@pytest.mark.parametrize("seqs", quick((1, 3), (3,)))
@pytest.mark.parametrize("sample, at", [(0, 0), (0, 3), (1, 0), (1, 2)])
def test_errors(sample: int, at: int, seqs: int) -> None:
    llm = tiny_llm(ssms=(0, 1), max_num_seqs=seqs)
    prompt = random_prompts((100,), seed=6)[0]
    own, group = (samples(llm, prompt, (8,) * 5, NODES, group=each) for each in (False, True))
    drive(llm, own)
    drive(llm, group, failing(sample, at))
    for a, b in zip(own, group, strict=True):
        assert b.finish_reason == ("error" if b.sample == sample else "length")
        assert b.tokens == a.tokens[: 100 + (at if b.sample == sample else 8)]
    assert [b.prefill_passes for b in group] == ([1, 1, 0, 0, 0] if (sample, at) == (0, 0) else [1, 0, 0, 0, 0])
    assert_clean(llm)


@pytest.mark.parametrize("seqs", [1, 3])
def test_nan_behind_the_prompt_stays_with_its_sample(seqs: int) -> None:
    """The leader says a token whose K/V are NaN, in the page that holds the end of the prompt."""
    llm = poisoned(open_llm(tiny()[0], tiny()[1][:1], max_num_seqs=seqs))
    prompt = random_prompts((100,), seed=7, vocab=POISON)[0]

    def say_it(request: Request, tree: TokenTree, logits: Tensor) -> None:
        if request.sample == 0 and request.group is not None:
            logits[torch.from_numpy(request.num_generated + tree.depths == 1), POISON] = 1e4

    own, group = (samples(llm, prompt, (8,) * 4, NODES, group=each) for each in (False, True))
    drive(llm, own, say_it)
    drive(llm, group, say_it)
    assert group[0].finish_reason == "error" and group[0].tokens[-1] == POISON
    assert [b.tokens for b in group[1:]] == [a.tokens for a in own[1:]]
    assert [b.prefill_passes for b in group] == [1, 0, 0, 0]
    assert_clean(llm)


def test_a_poisoned_prompt_fails_every_sample_and_nobody_else() -> None:
    llm = poisoned(open_llm(tiny()[0], tiny()[1][:1], max_num_seqs=3))
    prompt, good = random_prompts((100, 70), seed=8, vocab=POISON)
    (before,) = samples(llm, good, (8,), NODES, group=False)
    drive(llm, [before])
    group, others = samples(llm, [*prompt, POISON, *prompt[:20]], (8,) * 4, NODES), samples(llm, good, (8, 8), NODES)
    drive(llm, [*group, *others])
    assert [request.finish_reason for request in group] == ["error"] * 4
    assert [request.prefill_passes for request in group] == [1] * 4, "nobody forks from a prompt that failed"
    assert others[0].tokens == before.tokens
    assert_clean(llm)
