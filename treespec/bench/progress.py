"""Progress of a benchmark and its estimated remaining time."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Plan:
    """The runs of a benchmark. A run is one mode over one batch of prompts.

    Args:
        counts: number of planned runs by batch size and mode, including warm-up.

    Attributes:
        done: number of completed runs, by the same keys.
        seconds: their total seconds.
    """

    counts: Mapping[tuple[int, str], int]
    done: Counter[tuple[int, str]] = field(default_factory=Counter)
    seconds: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, batch: int, mode: str, seconds: float) -> None:
        """Record a run."""
        self.done[batch, mode] += 1
        self.seconds[batch, mode] += seconds  # type: ignore[assignment]

    @property
    def total(self) -> int:
        """Number of planned runs."""
        return sum(self.counts.values())

    @property
    def num_done(self) -> int:
        """Number of completed runs."""
        return sum(self.done.values())

    @property
    def num_modes(self) -> int:
        return len({mode for _, mode in self.counts})

    @property
    def is_measured(self) -> bool:
        """Whether every mode has run at least once, as `seconds_left` requires."""
        return {mode for _, mode in self.counts} == {mode for _, mode in self.done}

    @property
    def seconds_left(self) -> float:
        """Estimated remaining seconds, from each mode's mean time at this batch size.

        For a batch size without completed runs, the mean time per prompt at the nearest measured size is used.
        """
        return sum((count - self.done[key]) * self._seconds_of(*key) for key, count in self.counts.items())

    def _seconds_of(self, batch: int, mode: str) -> float:
        measured = [size for size, name in self.done if name == mode]
        if not measured:
            return 0.0
        nearest = min(measured, key=lambda size: abs(size - batch))
        return self.seconds[nearest, mode] / self.done[nearest, mode] * batch / nearest


class BenchProgress:
    """Progress callbacks of a benchmark; the base class ignores them."""

    def stage(self, text: str) -> None:
        """Called before a phase outside the plan, such as loading."""

    def began(self, plan: Plan) -> None:
        """Called before the first run."""

    def ran(self, plan: Plan) -> None:
        """Called after each run."""


def duration(seconds: float) -> str:
    """Format seconds as "40 s", "7 min" or "2.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
