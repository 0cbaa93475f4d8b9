"""The cost model of a round: a curve measured in advance, corrected by measured rounds.

    seconds(round) = target pass(rows, requests) + draft start + levels * draft level + requests * host work

The target pass is a pass over one row of each request plus the cost of all further rows. Passes and drafting are
modelled by the `CostCurve`, measured on an idle machine, times learned corrections; host work is only learned.

All modelled seconds are those of the idle machine. Measured rounds contribute ratios: each part of a round is divided
by the slowdown of its own target pass. Otherwise a busy machine would make drafting look expensive.

Percentages in comments are the relative increase of time per token without a mechanism: the largest of 37 cases, which
replay recorded trees of the embedded models and of SmolLM2 (greedy and sampled, batches of 1 to 7, useless drafts) with
assumed costs of six machines, and with curves that are wrong by a factor of two. Most were measured in a planner with
additional mechanisms, which had smaller effects and were removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from treespec.planning.draft_plan import Drafted

if TYPE_CHECKING:
    from treespec.request import Request

# Host work in a round: "plain": plain decoding; "search": sources were asked and proposed nothing; "tree": trees from
# model-free sources; "drafted": trees grown by SSMs.
HostWork = Literal["plain", "search", "tree", "drafted"]

EMA = 0.1  # weight of the newest round in running means
# Clipping of a measured time, as a share of the running mean (without: +10 %). Interruptions of many times a round's
# length hit its parts at random. Clipping is symmetric, since noise alone would otherwise move the mean.
CLIP = 0.3
WARMUP = 5  # number of first measurements; their median initialises a running mean
# Minimum size of a row beyond each request's first in the correction of the curve, as a share of a one-row pass. A
# disturbed curve may assign rows no cost, and scaling would keep it at zero.
MIN_ROW_SHARE = 0.03


@dataclass(frozen=True)
class CostCurve:
    """Costs measured on this machine, in seconds."""

    rows: tuple[int, ...]  # numbers of rows of the measured target passes of one request, ascending
    verify_seconds: tuple[float, ...]  # seconds of each of these passes
    draft_seconds: float  # draft level of one SSM for one request, including host work
    draft_start_seconds: float = 0.0  # fixed cost of a round's drafting, independent of its levels
    draft_request_seconds: float = 0.0  # marginal cost of a request in a draft pass (without: +3 %, in a batch)
    ssm_seconds: float = 0.0  # marginal cost of an SSM in a draft level
    read_seconds: float = 0.0  # cost of one prompt token in an SSM
    context: int = 0  # committed positions of each request in all measurements above
    position_seconds: float = 0.0  # marginal cost of a committed position in a one-row target pass
    # Marginal cost of a committed position for each additional row that attends to it (without both: +14 %, if contexts
    # of 6,000 positions alternate with short ones)
    row_position_seconds: float = 0.0

    def verify(self, rows: np.ndarray | float) -> np.ndarray:
        """Return the seconds of target passes over `rows` rows, by linear inter- and extrapolation of the curve."""
        x, y = self._points
        # Extrapolate with the mean slope of the upper half of the rows: the last two points may measure the same time
        # by chance, or lie on both sides of a step.
        middle = np.searchsorted(x, x[-1] - x[-1] // 2, side="right") - 1
        slope = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else y[-1] / x[-1]
        return np.interp(rows, x, y) + np.maximum(np.asarray(rows) - x[-1], 0) * slope

    def draft(self, levels: int, passes: int, request_passes: int) -> float:
        """Return the seconds of a round's drafting, without reading prompts; arguments as in `Drafted`."""
        further = max(request_passes - passes, 0)
        seconds = levels * self.draft_seconds + (passes - levels) * self.ssm_seconds
        return seconds + further * self.draft_request_seconds + (self.draft_start_seconds if levels else 0.0)

    @cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        # A slower pass over fewer rows was disturbed, so the curve is made non-decreasing.
        return np.array(self.rows, float), np.minimum.accumulate(self.verify_seconds[::-1])[::-1]


class RoundSeconds(NamedTuple):
    """Measured seconds of the parts of a round."""

    draft: float  # drafting by the SSMs, without `read`
    read: float  # reading committed tokens, such as prompts, before drafting
    forward: float  # the target pass
    host: float  # everything else


class RobustMean:
    """Running mean with clipped steps. It is 0 until `WARMUP` measurements, then starts from their median."""

    def __init__(self) -> None:
        self.value, self._first = 0.0, list[float]()

    @property
    def is_warm(self) -> bool:
        """Whether the first measurements are complete."""
        return len(self._first) == WARMUP

    def add(self, seen: float) -> None:
        """Update with the time of a round."""
        if not self.is_warm:
            self._first.append(seen)
            self.value = median(self._first)
        else:
            self.value += EMA * _clipped(seen - self.value, CLIP * self.value)


class _ExtraRowCost:
    """Online linear regression of pass times on the size of their extra rows (beyond each request's first row).

    Every pass measures the curve's error together with the machine's current speed. The regression separates them: a
    slowdown scales all passes alike, whereas an error of the curve makes the residual depend on the size. Thus a slower
    machine does not make rows look expensive. Without: +9 %.

    The size of extra rows is their modelled time plus `MIN_ROW_SHARE` for each. All times are in modelled passes over
    one row of each request.
    """

    def __init__(self) -> None:
        self.slowdown = RobustMean()  # measured over expected pass times
        self.excess = 0.0  # measured minus modelled time of extra rows, as a share of their size; at least -1
        self._mean = self._variance = 0.0  # running mean and variance of the sizes

    def add(self, seconds: float, expected: float, size: float) -> None:
        """Update with a target pass: its measured and `expected` time, and the size of its extra rows."""
        if not self.slowdown.value:
            self._mean = size
        deviation = size - self._mean
        self._mean += EMA * deviation
        self._variance += EMA * (max(deviation**2, MIN_ROW_SHARE**2) - self._variance)
        if self.slowdown.value:
            # Second bound: a size close to the mean cannot explain a large error.
            limit = min(CLIP * expected, (1 + abs(self.excess)) * abs(deviation))
            error = _clipped(seconds / self.slowdown.value - expected, limit)
            self.excess = max(self.excess + EMA * error * deviation / max(deviation**2, self._variance), -1.0)
        self.slowdown.add(seconds / expected)


def _clipped(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


class CostedBatch(NamedTuple):
    """Cost parameters of a batch."""

    requests: int  # number of requests, as counted by the curve
    extra_context: float  # mean context length relative to the curve's


class RoundCosts:
    """Modelled seconds of the parts of a round, for the batch set by `begin`."""

    def __init__(self, curve: CostCurve):
        self.curve, self.batch = curve, CostedBatch(1, 0.0)
        self._drafting = RobustMean()  # measured over modelled seconds of drafting (1 throughout: +10 %)
        self._rows = _ExtraRowCost()
        self._hosts: dict[HostWork, RobustMean] = {}
        self._by_rows = curve.verify(np.arange(128))  # the curve's seconds by number of rows
        self._listed: list[float] = self._by_rows.tolist()  # list elements are faster to access than array elements

    def begin(self, requests: Sequence[Request], count: int | None = None) -> None:
        """Set the batch; `count` is 1 for a curve of whole batches; None counts all requests."""
        self._extend(len(requests))
        context = sum(request.context_len for request in requests) / len(requests)
        self.batch = CostedBatch(len(requests) if count is None else count, context - self.curve.context)

    @property
    def plain(self) -> float:
        """Seconds of a round of plain decoding."""
        return self.one_row(self.batch.requests) + self.batch.requests * self.host("plain")

    def speculative(self, rows: int, drafted: Drafted) -> float:
        host = self.batch.requests * self.host(self._work(rows, drafted))
        return float(self.verify(rows)) + self.draft(drafted) + host

    def one_row(self, requests: int) -> float:
        """Return the seconds of a target pass over one row of each of `requests` requests."""
        seconds = self._listed[requests] + requests * self.batch.extra_context * self.curve.position_seconds
        return max(seconds, self.curve.verify_seconds[0] / 2)  # shorter contexts than the curve's are subtracted

    def verify(self, rows: int) -> float:
        """Return the seconds of a target pass over `rows` rows."""
        return self._size_and_seconds(rows)[1]

    def verify_each(self, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of target passes over these numbers of rows, ascending."""
        self._extend(int(rows[-1]))
        return self._modelled(rows, self._by_rows, np.maximum)[1]

    def host(self, work: HostWork) -> float:
        """Return the host's seconds per request; unmeasured kinds of work are assumed to be as fast as the fastest."""
        measured = self._hosts.get(work)
        return measured.value if measured else min((average.value for average in self._hosts.values()), default=0.0)

    @property
    def draft_scale(self) -> float:
        """Correction factor of the curve's seconds of drafting, after some rounds."""
        return self._drafting.value if self._drafting.is_warm else 1.0

    def draft(self, drafted: Drafted) -> float:
        """Return the seconds of a round's drafting, without reading prompts."""
        return self.curve.draft(drafted.levels, drafted.passes, drafted.request_passes) * self.draft_scale

    def learn(self, seconds: RoundSeconds, rows: int, drafted: Drafted, drafting: bool) -> None:
        """Update the corrections with a round; `drafting`: whether sources were asked."""
        plain = self.one_row(self.batch.requests)
        size, expected = self._size_and_seconds(rows)
        self._rows.add(seconds.forward / plain, expected / plain, size / plain)
        slowdown = seconds.forward / self.verify(rows)
        work: HostWork = self._work(rows, drafted) if drafting else "plain"
        self._hosts.setdefault(work, RobustMean()).add(seconds.host / slowdown / self.batch.requests)
        if modelled := self.curve.draft(drafted.levels, drafted.passes, drafted.request_passes):
            self._drafting.add(seconds.draft / slowdown / modelled)

    def _work(self, rows: int, drafted: Drafted) -> HostWork:
        """Return the kind of host work in a round that asks sources."""
        return "drafted" if drafted.levels else "tree" if rows > self.batch.requests else "search"

    def _size_and_seconds(self, rows: int) -> tuple[float, float]:
        """Return the size of a pass's extra rows for `_ExtraRowCost`, and its seconds."""
        self._extend(rows)
        return self._modelled(rows, self._listed, max)

    def _modelled(self, rows: Any, by_rows: Any, maximum: Callable[[Any, float], Any]) -> tuple[Any, Any]:
        """Compute `_size_and_seconds` for one number of rows or an array."""
        count, context = self.batch
        one_row, further = self.one_row(count), rows - count
        difference = by_rows[rows] - by_rows[count] + further * (context * self.curve.row_position_seconds)
        extra = maximum(difference, 0.0)
        size = extra + further * (MIN_ROW_SHARE * one_row)
        return size, one_row + maximum(extra + self._rows.excess * size, 0.0)

    def _extend(self, rows: int) -> None:
        if rows >= len(self._listed):
            self._by_rows = self.curve.verify(np.arange(2 * rows))
            self._listed = self._by_rows.tolist()
