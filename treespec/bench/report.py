"""Summaries of samples for the JSON document; names follow vLLM's benchmarks for figures that these share."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from treespec.bench.measure import Sample
from treespec.bench.modes import PLAIN, Mode, Peer
from treespec.text.prompt_files import Prompt

# figures available for treespec's modes only
OURS = """acceptance_by_depth accepted_by_source nodes_per_pass profile_ms verify_share efficiency
    pass_ratio draft_share""".split()
RESAMPLES, COVERAGE = 2000, 0.95  # bootstrap over prompts: resamples, and coverage of the intervals
LOOPING = 0.5  # maximum share of distinct 4-grams at which an output counts as looping


def distinct_share(tokens: Sequence[int]) -> float:
    """Return the share of distinct 4-grams; 1 for fewer than 4 tokens."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mismatches(outputs: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> int:
    """Return the number of positions that differ from plain decoding, including missing tokens."""
    pairs = zip(outputs, plain, strict=True)
    return sum(a != b for ours, theirs in pairs for a, b in itertools.zip_longest(ours, theirs))


def summarise(
    mode: Mode | Peer,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    prompts: Sequence[Prompt],
    sampled: bool = False,
) -> dict[str, Any]:
    """Summarise a mode's samples, one per repeat, against plain decoding's. If `sampled`, seeds differ per repeat."""
    shares = [statistics.mean(distinct_share(base.tokens[i]) for base in plain) for i in range(len(prompts))]
    non_looping = [i for i, share in enumerate(shares) if share > LOOPING]
    kinds = sorted({prompt.kind for prompt in prompts if prompt.kind is not None})
    by_kind = {kind: _tau(samples, [i for i, p in enumerate(prompts) if p.kind == kind]) for kind in kinds}
    speedups = _ratios(plain, samples, lambda sample: sample.seconds_per_token)
    rates = [1 / sample.seconds_per_token for sample in samples]
    per_token = sorted(1000 * seconds for sample in samples for seconds in sample.per_token)
    figures: dict[str, Any] = {
        "mode": mode.name,
        **mode.figures,
        "total_output_tokens": sum(map(len, samples[0].tokens)),
        **_spread("output_throughput", rates),
        "mean_ttft_ms": statistics.mean(1000 * seconds for sample in samples for seconds in sample.ttft),
        "p50_itl_ms": percentile(per_token, 50),
        "p99_itl_ms": percentile(per_token, 99),
        **_spread("speedup", speedups),
        "e2e_speedup": statistics.median(_ratios(plain, samples, lambda sample: sample.total_seconds)),
        "acceptance_length": _tau(samples, range(len(prompts))),
        "acceptance_length_interval": interval(resampled_lengths(samples))[1:],
        "acceptance_length_not_looping": _tau(samples, non_looping),
        "acceptance_length_by_kind": by_kind,
        "mismatches": _mismatches(mode, samples, plain, sampled),
        "distinct_4grams": statistics.mean(distinct_share(tokens) for tokens in samples[0].tokens),
        **dict.fromkeys(OURS),
    }
    return figures | (_engine_figures(samples, plain) if isinstance(mode, Mode) else {})


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _mismatches(mode: Mode | Peer, samples: Sequence[Sample], plain: Sequence[Sample], sampled: bool) -> int | None:
    if isinstance(mode, Mode) and not mode.keeps_tokens:
        return None
    reference = plain if sampled else [plain[0]] * len(plain)
    return max(mismatches(sample.tokens, base.tokens) for sample, base in zip(samples, reference, strict=True))


def _engine_figures(samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of `OURS`, the last three only if plain decoding was measured."""
    accepted = sum((sample.accepted for sample in samples[1:]), samples[0].accepted.copy())
    sources = sum((sample.accepted_by_source for sample in samples[1:]), samples[0].accepted_by_source.copy())
    figures: dict[str, Any] = {
        "acceptance_by_depth": acceptance_by_depth_of(accepted),
        "accepted_by_source": dict(sources),
        "nodes_per_pass": sum(s.nodes or 0 for s in samples) / sum(sum(s.passes) for s in samples),
        "profile_ms": {
            stage: statistics.median(1000 * sample.stages[stage] / sample.rounds for sample in samples)
            for stage in samples[0].stages
        },
    }
    figures["verify_share"] = statistics.median(s.stages["verify"] / sum(s.stages.values()) for s in samples)
    if samples is plain:
        return figures
    ratios, shares, efficiencies = [], [], []
    for sample, base in zip(samples, plain, strict=True):
        plain_pass = base.stages["forward"] / base.rounds
        ratios.append(sample.stages["forward"] / sample.rounds / plain_pass)
        shares.append(sample.stages["draft"] / sample.rounds / plain_pass)
        gain = sample.decoded / sample.rounds / (base.decoded / base.rounds)  # equals the acceptance length at batch 1
        possible = gain / (ratios[-1] + shares[-1])
        efficiencies.append(base.seconds_per_token / sample.seconds_per_token / possible)
    return figures | {
        "efficiency": statistics.median(efficiencies),
        "pass_ratio": statistics.median(ratios),
        "draft_share": statistics.median(shares),
    }


def _ratios(plain: Sequence[Sample], samples: Sequence[Sample], cost: Callable[[Sample], float]) -> list[float]:
    return [cost(base) / cost(sample) for base, sample in zip(plain, samples, strict=True)]


def _tau(samples: Sequence[Sample], indices: Sequence[int]) -> float | None:
    """Return the acceptance length, tokens per target pass, over the chosen prompts; None if there are none."""
    tokens = sum(len(sample.tokens[i]) for sample in samples for i in indices)
    passes = sum(sample.passes[i] for sample in samples for i in indices)
    return tokens / passes if passes else None


def acceptance_by_depth_of(accepted: Counter[int]) -> list[float]:
    """Return the shares of trees whose accepted path reached depth 1, 2, ..., from tree counts by accepted depth."""
    total, deepest = accepted.total(), max(accepted, default=0)
    return [sum(n for depth, n in accepted.items() if depth >= d) / total for d in range(1, deepest + 1)]


def resampled_lengths(samples: Sequence[Sample]) -> np.ndarray:
    """Return the tokens per pass over all prompts, then over each resample of prompts (the same for all modes)."""
    tokens = np.array([[len(tokens) for tokens in sample.tokens] for sample in samples]).sum(0)
    passes = np.array([sample.passes for sample in samples]).sum(0)
    picks = np.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    return np.concatenate([[tokens.sum() / passes.sum()], tokens[picks].sum(1) / passes[picks].sum(1)])


def interval(values: np.ndarray) -> list[float]:
    """Return [value, low, high]: the value over all prompts and the bounds of the bootstrap interval."""
    tail = (1 - COVERAGE) / 2
    return [float(values[0]), *np.quantile(values[1:], [tail, 1 - tail]).tolist()]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of ascending values."""
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def best(modes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the name of the fastest mode of each group; groups without modes are missing."""
    groups = {
        "ours": [m for m in modes if m["engine"] == "treespec" and m["mode"] != PLAIN],
        "assisted": [m for m in modes if m["mode"].startswith("hf-assisted-")],
        "lookup": [m for m in modes if m["mode"].startswith("hf-lookup-")],
    }
    return {
        name: max(members, key=lambda mode: mode["output_throughput"])["mode"]
        for name, members in groups.items()
        if members
    }


def comparisons(fastest: Mapping[str, str], samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Return the speed of plain decoding, "auto" and the fastest mode relative to the fastest peer of each kind."""
    ours = dict.fromkeys([PLAIN, "auto", *([fastest["ours"]] if "ours" in fastest else [])])
    peers = [name for name in ("hf-plain", fastest.get("assisted"), fastest.get("lookup")) if name is not None]
    result: list[dict[str, Any]] = []
    for mode in ours:
        for peer in peers:
            if mode in samples and peer in samples:
                ratios = _ratios(samples[peer], samples[mode], lambda sample: sample.seconds_per_token)
                result.append({"mode": mode, "peer": peer} | _spread("times", ratios))
    return result


def differences(modes: Sequence[Mode], samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Return differences of acceptance lengths, paired by prompt, with bootstrap intervals over prompts."""
    lengths = {mode.name: resampled_lengths(samples[mode.name]) for mode in modes}
    return [
        {"mode": mode.name, "minus": other, "difference": interval(lengths[mode.name] - lengths[other])}
        for mode in modes
        for other in mode.compared_with
        if other in lengths
    ]
