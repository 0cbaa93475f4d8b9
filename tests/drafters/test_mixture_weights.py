"""Weights of the SSMs: who foretold the text is believed, soon, and per request; what is emitted never changes."""

import math

import numpy as np
import pytest

from tests.helpers.exactness import differences, run
from tests.helpers.models import greedy, make_draft, new_folder, open_llm, random_prompts, tiny
from treespec import LLM, SpecConfig
from treespec.drafters.ssm.catch_up import INITIAL_ADVANTAGE, SAVED_PER_NAT, CatchUpPolicy
from treespec.drafters.ssm.ssm_state import SsmState
from treespec.mixture_weights import DECAY, MIN_LOGPROB, MIN_WEIGHT, WINDOW, MixtureWeights

pytestmark = pytest.mark.slow

SSMS = SpecConfig(nodes=12, max_depth=3, sources=("ssm",))


def naive_weights(scores: list[dict[int, float]]) -> np.ndarray:
    """The specification: fading sums over the latest positions that all have in an unbroken run."""
    last = min(max(own) for own in scores)
    total = np.zeros(len(scores))
    for age in range(WINDOW):
        if not all(last - age in own for own in scores):
            break
        for i, own in enumerate(scores):
            total[i] += DECAY**age * max(np.log(max(own[last - age], 1e-9)), MIN_LOGPROB)
    weights = np.exp(total - total.max())
    return MIN_WEIGHT + (1 - len(scores) * MIN_WEIGHT) * weights / weights.sum()


@pytest.mark.parametrize("seed", range(20))
def test_against_a_dictionary(seed: int) -> None:
    """Chunks of random length, one SSM ahead of the other, gaps, and positions that are told twice."""
    rng = np.random.default_rng(seed)
    mixture, scores, ends = MixtureWeights(3), [{}, {}, {}], [1, 1, 1]
    for _ in range(60):
        i, count = rng.integers(3), rng.integers(1, 9)
        if ends[i] - min(ends) > WINDOW - 16:  # none is ever further ahead
            i = int(np.argmin(ends))
        start = ends[i] + (rng.integers(1, 5) if rng.random() < 0.05 else -rng.integers(0, 2))
        start = max(start, 1)
        if start > ends[i]:
            scores[i].clear()  # a gap makes forget
        probs = rng.uniform(0, 1, count) ** 3
        mixture.observe(int(i), int(start), probs)
        for position, prob in enumerate(probs, start=start):
            scores[i].setdefault(position, prob)
        ends[i] = max(ends[i], start + count)
    if all(scores) and len(set.intersection(*(set(own) for own in scores))):
        assert np.allclose(mixture.weights([0, 1, 2]), naive_weights(scores))


@pytest.fixture(scope="module")
def good_and_bad() -> LLM:
    """A draft that is nearly the target beside two that know next to nothing."""
    target, drafts = tiny()
    bad = [make_draft(new_folder("bad") / f"bad-{i}", target, 10 + i, 2.0) for i in range(2)]
    return open_llm(target, [bad[0], drafts[0], bad[1]], max_num_seqs=4)


@pytest.mark.parametrize("batch", [1, 4])
def test_one_ssm_in_a_round_is_the_trusted_one(good_and_bad: LLM, batch: int) -> None:
    """`max_ssms=1` drafts nearly as well as the best SSM alone, though nobody has named it; tokens stay."""
    prompts = random_prompts((40, 50, 60, 33))[:batch]
    plain = run(good_and_bad, prompts, greedy(60), "off")
    passes = {}
    for name, spec in {
        "best": SpecConfig(nodes=12, max_depth=3, sources=("ssm-1",)),
        "worst": SpecConfig(nodes=12, max_depth=3, sources=("bad-0",)),
        "one": SpecConfig(nodes=12, max_depth=3, sources=("ssm",), max_ssms=1),
        "all": SSMS,
    }.items():
        tree = run(good_and_bad, prompts, greedy(60), spec)
        assert not differences(plain, tree), name
        passes[name] = sum(output.metrics.target_passes for output in tree.outputs)
    assert passes["one"] < (passes["best"] + passes["worst"]) / 2, passes
    assert passes["all"] < (passes["best"] + passes["worst"]) / 2, passes


def unread_state() -> SsmState:
    return SsmState(MixtureWeights(2), np.zeros(2, dtype=np.int64), np.full(2, 16), np.zeros(2))


def compare(policy: CatchUpPolicy, probs: tuple[float, float]) -> None:
    """One request that both SSMs read."""
    policy.begin_request()
    state = unread_state()
    assert sorted(policy.readers(state, [0, 1], 100, math.inf)) == [0, 1]
    for ssm, prob in enumerate(probs):
        state.mixture.observe(ssm, 1, np.full(32, prob))
    policy.learn()


def test_an_ssm_reads_beside_the_leader_only_if_that_is_repaid() -> None:
    policy = CatchUpPolicy(2)
    enough = 100 / (INITIAL_ADVANTAGE * SAVED_PER_NAT)
    assert policy.readers(unread_state(), [0, 1], 100, 0.9 * enough) == [0]
    assert policy.readers(unread_state(), [0, 1], 100, 1.1 * enough) == [0, 1]
    for _ in range(40):
        compare(policy, (0.5, 0.5))
    assert policy.readers(unread_state(), [0, 1], 100, 1.1 * enough) == [0], "equal SSMs gain nothing"
    for _ in range(40):
        compare(policy, (0.2, 0.5))
    assert policy.leader(unread_state(), [0, 1]) == 1 and policy.unread(unread_state(), [0, 1], 100) == 84
    assert policy.readers(unread_state(), [0, 1], 100, 0.0) == [1]


def test_a_resting_ssm_reads_ever_more_rarely() -> None:
    """After 16 more tokens, then after 32, 64 and so on."""
    policy, state, missed = CatchUpPolicy(2), unread_state(), []
    for state.valid[0] in range(250):
        if policy.readers(state, [0, 1], int(state.valid[0]), math.inf):
            missed.append(int(state.valid[0] - state.valid[1]))
            state.valid[1] = state.valid[0]
    assert missed == [16, 32, 64, 128]
