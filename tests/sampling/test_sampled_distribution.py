"""The distribution of sampled output, end to end, against the exact joint distribution of tiny models.

A model of eight tokens has 512 continuations of three, and the engine's own logits after the 73 prefixes give the
probability of each. A G-test compares; a wrong rule, or a distribution that was not drawn from, turns it red.
"""

import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.helpers.exactness import recorded
from tests.helpers.models import (
    at_fixed_costs,
    equal_weights,
    make_draft,
    make_llama,
    new_folder,
    open_llm,
    random_prompts,
    tiny,
    tiny_llm,
)
from treespec import LLM, SamplingParams, SpecConfig
from treespec.config.configs import DRAWS
from treespec.drawing.recording import watch
from treespec.engine.round_record import RoundRecord
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve
from treespec.sampling.sampler import DRAFT_STREAM, Sampler
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle

ALPHA = 1e-6
VOCAB, LENGTH, SAMPLES = 8, 3, 1200
PROMPT = [1, 2, 3, 4, 1, 2, 3]  # lookup knows what follows
TEMPERATURE = 5.0
FREE = CostCurve((1, 64), (1e-3, 1.001e-3), 1e-7)  # automatic trees grow in a batch of 32 too


# --- the exact distribution


@functools.cache
def folders() -> tuple[Any, tuple[Any, ...]]:
    """A target of eight tokens, and two drafts far from it: total variations of 0.75 and 0.55 after the prompt.

    Of the models of several seeds these show the planted faults best: by enumeration of (3,)-trees a first token's
    distribution is off by 0.07 (duplicates skipped) to 0.25 (excluded tokens ignored).
    """
    root = new_folder("distribution")
    target = make_llama(root / "target", 2, vocab_size=VOCAB, num_hidden_layers=2)
    return target, tuple(make_draft(root / f"ssm-{i}", target, i, 1.0) for i in (1, 2))


def sampling_llm(compile: bool | str = False) -> LLM:
    """A fresh engine whose automatic trees do not depend on the clock; compiled ("auto"), its drafts are in int8."""
    target, drafts = folders()
    options = {"max_num_seqs": 32, "max_model_len": 64, "compile": compile, "draft_quantization": "auto"}
    return timeless(open_llm(target, drafts, **options))


def timeless(llm: LLM) -> LLM:
    llm.engine.host.planner = at_fixed_costs(Planner(FREE))
    return llm


@functools.cache
def plain_logits() -> dict[tuple[int, ...], np.ndarray]:
    """float64 [vocab] after the prompt and each continuation of up to two tokens, by plain decoding."""
    tails = [tail for length in range(LENGTH) for tail in itertools.product(range(VOCAB), repeat=length)]
    llm = open_llm(folders()[0], max_num_seqs=32, max_model_len=64)
    with recorded(llm) as (logits, unequal):
        llm.generate([PROMPT + list(tail) for tail in tails], SamplingParams(max_tokens=1), spec="off")
    assert not unequal
    return {tail: logits[(*PROMPT, *tail)].double().numpy() for tail in tails}


def probs_after(tail: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """float64 [vocab]: allowed tokens, penalties, temperature and top_p as they are defined."""
    scores = plain_logits()[tail].copy()
    if params.allowed_token_ids is not None:
        scores[~np.isin(np.arange(VOCAB), params.allowed_token_ids)] = -np.inf
    for token in range(VOCAB):
        if token in PROMPT or token in tail:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= params.frequency_penalty * tail.count(token) + params.presence_penalty * (token in tail)
    probs = np.exp((scores - scores.max()) / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0.0
    return probs / probs.sum()


def joint_probs(params: SamplingParams) -> np.ndarray:
    """float64 [vocab] * LENGTH."""
    joint = np.zeros((VOCAB,) * LENGTH)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        joint[tokens] = np.prod([probs_after(tokens[:i], params)[token] for i, token in enumerate(tokens)])
    return joint


# --- the test


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a G-test; cells with an expectation below 5 are pooled, and what cannot be must not be."""
    counts, expected = counts.ravel(), expected.ravel()
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    below = int((expected < 5).sum())
    while 0 < below < len(order) and expected[order[:below]].sum() < 5:
        below += 1
    parts = [order[:below]] * (below > 0) + [order[i : i + 1] for i in range(below, len(order))]
    seen = np.array([counts[part].sum() for part in parts], dtype=float)
    wanted = np.array([expected[part].sum() for part in parts])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) < 2:
        return 1.0
    g = 2 * np.sum(seen * np.log(np.maximum(seen, 1e-300) / wanted))
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), torch.tensor(max(g / 2, 0.0))))


def worst_p(tokens: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """The least p-value of the first token's distribution, the first two's and the first three's."""
    joint, worst = joint_probs(params), 1.0
    for length in range(1, LENGTH + 1):
        probs = joint.sum(tuple(range(length, LENGTH)))
        counts = np.zeros(probs.shape)
        np.add.at(counts, tuple(np.array([each[:length] for each in tokens]).T), 1)
        worst = min(worst, p_value(counts, probs * len(tokens)))
    return worst


def sampled(llm: LLM, spec: SpecConfig, seed: int = 1, **options: Any) -> tuple[float, float]:
    """The least p-value of `SAMPLES` samples of one prompt, and their acceptance length."""
    deep = len(spec.branching or "12") + 1
    params = SamplingParams(
        **({"temperature": TEMPERATURE, "seed": seed, "max_tokens": deep, "n": SAMPLES, "ignore_eos": True} | options)
    )
    # Fixed trees give both drafts a turn at every node; left to itself, the better one takes nearly all.
    with equal_weights() if spec.branching else nullcontext():
        [output] = llm.generate([PROMPT], params, spec=spec)
    llm.engine.check_integrity()
    return worst_p([each.token_ids for each in output.outputs], params), output.metrics.acceptance_length


def test_the_g_test_itself() -> None:
    """The right distribution passes; one that is wrong by five percent fails, as does an impossible outcome."""
    params = SamplingParams(temperature=TEMPERATURE)
    joint, rng = joint_probs(params), np.random.default_rng(0)
    assert abs(joint.sum() - 1) < 1e-12
    assert joint.max() < 0.3, "one continuation outweighs all others"
    for probs, right in ((joint, True), (0.8 * joint + 0.2 / joint.size, False)):
        drawn_cells = rng.choice(joint.size, SAMPLES, p=probs.ravel())
        tokens = np.stack(np.unravel_index(drawn_cells, joint.shape), 1).tolist()
        assert (worst_p(tokens, params) > 1e-3) == right
    assert p_value(np.array([99.0, 1.0]), np.array([100.0, 0.0])) == 0.0
    assert p_value(np.array([50.0, 52.0, 1.0]), np.array([51.0, 51.0, 1.0])) > 0.5


SSM = {"sources": ("ssm",)}
PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 1.0, "frequency_penalty": 1.2}
SOME = {"allowed_token_ids": (1, 2, 4, 5, 7)}
# verification/test_verify.py proves every rule with every way to draw by enumeration, and test_sampled_exactness.py
# that "coupled" and "naive" emit the tokens of plain decoding; here each has its part of cases.
DRAWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rejection 2-1-1": ({"branching": (2, 1, 1)} | SSM, {}),
    "rejection 3-2 without replacement": ({"branching": (3, 2), "draws": "without-replacement"}, {"top_p": 0.85}),
    "rejection 8 with lookup": ({"nodes": 8, "draws": DRAWS[1]}, {}),
    "traversal 3-2, penalties": ({"branching": (3, 2)} | SSM, PENALTIES),
    "traversal 5-1 with replacement": ({"branching": (5, 1), "draws": "with-replacement"} | SSM, {}),
    "traversal auto": ({}, PENALTIES | {"top_p": 0.85}),
    "traversal 2-2-1, some tokens": ({"branching": (2, 2, 1)} | SSM, SOME),
}
CASES = {name: (SpecConfig(verification=name.split()[0], **spec), options) for name, (spec, options) in DRAWN.items()}
CASES["plain, penalties, top_p"] = SpecConfig.off(), PENALTIES | {"top_p": 0.85}
CASES["coupled auto, penalties"] = SpecConfig(), PENALTIES
EAGER = ("plain, penalties, top_p", "rejection 2-1-1")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution(name: str) -> None:
    spec, options = CASES[name]
    p, acceptance = sampled(sampling_llm(False if name in EAGER else "auto"), spec, **options)
    assert p > ALPHA, f"p = {p}"
    assert acceptance > 1.2 or spec.is_plain, "nothing was accepted, so nothing was shown"


# --- what is drawn: the trees themselves


class Witness(RandomOracle):
    """Keeps what was asked of it, by request."""

    asked: list[list[tuple[np.ndarray, int]]]

    def __init__(self, generator: np.random.Generator):
        super().__init__(generator)
        self.own: list[tuple[np.ndarray, int]] = []
        self.asked.append(self.own)

    def choose(self, weights: np.ndarray) -> int:
        token = super().choose(weights)
        self.own.append((weights.copy(), token))
        return token


ENDS = (3, 4, 5, 6)


def drawn_rounds(spec: SpecConfig, temperature: float = 1.0) -> tuple[list[RoundRecord], list[list[Any]]]:
    """Rounds of two requests over the models of 512 tokens, and what their draws were asked and answered."""
    llm = timeless(tiny_llm())
    bias = dict.fromkeys(ENDS, 2.0)  # the target's own; below an end token nothing is drawn
    params = [
        SamplingParams(max_tokens=16, temperature=temperature, seed=seed, stop_token_ids=ENDS, logit_bias=bias)
        for seed in (1, 2)
    ]
    witness = type("Witnessed", (Witness,), {"asked": []})
    oracle = functools.cached_property(lambda sampler: witness(sampler.generator(DRAFT_STREAM)))
    oracle.__set_name__(Sampler, "draft_oracle")
    with mock.patch.object(Sampler, "draft_oracle", oracle), watch(llm.engine) as rounds:
        llm.generate(random_prompts((30, 64)), params, spec=spec)
    return rounds, witness.asked


SHAPES: dict[str, dict[str, Any]] = {
    "static 3-2-1": {"branching": (3, 2, 1)},
    "16": {"nodes": 16, "max_depth": 3},
    "auto": {},
}


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_keep_every_draw_with_its_distribution(draws: str, shape: str) -> None:
    """No token twice where none may be, distributions of sum 1 that the oracle was really asked, chances that follow
    from them, in draw order, random draws before chosen ones; sizes and depths as asked for; nothing below an end
    token."""
    spec = SpecConfig(**SHAPES[shape], verification="traversal", draws=draws, sources=("ssm",))
    rounds, asked = drawn_rounds(spec)
    drafted = {each.request_id for each in rounds if len(each.tree) > 1}  # an automatic tree may never have grown
    asked = [own for own in asked if own]
    for name, own in zip(sorted(drafted, key=lambda name: int(name.split("-")[1])), asked, strict=True):
        answers = iter(own)
        for each in (each for each in rounds if each.request_id == name):
            check_tree(each.tree, spec, answers)
        assert next(answers, None) is None, "a draw was asked for and left out"
    assert drafted


def check_tree(tree: TokenTree, spec: SpecConfig, answers: Any) -> None:
    tree.check_integrity()
    assert len(tree) <= spec.max_nodes and tree.depths.max() <= spec.max_depth
    if len(tree) == 1:
        return
    assert tree.draw_rows is not None and tree.draw_excluded is not None and (tree.draw_rows >= 0).all()
    before: dict[int, list[tuple[int, int]]] = {}
    columns = tree.parents[tree.draw_nodes], tree.draw_nodes, tree.draw_sources, tree.draw_rows
    for i, (parent, child, source, row) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        token, earlier, probs = int(tree.tokens[child]), before.setdefault(parent, []), tree.draft_probs[row].copy()
        assert abs(float(probs.sum(dtype=np.float64)) - 1) < 1e-5
        assert int(tree.tokens[parent]) not in ENDS or parent == 0
        cannot = {t for by, t in earlier if spec.draws == "cross-source" or by == source}
        cannot = set() if spec.draws == "with-replacement" else cannot
        assert set(tree.draw_excluded[i]) == cannot and token not in cannot
        probs[list(cannot)] = 0.0
        assert np.isclose(tree.draw_probs[i], probs[token] / probs.sum(dtype=np.float64), rtol=1e-5)
        weights, answer = next(answers)
        assert answer == token and np.array_equal(weights, probs)
        earlier.append((source, token))
    if spec.branching and spec.draws == "cross-source":
        for node in range(len(tree)):
            depth, children = int(tree.depths[node]), int((tree.parents == node).sum())
            ends = (node and int(tree.tokens[node]) in ENDS) or depth == tree.depths.max()
            assert children == (0 if ends else spec.branching[depth])


def test_the_distributions_are_the_drafts_own() -> None:
    spec = SpecConfig(branching=(2, 1), verification="rejection", sources=("ssm-1",))
    rounds, _ = drawn_rounds(spec, temperature=0.8)
    own = open_llm(tiny()[1][0])
    for each in rounds[:6]:
        if len(each.tree) == 1:
            continue
        with recorded(own) as (logits, _):
            prompt = (*each.context, int(each.tree.tokens[0]))
            own.generate([list(prompt)], SamplingParams(max_tokens=1))
        probs = torch.softmax(logits[prompt].float() / 0.8, -1).numpy()
        first = each.tree.draft_probs[int(each.tree.draw_rows[0])]
        assert np.allclose(first, probs, atol=1e-6)


def test_nodes_are_filled_as_far_as_distributions_reach() -> None:
    """`nodes` is obeyed where the drafts have so many proposals, also where a distribution is nearly certain."""
    llm = sampling_llm()
    for draws, temperature in itertools.product(DRAWS, (0.05, 0.5, 5.0)):
        spec = SpecConfig(nodes=16, verification="rejection", draws=draws, max_depth=3, **SSM)
        params = SamplingParams(max_tokens=8, temperature=temperature, seed=1, n=2, ignore_eos=True)
        with watch(llm.engine) as rounds:
            llm.generate([PROMPT], params, spec=spec)
        sizes = [len(each.tree) for each in rounds if each.number == 1]
        assert max(len(each.tree) for each in rounds) <= 16
        assert max(len(each.tree.draw_nodes) for each in rounds) < 200, "drawing the same token again and again"
        assert temperature < 5.0 or sizes == [16, 16]
