"""Profiles an engine's rounds: seconds by part, and accepted tokens."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from treespec.engine.engine import Engine
from treespec.sampling.noise import Noise

MEANING = {
    "draft": "all sources propose",
    "merge": "plan, merge and cut the trees",
    "forward": "the target pass; in captured rounds also verification and commit",
    "verify": "from logits to the accepted path",
    "noise": "choose the target's tokens with noise",
    "commit": "emit tokens, compact the caches",
    "update": "release finished requests",
    "host": "everything else",
}


@dataclass
class Profile:
    """Measurements of a `profiled` context."""

    rounds: int = 0  # engine steps with at least one verified tree
    accepted: Counter[int] = field(default_factory=Counter)  # trees by accepted drafted tokens
    # seconds by stage, as in `MEANING`; the sum is the time of all steps without prefill
    stages: dict[str, float] = field(default_factory=dict)
    prefill_seconds: float = 0.0  # including the SSMs'


def acceptance_by_depth_of(accepted: Counter[int]) -> list[float]:
    """Return the shares of trees whose accepted path reached depth 1, 2, ..., from numbers of trees by its depth."""
    total, deepest = accepted.total(), max(accepted, default=0)
    return [sum(n for depth, n in accepted.items() if depth >= d) / total for d in range(1, deepest + 1)]


@contextmanager
def profiled(engine: Engine) -> Iterator[Profile]:
    """Profile an engine while the context is open. Enter and leave the context between rounds.

    The yielded profile is filled when the context closes. The target's choices with noise are timed by patching
    `Noise.choose`.
    """
    profile, clock, stats, choose = Profile(), engine.clock, engine.stats, Noise.choose

    def timed(noise: Noise, scores: np.ndarray, position: int) -> tuple[int, float]:
        stage = clock.enter("noise")
        try:
            return choose(noise, scores, position)
        finally:
            clock.enter(stage)

    clock.seconds.setdefault("noise", 0.0)
    before, accepted, rounds = dict(clock.seconds), stats.accepted_lengths.copy(), stats.rounds
    Noise.choose = timed  # type: ignore[method-assign, assignment]
    try:
        yield profile
    finally:
        Noise.choose = choose  # type: ignore[method-assign]
        spent = {stage: seconds - before[stage] for stage, seconds in clock.seconds.items()}
        spent["draft"] += spent.pop("foreign") + spent.pop("search")
        profile.prefill_seconds = spent["prefill"]
        profile.stages = {stage: spent[stage] for stage in MEANING}
        profile.accepted, profile.rounds = stats.accepted_lengths - accepted, stats.rounds - rounds
