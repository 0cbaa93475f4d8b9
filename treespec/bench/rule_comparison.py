"""Compares verification rules on a fixed topology with bootstrap intervals."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from treespec.bench.measure import Sample
from treespec.bench.modes import PLAIN, Mode
from treespec.bench.report import COVERAGE, RESAMPLES, interval, resampled_lengths
from treespec.config.configs import RANDOM_DRAWS, VERIFICATIONS, SpecConfig
from treespec.errors import ConfigError

PAIRS = (("traversal", "rejection"), ("rejection", "naive"), ("coupled", "naive"), ("traversal", "coupled"))
_WIDEST, _DEEPEST = 4, 6


def default_branching(nodes: int) -> tuple[int, ...]:
    """Return a non-increasing branching by depth, such as (3, 2, 1), for the largest tree of at most `nodes` nodes.

    Ties are broken by the smallest sum, which avoids stars and chains, then by the greatest depth.
    """
    shapes: list[tuple[int, ...]] = [()]
    for shape in shapes:  # extended while iterating
        if len(shape) < _DEEPEST:
            longer = [(*shape, k) for k in range(1, (shape or (_WIDEST,))[-1] + 1)]
            shapes += [candidate for candidate in longer if _size(candidate) <= nodes]
    return max(shapes[1:], key=lambda shape: (_size(shape), -sum(shape), len(shape), shape))


@cache
def _size(branching: tuple[int, ...]) -> int:
    return SpecConfig(branching=branching).static_nodes


def rule_modes(rules: Sequence[str], branchings: Sequence[tuple[int, ...]], sampled: bool) -> list[Mode]:
    """Return plain decoding, and each rule on each topology. Only SSMs draft, because lookup has no probabilities.

    If tokens are not `sampled`, they are equal under all rules.
    """
    modes = [Mode(PLAIN, "plain decoding", None)]
    for branching in branchings:
        topology: dict[str, Any] = {
            "branching": branching,
            "max_depth": max(SpecConfig().max_depth, len(branching)),
            "sources": ("ssm",),
        }
        size = SpecConfig(**topology).static_nodes
        for rule in rules:
            name, keeps = f"{rule}-n{size}", not (sampled and rule in RANDOM_DRAWS)
            modes.append(Mode(name, f"{rule}, {size} nodes", topology | {"verification": rule}, keeps))
    return modes


def parse_rules(values: Sequence[str]) -> tuple[str, ...]:
    """Return the named rules, or "all", once each, in the order of `VERIFICATIONS`. Raises ConfigError for others."""
    for name in values:
        if name not in ("all", *VERIFICATIONS):
            raise ConfigError(f"--verification {name}: valid are {', '.join(VERIFICATIONS)}, or all")
    return tuple(rule for rule in VERIFICATIONS if rule in values or "all" in values)


def intervals(modes: Sequence[Mode], samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Return acceptance lengths of rules and their paired differences, with bootstrap intervals over prompts.

    Prompts are resampled with all their repeats, identically for every mode.
    """
    by_rule: dict[int, dict[str, str]] = {}
    figures: dict[str, np.ndarray] = {}
    for mode in modes:
        spec = SpecConfig.resolve(mode.spec, SpecConfig())
        by_rule.setdefault(spec.static_nodes, {})[spec.verification] = mode.name
        figures[mode.name] = resampled_lengths(samples[mode.name])
    lengths = [{"mode": mode.name, "acceptance_length": interval(figures[mode.name])} for mode in modes]
    pairs = [
        {"mode": named[a], "minus": named[b], "difference": interval(figures[named[a]] - figures[named[b]])}
        for named in by_rule.values()
        for a, b in PAIRS
        if a in named and b in named
    ]
    return {"resamples": RESAMPLES, "coverage": COVERAGE, "acceptance_lengths": lengths, "differences": pairs}
