"""The engine of captured rounds: what it makes of their results, with rounds that are scripted."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.helpers.models import (
    OracleDrafter,
    at_fixed_costs,
    drafting_by,
    greedy,
    open_llm,
    random_prompts,
    tiny,
    tokens_of,
)
from treespec import LLM, LLMEngine, SamplingParams, SpecConfig
from treespec.drafters.ssm.captured_ssms import CapturedSsms
from treespec.engine.executor import StageClock
from treespec.errors import DraftError
from treespec.graphs.graph_executor import GraphExecutor
from treespec.graphs.round_inputs import RoundInput, RoundLimits
from treespec.graphs.sampling_state import SamplingState
from treespec.graphs.verify_stage import RoundResult
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve, RoundSeconds
from treespec.request import Request
from treespec.text.prompt_tokenizer import Tokenization
from treespec.tree import TokenTree
from treespec_kernels.tree.device_trees import SEED_BIT

NODES = (1, 8)
CURVE = CostCurve(NODES, (1.0, 1.1), 0.1)
CHAINS = SpecConfig(nodes=8, sources=("ssm",))


class ScriptedRounds:
    """Rounds that know what the target would say, `accepts` tokens at a time in chains of the first SSM; None: NaN."""

    limits = RoundLimits(4, NODES, 99, 256)
    sampling = SamplingState(2, 512, torch.device("cpu"), limits.width)
    has_captured = has_followed = in_flight = False
    knows = 0.5, 0.5  # what each SSM gave to the tokens that it read

    def __init__(self, truths: Sequence[tuple[list[int], list[int]]], accepts: int | None):
        self.truths, self.accepts = truths, accepts  # prompts, and these with what follows
        self.texts_by_page: dict[int, list[int]] = {}
        self.planners = {2: at_fixed_costs(Planner(CURVE, self.limits))}
        self.seen: list[tuple[list[RoundInput], int, int]] = []
        self.proposals: list[list[TokenTree | None]] = []  # by round
        self.followed: list[int] = []  # numbers of the rounds behind which the next one was launched

    def size_for(self, num_requests: int) -> int:
        return 2

    def round_for(self, size: int, context: int) -> "ScriptedRounds":
        assert context <= self.limits.max_context
        return self

    def draft(
        self,
        requests: Sequence[RoundInput],
        levels: int,
        nodes: int,
        logprobs: bool,
        search: Callable[[], Sequence[TokenTree | None]] | None,
    ) -> None:
        proposals = [None] * len(requests) if search is None else list(search())
        self.proposals.append(proposals)
        self.seen.append((list(requests), levels, nodes))
        self._results = [self.result(*row, levels) for row in zip(requests, proposals, strict=True)]
        self.in_flight = True

    def verify(self) -> Callable[[], list[RoundResult]]:
        results = self._results

        def read() -> list[RoundResult]:
            self.in_flight = False
            return results

        return read

    def launch_following(self) -> None:
        self.followed.append(len(self.seen))

    def seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

    def result(self, request: RoundInput, proposal: TokenTree | None, levels: int) -> RoundResult:
        knows = np.array(self.knows[: len(request.weights)], dtype=np.float32)
        read_probs = np.repeat(knows[:, None], len(request.new_tokens) - 1, 1)
        if self.accepts is None:
            return chain([0, 0], 0, read_probs)._replace(path=np.zeros(0, dtype=np.int64))
        at = request.context_len + 1
        if request.pages[0] not in self.texts_by_page:  # its first round: all that is there is the prompt
            self.texts_by_page[request.pages[0]] = next(text for prompt, text in self.truths if len(prompt) == at)
        rest = self.texts_by_page[request.pages[0]]
        assert rest[at - len(request.new_tokens) : at] == request.new_tokens
        drafted = min(self.accepts, levels, request.max_depth)
        return chain(rest[at - 1 : at + drafted + 1], 1, read_probs)


def chain(tokens: Sequence[int], mask: int, read_probs: np.ndarray) -> RoundResult:
    """A result whose tree is a chain that is accepted to its end; the last token is the target's own."""
    nodes = np.arange(len(tokens) - 1)
    masks = [0] + [mask] * (len(nodes) - 1)
    values = (0.9**nodes).astype(np.float32).view(np.int32)
    rows = np.array([tokens[:-1], nodes - 1, nodes, masks, values], dtype=np.int32)
    return RoundResult(rows, nodes, list(tokens[1:]), read_probs)


class SeededRounds(ScriptedRounds):
    """Rounds in which the SSMs say nothing: what is accepted is what the seeds have right."""

    def result(self, request: RoundInput, proposal: TokenTree | None, levels: int) -> RoundResult:
        self.accepts = levels
        result = super().result(request, proposal, levels)
        text = [int(result.rows[0, 0]), *result.tokens]
        right = 0 if proposal is None else len(proposal.match(text[1:])) - 1
        most = min(right, levels, request.max_depth)
        return chain(text[: most + 2], 1 << SEED_BIT, result.read_probs)


def scripted(
    accepts: int | None, made: type[ScriptedRounds] = ScriptedRounds, **options: Any
) -> tuple[LLM, ScriptedRounds, list[list[int]], list[list[int]]]:
    """An engine with scripted rounds over `tiny`, prompts, and what plain decoding says after them."""
    llm, prompts, plain = engine_of(**options)
    rounds = made([(p, p + t) for p, t in zip(prompts, plain, strict=True)], accepts)
    engine = llm.engine
    captured = GraphExecutor(engine.runner, engine.sources, rounds, engine.host.max_model_len)  # type: ignore[arg-type]
    engine.captured, engine.executors[:] = captured, [captured, *engine.executors[-1:]]
    return llm, rounds, prompts, plain


@functools.cache
def engine_of(**options: Any) -> tuple[LLM, list[list[int]], list[list[int]]]:
    """The same for all tests but for its rounds."""
    target, drafts = tiny()
    llm, prompts = open_llm(target, drafts[:2], max_num_seqs=2, **options), random_prompts([5, 9])
    return llm, prompts, tokens_of(llm.generate(prompts, greedy(40), spec="off"))


@pytest.mark.parametrize("accepts", [0, 1, 3])
def test_what_rounds_emit_reaches_the_requests(accepts: int) -> None:
    llm, rounds, prompts, plain = scripted(accepts)
    outputs = llm.generate(prompts, greedy(21), spec=CHAINS)
    assert tokens_of(outputs) == [tokens[:21] for tokens in plain]
    assert all(levels == 4 and nodes == 8 for _, levels, nodes in rounds.seen[:-4])
    assert all(len(each.new_tokens) <= rounds.limits.width for requests, _, _ in rounds.seen for each in requests)
    for output in outputs:
        metrics = output.metrics
        assert metrics.generated_tokens == 21
        assert metrics.target_passes == -(-21 // (accepts + 1))
        drafted = 21 - metrics.target_passes
        assert metrics.accepted_by_source == ({"ssm-1": drafted} if drafted else {})
        assert metrics.accepted_only_by_source == metrics.accepted_by_source
    llm.engine.check_integrity()


def test_what_ssms_have_missed_is_not_charged_to_a_round() -> None:
    """They read a prompt once, and the planner would take drafting to be as slow as that."""
    llm, rounds, prompts, _ = scripted(1)
    slow, took, now = [], [], [0.0]

    class Slow(CapturedSsms):
        def catch_up(self, requests: Sequence[Request], width: int) -> bool:
            if missed := super().catch_up(requests, width):
                slow.append(requests)
                now[0] += 0.5
            return missed

    class Watched(Planner):
        def observe(self, requests: Any, trees: Any, emitted: Any, seconds: RoundSeconds, *rest: Any) -> None:
            took.append(sum(seconds) - seconds.read)

    llm.engine.captured.ssms, llm.engine.clock = Slow(llm.engine.sources.ssms), StageClock(lambda: now[0])
    rounds.planners = {2: Watched(CURVE, rounds.limits)}
    llm.generate(prompts[1:], greedy(6), spec=SpecConfig(sources=("ssm",)))
    llm.engine.clock = StageClock()
    assert rounds.seen and len(slow) == 1 and max(took) == 0


def test_ssms_are_weighed_by_what_they_read() -> None:
    llm, rounds, prompts, _ = scripted(2)
    rounds.knows = 0.02, 0.98
    llm.generate(prompts[:1], greedy(30), spec=CHAINS)
    weights = [requests[0].weights[0] for requests, levels, _ in rounds.seen if levels]
    assert weights[0] == weights[1], "the first round is learned from while the second one runs"
    assert all(later <= earlier for earlier, later in itertools.pairwise(weights)) and weights[-1] < 0.05


def test_custom_drafters_propose_for_captured_rounds() -> None:
    llm, rounds, prompts, plain = scripted(0, SeededRounds)
    oracle = OracleDrafter([[*p, *t] for p, t in zip(prompts, plain, strict=True)], 3, wrong=0)
    spec = SpecConfig(nodes=8, sources=("oracle",))
    with drafting_by(llm, oracle):
        outputs = llm.generate(prompts, greedy(9), spec=spec)
        assert tokens_of(outputs) == [tokens[:9] for tokens in plain]
        assert rounds.seen and all(output.metrics.accepted_by_source["oracle"] >= 4 for output in outputs)
        assert oracle.committed.keys() == {output.request_id for output in outputs} and len(oracle.released) == 2
        rounds.texts_by_page.clear()
        oracle.propose = mock.Mock(side_effect=KeyError("a bug"))  # type: ignore[method-assign]
        with pytest.raises(DraftError, match="propose raised KeyError: 'a bug'"):
            llm.generate(prompts[:1], greedy(9), spec=spec)
    llm.engine.check_integrity()


def steps_of(
    llm: LLM, prompts: Sequence[list[int]], spec: SpecConfig
) -> tuple[LLMEngine, Callable[[], dict[str, int]]]:
    """An engine with a request of 21 tokens for each prompt, and a step, which returns how many tokens each has."""
    engine = LLMEngine(llm)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=21, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params, spec=spec)
    return engine, lambda: {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}


@pytest.mark.parametrize("spec", [CHAINS, SpecConfig(nodes=1)], ids=["trees", "plain"])
def test_the_device_begins_the_next_round_before_the_caller_has_this_one(spec: SpecConfig) -> None:
    llm, rounds, prompts, _ = scripted(3)
    engine, step = steps_of(llm, prompts, spec)
    for number in itertools.count(1):
        tokens = step()
        unfinished = engine.has_unfinished_requests()
        assert len(rounds.seen) == number + unfinished
        if not unfinished:
            break
        assert [request.context_len for request in rounds.seen[-1][0]] == [
            len(prompt) + count - 1 for prompt, count in zip(prompts, tokens.values(), strict=True)
        ]
    assert number == (6 if spec is CHAINS else 21)


def test_a_request_aborted_in_a_launched_round() -> None:
    """The other one keeps its result of that round; the place is free for another, which takes part in the next."""
    llm, rounds, prompts, plain = scripted(3)
    engine, step = steps_of(llm, prompts, CHAINS)
    assert step() == {"0": 4, "1": 4} and len(rounds.seen) == 2
    engine.abort_request("0")
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add_request("2", {"prompt_token_ids": prompts[0]}, params, spec=CHAINS)
    assert step() == {"0": 4, "1": 8} and len(rounds.seen) == 3 and len(rounds.seen[-1][0]) == 2
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
        llm.engine.check_integrity()
    assert outputs["1"] == plain[1][:21] and outputs["2"] == plain[0][:9]


def test_a_launched_round_without_requests_is_waited_for() -> None:
    """An idle engine has nothing on the device, so that its memory may be used for something else."""
    llm, rounds, prompts, plain = scripted(3)
    engine, step = steps_of(llm, prompts, CHAINS)
    step()
    engine.abort_request("0")
    assert rounds.in_flight
    engine.abort_request("1")
    assert not rounds.in_flight and llm.engine.scheduler.is_idle
    rounds.texts_by_page.clear()
    assert tokens_of(llm.generate(prompts, greedy(9), spec=CHAINS)) == [tokens[:9] for tokens in plain]


@pytest.mark.parametrize(
    ("spec", "accepts", "count", "followed"),
    [("off", 3, 21, range(5, 21)), (CHAINS, 3, 21, []), (CHAINS, 0, 12, [5, 6, 7])],
    ids=["plain", "trees that end early", "trees"],
)
def test_a_round_is_launched_ahead_if_it_is_likely(
    spec: Any, accepts: int, count: int, followed: Sequence[int]
) -> None:
    """Behind some rounds of the same requests, and not if a path might end one."""
    llm, rounds, prompts, plain = scripted(accepts)
    assert tokens_of(llm.generate(prompts, greedy(count), spec=spec)) == [tokens[:count] for tokens in plain]
    assert rounds.followed == list(followed)
    if spec == "off":
        assert all((levels, nodes) == (0, 1) for _, levels, nodes in rounds.seen) and len(rounds.seen) == count


@pytest.mark.parametrize(("place", "zeroed"), [(2, False), (12, True)])
def test_pages_that_a_launch_ahead_wrote_to_are_zeroed(place: int, zeroed: bool) -> None:
    """It may have written NaN, which nothing has checked."""
    llm, _, prompts, plain = scripted(0)
    stop, cache = plain[0][place], llm.engine.cache
    assert stop not in plain[0][:place]
    cache.scrub(np.arange(cache.num_pages + 1))
    llm.generate(prompts[:1], greedy(30, stop_token_ids=[stop]), spec="off")
    assert cache.pools[0].any() != zeroed


def test_a_round_is_not_launched_early_if_a_waiting_request_could_join_it() -> None:
    llm, rounds, prompts, plain = scripted(0)
    params = [greedy(count) for count in (2, 5, 4)]
    outputs = llm.generate([*prompts, prompts[0]], params, spec=CHAINS)
    assert tokens_of(outputs) == [plain[0][:2], plain[1][:5], plain[0][:4]]
    assert [len(requests) for requests, _, _ in rounds.seen] == [2, 2, 2, 2, 2, 1]


def test_where_nobody_proposes_rounds_are_plain() -> None:
    llm, rounds, prompts, plain = scripted(0)
    outputs = llm.generate(prompts[:1], greedy(6), spec=SpecConfig(nodes=8, sources=("lookup",)))
    assert tokens_of(outputs) == [plain[0][:6]]
    assert any((levels, nodes) == (0, 1) for _, levels, nodes in rounds.seen)
    for (_, levels, _), proposals in zip(rounds.seen, rounds.proposals, strict=True):
        assert levels == 0 or any(proposals)


def test_seeds_and_silent_ssms() -> None:
    llm, rounds, prompts, _ = scripted(1)
    repeated = [prompts[0] * 3]
    rounds.truths = [(repeated[0], repeated[0] + prompts[0] * 20)]
    llm.generate(repeated, greedy(8), spec=SpecConfig(nodes=8, sources=("ssm-2", "lookup"), max_ssms=1))
    requests = [request for batch, _, _ in rounds.seen for request in batch]
    assert all(np.isnan(request.weights[0]) and request.weights[1] == 1.0 for request in requests[:-1])
    assert any(proposal is not None and len(proposal) > 1 for own in rounds.proposals for proposal in own)


def test_seeds_of_both_sources_keep_their_names() -> None:
    """The device knows that a token was a seed; whose it was is told here. Prompts were decoded once before."""
    llm, rounds, prompts, plain = scripted(0, SeededRounds, suffix_tokens=1000)
    spec = SpecConfig(nodes=8, sources=("lookup", "suffix"))
    outputs = llm.generate(prompts, greedy(30), spec=spec)
    assert tokens_of(outputs) == [tokens[:30] for tokens in plain]
    for output in outputs:
        metrics = output.metrics
        assert metrics.acceptance_length > 3 and metrics.accepted_by_source["suffix"] == 30 - metrics.target_passes
    llm.reset_suffix_cache()
    assert not any(output.metrics.accepted_by_source for output in llm.generate(prompts[:1], greedy(9), spec=spec))

    # The first ten tokens stand in the prompt, the next ten were written for another, and the last ten both.
    own, past, both = (list(range(first, first + 10)) for first in (10, 100, 300))
    written, prompt = [200, *past, 201, 202, 203, *both], [202, 203, *both, 210, *own, 211]
    output = [*own, *past, 202, 203, *both]
    rounds.truths = [(written[:1], written), (prompt, prompt + output)]
    rounds.texts_by_page.clear()
    llm.generate(written[:1], greedy(len(written) - 1), spec=spec)
    rounds.texts_by_page.clear()
    metrics = llm.generate(prompt, greedy(len(output)), spec=spec)[0].metrics
    # Four at a time, and one of the target's own. Of the first ten 2 to 5 and 7 to 10 are guessed; of the next ones 4
    # to 7, as the history needs three, and 9 and 10; then four behind 202, from the text alone, and four from both.
    assert metrics.accepted_only_by_source == {"lookup": 8 + 4, "suffix": 6}
    assert metrics.accepted_by_source == {"lookup": 12 + 4, "suffix": 6 + 4}
    stats = llm.engine.stats
    for source, count in stats.accepted_by_source.items():
        assert count == sum(stats.drafts[source].accepted) <= stats.drafts[source].num_tokens


@pytest.mark.parametrize(
    ("params", "spec", "served"),
    [
        ({}, {}, True),
        ({"temperature": 0.7}, {"verification": "naive"}, True),
        ({"temperature": 0.7}, {"verification": "rejection"}, False),
        ({}, {"verification": "traversal"}, True),
        ({"logits_processors": [lambda tokens, logits: logits]}, {}, False),
        ({"stop_token_ids": list(range(1, 10))}, {}, False),
        ({}, {"branching": (2, 1)}, False),
        ({}, {"nodes": 8}, True),
        ({}, {"nodes": 9}, False),
    ],
)
def test_what_is_served(params: dict[str, Any], spec: dict[str, Any], served: bool) -> None:
    """What rounds do not know, and trees larger than those that the engine was built for, go step by step."""
    llm, _, prompts, _ = scripted(1)
    engine = llm.engine
    assert engine.captured is not None
    request, *_ = llm.request_factory.requests(
        prompts[0], SamplingParams(**params), SpecConfig(**spec), False, Tokenization()
    )
    assert engine.captured.serves(request) is served
