"""Transforms against Hugging Face's own processors, ties and edges of truncation."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treespec import SamplingParams
from treespec.sampling.transforms import Transforms

VOCABS = (5, 63, 64, 4099)
CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 0]
OUTPUT = [2, 3, 2, 2]
PATH = [4, 2, 0]
TEXT = [*PROMPT, *OUTPUT, *PATH]
HOT = {"temperature": 1.0}


def random_logits(vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> Tensor:
    return (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def transform(
    logits: Tensor,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    path: Sequence[int] = (),
    ends: Sequence[int] = (0,),
    bad_words: Sequence[Sequence[int]] = (),
    **options: Any,
) -> Tensor:
    params = SamplingParams(**options)
    transforms = Transforms(params, len(prompt), ends, bad_words, len(logits), CPU)
    before = logits.clone()
    scores = transforms.scores(logits, [*prompt, *output], list(path))
    assert logits.equal(before) or before.isnan().any(), "logits are left as they were"
    return scores


def hugging(scores: Tensor, processors: Sequence[Any], tokens: Sequence[int] = (1,)) -> Tensor:
    """Scores after Hugging Face's processors, one after another."""
    ids, row = torch.tensor([list(tokens)]), scores.float()[None]
    for processor in processors:
        row = processor(ids, row.clone())
    return row[0]


def counted(frequency: float, presence: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Frequency and presence penalty over the output."""

    def penalise(ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=scores.shape[1])
        return scores - counts * frequency - (counts > 0) * presence

    return penalise


def kept(scores: Tensor) -> list[int]:
    return torch.nonzero(scores > -math.inf)[:, 0].tolist()


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """The same tokens are left, with the same scores but for rounding."""
    assert ours.dtype == torch.float32 and not ours.isnan().any()
    assert kept(ours) == kept(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# --- each alone


def sequence_bias(bias: dict[int, float]) -> Any:
    return SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})


ALONE: list[tuple[str, Any, Callable[[Any], Any]]] = [
    *(("temperature", value, TemperatureLogitsWarper) for value in (1e-3, 0.7, 1.0, 100.0)),
    *(("repetition_penalty", value, RepetitionPenaltyLogitsProcessor) for value in (0.5, 1.3, 10.0)),
    ("logit_bias", {3: 2.5, 0: -100.0, 19: 1e-3, 7: 0.0}, sequence_bias),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [20, 63, 64, 4099])
def test_those_that_keep_every_token(vocab: int, dtype: torch.dtype) -> None:
    """Over prompt, output and path, in every bit."""
    logits = random_logits(vocab, dtype=dtype)
    logits[2] = 0.0
    for name, value, theirs in ALONE:
        ours = transform(logits, PROMPT, OUTPUT, PATH, **{name: value})
        assert torch.equal(ours, hugging(logits, [theirs(value)], TEXT)), (name, value)


TRUNCATIONS: list[tuple[str, float, Any]] = [
    *(("top_k", k, TopKLogitsWarper(k if k > 0 else 10**9)) for k in (-1, 0, 1, 5, 63, 64, 65, 10**9)),
    *(("top_p", p, TopPLogitsWarper(p)) for p in (5e-324, 0.1, 0.5, 0.99)),
    *(("min_p", p, MinPLogitsWarper(p)) for p in (1e-9, 0.1, 0.99, 1.0)),
]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    ("name", "value", "theirs"), TRUNCATIONS, ids=[f"{name} {value}" for name, value, _ in TRUNCATIONS]
)
def test_truncations(name: str, value: float, theirs: Any, vocab: int) -> None:
    for seed in range(3):
        logits = random_logits(vocab, seed)
        ours = transform(logits, **HOT | {name: value})
        assert_same(ours, hugging(logits, [theirs]))
        assert name != "top_k" or len(kept(ours)) == (min(value, vocab) if value > 0 else vocab)


def test_penalties_follow_the_path_and_forget_it() -> None:
    """One request's transforms, called for node after node and round after round, are those made anew for each."""
    options = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.3}
    transforms, rng = Transforms(SamplingParams(**options), len(PROMPT), (0,), (), 20, CPU), np.random.default_rng(0)
    tokens = list(PROMPT)
    for round_ in range(12):
        logits = random_logits(20, round_)
        for _ in range(4):
            path = rng.integers(0, 20, rng.integers(0, 5)).tolist()
            expected = transform(logits, PROMPT, tokens[len(PROMPT) :], path, **options)
            assert torch.equal(transforms.scores(logits, tokens, path), expected)
        tokens += rng.integers(0, 20, rng.integers(1, 4)).tolist()


BAD_WORDS = [[5], [2, 7], [0, 8], [4, 2, 0, 9], [1, 0, 2, 3, 2, 2, 4, 2, 0, 10], [9] * 40, [2, 0, 9], [3, 3, 11]]


@pytest.mark.parametrize("path", [[], [4], [4, 2], [4, 2, 0], [3], [3, 3]], ids=str)
@pytest.mark.parametrize("output", [[], [2], [2, 3, 2, 2], [3]], ids=str)
def test_bad_words(output: list[int], path: list[int]) -> None:
    """Their beginnings may lie in the prompt, the output or the path, and across them."""
    logits = random_logits(20)
    theirs = hugging(logits, [NoBadWordsLogitsProcessor(BAD_WORDS)], [*PROMPT, *output, *path])
    assert_same(transform(logits, PROMPT, output, path, bad_words=BAD_WORDS), theirs)


@pytest.mark.parametrize("written", range(6))
def test_min_tokens(written: int) -> None:
    """Output and path count, the prompt does not; an end token outside the vocabulary is none."""
    logits, ends = random_logits(20), [0, 7]
    theirs = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, ends)
    for split in range(written + 1):
        output, path = [2] * split, [3] * (written - split)
        ours = transform(logits, PROMPT, output, path, ends=[*ends, 25], min_tokens=4)
        assert torch.equal(ours, hugging(logits, [theirs], [*PROMPT, *output, *path]))
    assert kept(transform(logits, PROMPT, [2] * written, ends=[], min_tokens=4)) == list(range(20))


# --- together


WORDS = [[5], [2, 0, 9], [3, 2, 2, 4, 2, 0, 3]]


def in_order(options: dict[str, Any], words: list[list[int]]) -> list[Any]:
    """Hugging Face's processors in the order that `SamplingParams` documents."""
    return [
        sequence_bias(options["logit_bias"]),
        NoBadWordsLogitsProcessor(words),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), options["min_tokens"], [0]),
        RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
        counted(options["frequency_penalty"], options["presence_penalty"]),
        flatten,
        TemperatureLogitsWarper(options["temperature"]),
        TopKLogitsWarper(options["top_k"]),
        TopPLogitsWarper(options["top_p"]),
        MinPLogitsWarper(options["min_p"]),
    ]


def flatten(ids: Any, scores: Tensor) -> Tensor:
    """Notices whether it comes before or after anything else, as it is not linear."""
    return torch.where(scores > 2, 2 + (scores - 2).clamp(min=0) ** 0.7, scores - 0.1 * ids.shape[1])


@settings(max_examples=60)
@given(
    st.sampled_from([5, 63, 64, 100, 300]),
    st.integers(0, 2**31),
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0.05, 3),
            "top_k": st.integers(1, 120),
            "top_p": st.floats(0.01, 0.999),
            "min_p": st.floats(0, 0.5),
            "repetition_penalty": st.floats(0.5, 2),
            "frequency_penalty": st.floats(-2, 2),
            "presence_penalty": st.floats(-2, 2),
            "min_tokens": st.integers(0, 20),
            "logit_bias": st.dictionaries(st.integers(0, 4), st.floats(-5, 5, width=32), min_size=1),
        }
    ),
)
def test_any_parameters(vocab: int, seed: int, options: dict[str, Any]) -> None:
    """In the documented order: against the same in float64, except where a token lies on the edge of a truncation."""
    logits = random_logits(vocab, seed)
    words = [word for word in WORDS if max(word) < vocab]
    ours = transform(logits, PROMPT, OUTPUT, PATH, bad_words=words, logits_processors=[flatten], **options)
    processors = in_order(options, words)
    before = hugging(logits, processors[:-3], TEXT).double()[None]
    likeliest, edges = TopKLogitsWarper(options["top_k"])(None, before), []
    for slack in (-1e-6, 1e-6):
        cut = TopPLogitsWarper(options["top_p"] + slack)(None, likeliest)
        for factor in (1 - 1e-5, 1 + 1e-5):
            edges.append(MinPLogitsWarper(options["min_p"] * factor)(None, cut))
    rows = torch.cat(edges)
    fewest, most = set(kept(rows.amin(0))), set(kept(rows.amax(0)))
    assert fewest <= set(kept(ours)) <= most
    left = kept(ours)
    torch.testing.assert_close(ours[left].double(), before[0][left], rtol=1e-5, atol=1e-5)


# --- ties and edges


def tied(vocab: int, seed: int, levels: int = 5) -> Tensor:
    return torch.randint(-levels, levels, (vocab,), generator=torch.Generator().manual_seed(seed)) / 2


def likeliest_first(scores: Tensor) -> list[int]:
    """All tokens, of equal scores the lower ids first."""
    return sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_of_ties_keeps_exactly_k_and_the_lower_ids(vocab: int, dtype: torch.dtype) -> None:
    for seed, k in enumerate([1, 2, 3, 7, 30, 62, 64, 100, 2000]):
        for logits in (tied(vocab, seed).to(dtype), torch.zeros(vocab, dtype=dtype)):
            ours = transform(logits, top_k=k, **HOT)
            assert kept(ours) == sorted(likeliest_first(logits)[:k])


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_p_of_ties_keeps_the_lower_ids(vocab: int) -> None:
    for value in (0.01, 0.25, 0.5, 0.75, 0.9):
        ours = kept(transform(torch.zeros(vocab), top_p=value, **HOT))
        assert ours == list(range(math.ceil(value * vocab - 1e-6)))
    for seed in range(8):
        logits, value = tied(vocab, seed), 0.13 * (seed + 1) - 0.05
        order = likeliest_first(logits)
        shares = logits.double().softmax(0)[order].cumsum(0)
        count = int((shares < value - 1e-7).sum()) + 1
        assert kept(transform(logits, top_p=value, **HOT)) == sorted(order[:count])


@pytest.mark.parametrize("width", [1, 63, 64, 65, 256, 257, 1025])
@pytest.mark.parametrize("vocab", [1100, 4099])
def test_wide_nuclei(vocab: int, width: int) -> None:
    """As many tokens share nearly all of the probability, scattered over the vocabulary."""
    logits = torch.full((vocab,), -20.0)
    wide = torch.randperm(vocab, generator=torch.Generator().manual_seed(width))[:width]
    logits[wide] = torch.linspace(1, 0, width)
    least = float(logits.double().softmax(0)[wide[-1]])  # the share of the last that belongs
    rest = 1 - float(logits.double().softmax(0)[wide].sum())
    whole = 1 - rest - least / 2
    assert kept(transform(logits, top_p=whole, **HOT)) == sorted(wide.tolist())
    for value in (0.3, 0.9):
        assert_same(transform(logits, top_p=value, **HOT), hugging(logits, [TopPLogitsWarper(value)]))


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_top_p_just_below_one_cuts_only_what_rounds_away(vocab: int) -> None:
    for seed in range(5):
        logits = random_logits(vocab, seed)
        ours = transform(logits, top_p=1 - 2**-53, **HOT)
        lost = logits.double().softmax(0)[ours == -math.inf].sum()
        assert len(kept(ours)) >= 1 and lost < 1e-7
    assert kept(transform(torch.zeros(vocab), top_p=1 - 2**-53, **HOT)) == list(range(vocab))
    assert torch.equal(transform(logits, top_p=1, **HOT), logits)


def test_excluded_tokens_stay_excluded() -> None:
    logits = random_logits(100)
    logits[::2] = -math.inf
    options = {"top_k": 80, "top_p": 0.9999999, "min_p": 1e-9, "temperature": 0.3, "frequency_penalty": 1.0}
    scores = transform(logits, PROMPT, OUTPUT, **options, repetition_penalty=1.2)
    assert not scores.isnan().any() and all(token % 2 for token in kept(scores))
    greedy = transform(logits, top_k=1, top_p=0.1, min_p=1.0, logit_bias={3: 1.0})
    assert kept(greedy) == list(range(1, 100, 2)), "no truncation where the likeliest is taken"


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3, "min_p": 0.1}, {}])
def test_nan_is_never_hidden_by_a_truncation(options: dict[str, Any]) -> None:
    for places in ([7], [0, 1, 2, 3, 4], range(100)):
        logits = random_logits(100)
        logits[list(places)] = math.nan
        scores = transform(logits, **options, **HOT)
        assert math.isnan(float(scores[scores.argmax()])), places
