"""The cost model of a round: a curve measured in advance, which measured rounds correct.

    seconds(round) = target pass(rows, requests) + draft start + levels * draft level + requests * host work

Passes and drafting are modelled by the `CostCurve`, which is measured at the start and then follows the measured rounds
(`CurveCorrection`); host work is only learned. Decisions depend only on ratios of these seconds, so a slowdown of the
whole machine is estimated separately and changes no decision.

Percentages in comments are the relative increase of time per token without a mechanism: the largest of 37 cases, which
replay recorded trees of the embedded models and of SmolLM2 (greedy and sampled, batches of 1 to 7, useless drafts) with
assumed costs of six machines, and with curves that are wrong by a factor of two. Most were measured in a planner with
additional mechanisms, which had smaller effects and were removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from treespec.planning.draft_plan import Drafted

if TYPE_CHECKING:
    from treespec.request import Request

# Host work in a round: "plain": plain decoding; "search": sources were asked and proposed nothing; "tree": trees from
# model-free sources; "drafted": trees grown by SSMs.
HostWork = Literal["plain", "search", "tree", "drafted"]

# The filter's standard deviations, of natural logarithms: of one measured time, of the slowdown's change from one round
# to the next, and of the errors of a measured curve: in its passes, and in the costs of positions and of drafting.
NOISE, SLOWDOWN_STEP, PASS_ERROR, PART_ERROR = 0.2, 0.05, 0.3, 0.7
OCTAVES = 2.0  # errors of passes whose rows differ by a factor of 2 ** OCTAVES have a correlation of 1 / e
FORGET = 1e-4  # share per round by which the costs' uncertainty returns to that of a measured curve
# Prior variance of a value that drifts as the slowdown does: each round adds FORGET times as much.
DRIFTING = np.array([[SLOWDOWN_STEP**2 / FORGET]])
UPDATE_ROUNDS = 8  # number of learned rounds after which the corrections are applied
STORE_ROUNDS = 256  # number of learned rounds after which the corrected curve is first stored
# Least time between two rounds to learn from, and its factor after STORE_ROUNDS of them. An update takes up to 0.3 ms
# after a pass, whose weights evict all else from the caches (factor 1: +1 to +3 % with SmolLM2).
LEARN_SECONDS, LATER_FACTOR = 1e-2, 4.0
START_SHARES = 0.05, 0.9  # bounds of the start of drafting, relative to drafting one level


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
    idle_seconds: tuple[float, ...] = ()  # as measured on an idle engine (see `is_outdated`)

    def verify(self, rows: np.ndarray | float) -> np.ndarray:
        """Return the seconds of target passes over `rows` rows, by linear inter- and extrapolation of the curve."""
        x, y = self._points
        # Extrapolate with the mean slope of the upper half of the rows: the last two points may measure the same time
        # by chance, or lie on both sides of a step.
        middle = np.searchsorted(x, x[-1] - x[-1] // 2, side="right") - 1
        slope = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else y[-1] / x[-1]
        return np.interp(rows, x, y) + np.maximum(np.asarray(rows) - x[-1], 0) * slope

    def draft(self, drafted: Drafted) -> float:
        """Return the seconds of a round's drafting, without reading prompts."""
        return sum(self.draft_parts(drafted))

    def draft_parts(self, drafted: Drafted) -> tuple[float, float, float, float]:
        """Return the seconds of its start, of levels with one SSM and request, of further SSMs and further requests."""
        levels, passes, further = drafted.levels, drafted.passes, max(drafted.request_passes - drafted.passes, 0)
        start = self.draft_start_seconds if levels else 0.0
        further_ssms = max(passes - levels, 0) * self.ssm_seconds
        return start, levels * self.draft_seconds, further_ssms, further * self.draft_request_seconds

    @cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        # A slower pass over fewer rows was disturbed, so the curve is made non-decreasing.
        return np.array(self.rows, float), np.minimum.accumulate(self.verify_seconds[::-1])[::-1]


def split_drafting(one_level: float, several: float, levels: int) -> tuple[float, float]:
    """Return the seconds of the start of drafting and of a level, from those of one level and of several.

    Bounded so that a disturbed time makes neither free: corrections are factors, which would keep a cost at zero.
    """
    further_level = (several - one_level) / max(levels - 1, 1)
    least, most = (share * min(one_level, several) for share in START_SHARES)
    start = min(max(one_level - further_level, least), most)
    return start, (several - start) / levels


class RoundSeconds(NamedTuple):
    """Measured seconds of the parts of a round."""

    draft: float  # drafting by the SSMs, without `read`
    read: float  # reading committed tokens, such as prompts, before drafting
    forward: float  # the target pass
    host: float  # everything else


class KalmanFilter:
    """Estimates slowly drifting values from noisy weighted sums of them.

    Sums that differ from the expected one by more than `NOISE` have less weight (Huber's weights), because other work
    may interrupt any part of a round for many times its duration.
    """

    def __init__(self, prior: np.ndarray) -> None:
        self.values = np.zeros(len(prior))
        self._covariance, self._forgotten = prior.copy(), FORGET * prior  # float64 [len(values), len(values)]

    def add(self, shares: np.ndarray, seen: float) -> None:
        """Update with a measured sum; `shares` are its derivatives by the values, float64 [len(values)]."""
        self._covariance *= 1 - FORGET
        self._covariance += self._forgotten
        spread, error = self._covariance @ shares, seen - float(shares @ self.values)
        variance = float(shares @ spread) + NOISE * max(NOISE, abs(error))
        self.values += spread * (error / variance)
        self._covariance -= np.multiply.outer(spread, spread / variance)


class CurveCorrection:
    """Learned factors of a curve's costs, and the slowdown of the machine, all as natural logarithms.

    The slowdown follows a random walk, whereas the factors hardly change. A pass that takes longer than expected is
    therefore mostly attributed to a slower machine, and only rounds that are close in time compare numbers of rows. Row
    counts that do not occur in rounds follow their neighbours. Rounds of different contexts tell what positions cost:
    with simulated contexts of 200 and 6,000 in turn, and positions at half or twice the measured cost, the modelled
    ratio of 16 rows to one errs by 0.7 % after 200 rounds (without this factor by 5.4 and 3.4 %).
    """

    def __init__(self, rows: Sequence[int]) -> None:
        octaves, counts = np.log2(rows), np.arange(rows[-1] + 1)
        prior = PART_ERROR**2 * np.eye(2 + len(rows))
        prior[:1, :1] = DRIFTING
        prior[1:-1, 1:-1] = PASS_ERROR**2 * np.exp(-np.abs(octaves[:, None] - octaves) / OCTAVES)
        self._passes = KalmanFilter(prior)  # slowdown, factors by number of rows, factor of positions
        self._drafting = KalmanFilter(PART_ERROR**2 * np.eye(4))  # factors of `CostCurve.draft_parts`
        # Shares of a pass without further positions by its number of rows, float64 [most rows + 1, 2 + len(rows)]
        interpolated = [np.interp(counts, rows, unit) for unit in np.eye(len(rows))]
        self._shares = np.stack([np.ones(len(counts)), *interpolated, np.zeros(len(counts))], 1)

    @property
    def slowdown(self) -> float:
        """Duration of the latest passes relative to the corrected curve."""
        return math.exp(self._passes.values[0])

    def add_pass(self, rows: int, seconds: float, expected: float, position_share: float) -> None:
        """Update with a target pass: its measured and its expected time, and the share of further positions in it."""
        shares = self._shares[min(rows, len(self._shares) - 1)].copy()
        shares[1:] *= 1 - position_share
        shares[-1] = position_share
        self._passes.add(shares, math.log(seconds / expected))

    def add_drafting(self, seconds: float, expected: Sequence[float]) -> None:
        """Update with a round's drafting: its measured time, and its parts as expected by the curve."""
        parts = expected * np.exp(self._drafting.values)
        total = float(parts.sum())
        shares = parts / total
        seen = math.log(seconds / self.slowdown / total) + float(shares @ self._drafting.values)
        self._drafting.add(shares, seen)

    def apply(self, curve: CostCurve) -> CostCurve:
        """Return the curve times the factors, which become 1."""
        *passes, position = np.exp(self._passes.values[1:]).tolist()
        verify = curve.verify(np.array(curve.rows)) * passes
        start, level, ssm, request = np.exp(self._drafting.values).tolist()
        self._passes.values[1:] = self._drafting.values[:] = 0.0
        return replace(
            curve,
            verify_seconds=tuple(verify.tolist()),
            draft_seconds=level * curve.draft_seconds,
            draft_start_seconds=start * curve.draft_start_seconds,
            draft_request_seconds=request * curve.draft_request_seconds,
            ssm_seconds=ssm * curve.ssm_seconds,
            position_seconds=position * curve.position_seconds,
            row_position_seconds=position * curve.row_position_seconds,
        )


class CostedBatch(NamedTuple):
    """Cost parameters of a batch."""

    requests: int  # number of requests, as counted by the curve
    extra_context: float  # mean context length relative to the curve's


class RoundCosts:
    """Modelled seconds of the parts of a round, for the batch set by `begin`."""

    def __init__(self, curve: CostCurve, learn_seconds: float = LEARN_SECONDS):
        self._correction, self._num_learned = CurveCorrection(curve.rows), 0
        self._learn_seconds = self._unlearned = learn_seconds
        self.store: Callable[[CostCurve], None] | None = None  # stores a corrected curve for the next start
        self._hosts: dict[HostWork, KalmanFilter] = {}  # logarithms of the host's seconds per request
        self._host_seconds: dict[HostWork, float] = {}  # results of `host` until the next update
        self._follow(self._correction.apply(curve))
        self.batch = CostedBatch(1, 0.0)

    def _follow(self, curve: CostCurve, rows: int = 128) -> None:
        """Set the curve, and list its seconds up to a number of rows."""
        self.curve, self._by_rows = curve, curve.verify(np.arange(rows))
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
        """Return the seconds of a round that asks sources."""
        host = self.batch.requests * self.host(self._work(rows, drafted))
        return self.verify(rows) + self.curve.draft(drafted) + host

    def one_row(self, requests: int) -> float:
        """Return the seconds of a target pass over one row of each of `requests` requests."""
        seconds = self._listed[requests] + requests * self.batch.extra_context * self.curve.position_seconds
        return max(seconds, self.curve.verify_seconds[0] / 2)  # shorter contexts than the curve's are subtracted

    def verify(self, rows: int) -> float:
        """Return the seconds of a target pass over `rows` rows."""
        self._extend(rows)
        return float(self._modelled(rows, self._listed, max))

    def verify_each(self, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of target passes over these numbers of rows, ascending."""
        self._extend(int(rows[-1]))
        seconds: np.ndarray = self._modelled(rows, self._by_rows, np.maximum)
        return seconds

    def _modelled(self, rows: Any, by_rows: Any, maximum: Callable[[Any, float], Any]) -> Any:
        """Compute the seconds for one number of rows or an array."""
        count, context = self.batch
        further = by_rows[rows] - by_rows[count] + (rows - count) * (context * self.curve.row_position_seconds)
        return self.one_row(count) + maximum(further, 0.0)

    def host(self, work: HostWork) -> float:
        """Return the host's seconds per request; unmeasured kinds of work are assumed to be as fast as the fastest."""
        if work not in self._host_seconds:
            measured = [self._hosts[work]] if work in self._hosts else self._hosts.values()
            self._host_seconds[work] = min([math.exp(seconds.values[0]) for seconds in measured], default=0.0)
        return self._host_seconds[work]

    @property
    def slowdown(self) -> float:
        """Measured over modelled seconds of the latest passes."""
        return self._correction.slowdown

    def learn(self, seconds: RoundSeconds, rows: int, drafted: Drafted, drafting: bool) -> None:
        """Update the costs with a round; `drafting`: whether sources were asked."""
        least = self._learn_seconds * (LATER_FACTOR if self._num_learned >= STORE_ROUNDS else 1.0)
        is_due, whole = self._unlearned >= least, sum(seconds)
        self._unlearned = whole if is_due else self._unlearned + whole
        if not is_due or seconds.forward <= 0:
            return
        expected = self.verify(rows)
        self._correction.add_pass(rows, seconds.forward, expected, max(1 - self._listed[rows] / expected, 0.0))
        if any(parts := self.curve.draft_parts(drafted)) and seconds.draft > 0:
            self._correction.add_drafting(seconds.draft, parts)
        work: HostWork = self._work(rows, drafted) if drafting else "plain"
        host = max(seconds.host, 1e-7) / self.slowdown / self.batch.requests
        self._hosts.setdefault(work, KalmanFilter(DRIFTING)).add(np.ones(1), math.log(host))
        self._host_seconds.clear()
        self._num_learned += 1
        if self._num_learned % UPDATE_ROUNDS == 0:
            self._follow(self._correction.apply(self.curve), len(self._listed))
            # After 256, 512, 1,024, ... rounds, so that a killed process loses at most the later half of them
            if self.store is not None and self._num_learned >= STORE_ROUNDS and self._num_learned.bit_count() == 1:
                self.store(self.curve)

    def _work(self, rows: int, drafted: Drafted) -> HostWork:
        """Return the kind of host work in a round that asks sources."""
        return "drafted" if drafted.levels else "tree" if rows > self.batch.requests else "search"

    def _extend(self, rows: int) -> None:
        if rows >= len(self._listed):
            self._follow(self.curve, 2 * rows)
