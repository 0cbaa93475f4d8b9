"""How far a benchmark is, and how long it will take by what its runs have taken so far."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Plan:
    """The runs of a benchmark. A run is one mode over one batch of prompts.

    Args:
        counts: how many runs there will be, warm-up included, by batch size and mode.

    Attributes:
        done: how many there were.
        seconds: what they took together.
    """

    counts: Mapping[tuple[int, str], int]
    done: Counter[tuple[int, str]] = field(default_factory=Counter)
    seconds: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, batch: int, mode: str, seconds: float) -> None:
        """Count a run."""
        self.done[batch, mode] += 1
        self.seconds[batch, mode] += seconds  # type: ignore[assignment]

    @property
    def total(self) -> int:
        """All runs."""
        return sum(self.counts.values())

    @property
    def num_done(self) -> int:
        return sum(self.done.values())

    @property
    def num_modes(self) -> int:
        return len({mode for _, mode in self.counts})

    @property
    def is_measured(self) -> bool:
        """Whether every mode has run, so that `seconds_left` is more than a guess."""
        return {mode for _, mode in self.counts} == {mode for _, mode in self.done}

    @property
    def seconds_left(self) -> float:
        """What the remaining runs will take: each as long as the mode's at this batch size so far. At a batch size that
        has not run yet, as long for each prompt as at the nearest one that has."""
        return sum((count - self.done[key]) * self._seconds_of(*key) for key, count in self.counts.items())

    def _seconds_of(self, batch: int, mode: str) -> float:
        measured = [size for size, name in self.done if name == mode]
        if not measured:
            return 0.0
        nearest = min(measured, key=lambda size: abs(size - batch))
        return self.seconds[nearest, mode] / self.done[nearest, mode] * batch / nearest


class Progress:
    """Who hears how far a benchmark is. This one says nothing."""

    def stage(self, text: str) -> None:
        """Something begins that is no run of the plan, such as loading."""

    def began(self, plan: Plan) -> None:
        """The first run is next."""

    def ran(self, plan: Plan) -> None:
        """A run has ended."""


def duration(seconds: float) -> str:
    """Seconds for a reader: "40 s", "7 min", "2.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
