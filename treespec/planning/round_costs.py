"""The cost model of a round: a curve measured in advance, corrected by measured rounds.

    seconds(round) = target pass(rows, requests, trees) + draft start + levels * draft level + requests * host work

The target pass is a pass over one row of each request plus the cost of all further rows. Passes and drafting are
modelled by the `CostCurve`, measured on an idle machine, times learned corrections (`_Corrections`); the host's work is
learned alone. Corrections are kept by size class of the batch.

All modelled seconds are those of the idle machine. Measured rounds contribute ratios: each part of a round is divided
by the slowdown of its own target pass. Otherwise a busy machine would make drafting look expensive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from treespec.planning.draft_plan import Drafted
from treespec.planning.planner_config import DEFAULT, PlannerConfig
from treespec.request import Request

# The host's work in a round: "plain": plain decoding; "search": sources are asked and propose nothing; "tree": trees
# of sources without a model; "drafted": trees grown by SSMs.
HostWork = Literal["plain", "search", "tree", "drafted"]
# Priors of the host times, relative to "tree".
_HOST_RATIOS: dict[HostWork, float] = {"plain": 1 / 3, "search": 2 / 3, "tree": 1.0, "drafted": 2.0}
_Seconds = TypeVar("_Seconds", float, np.ndarray)


@dataclass(frozen=True)
class CostCurve:
    """Costs measured on this machine, in seconds.

    Args:
        rows: row counts of the measured target passes of one request, ascending.
        verify_seconds: time of each of these passes.
        draft_seconds: draft level of one SSM for one request, host work included.
        draft_start_seconds: fixed cost of a round's drafting, independent of its levels.
        request_seconds: marginal cost of a request in a target pass, without its rows.
        draft_request_seconds: marginal cost of a request in a draft pass of one SSM.
        ssm_seconds: marginal cost of an SSM in a draft level.
        read_seconds: cost of one prompt token in an SSM.
        tree_seconds: marginal cost of a request with a tree of several nodes, in addition to `request_seconds`.
        context: committed positions of each request during the measurement of all of the above.
        position_seconds: marginal cost of a committed position in a target pass over one row.
        row_position_seconds: marginal cost of a committed position for each further row that attends to it.
    """

    rows: tuple[int, ...]
    verify_seconds: tuple[float, ...]
    draft_seconds: float
    draft_start_seconds: float = 0.0
    request_seconds: float = 0.0
    draft_request_seconds: float = 0.0
    ssm_seconds: float = 0.0
    read_seconds: float = 0.0
    tree_seconds: float = 0.0
    context: int = 0
    position_seconds: float = 0.0
    row_position_seconds: float = 0.0

    def verify(self, rows: np.ndarray | float, requests: int = 1, trees: np.ndarray | int = 0) -> np.ndarray:
        """Return the seconds of a target pass, by linear inter- and extrapolation of the measured points.

        Args:
            rows: total rows of the pass.
            requests: total requests.
            trees: number of requests with more than one row.
        """
        x, y = self._points
        # Extrapolate with the mean slope of the upper half of the rows: the last two points may measure the same time
        # by chance, or be the two sides of a step.
        middle = np.searchsorted(x, x[-1] - x[-1] // 2, side="right") - 1
        slope = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else y[-1] / x[-1]
        beyond = np.maximum(np.asarray(rows) - x[-1], 0) * slope
        return (
            np.interp(rows, x, y)
            + beyond
            + (requests - 1) * self.request_seconds
            + np.maximum(trees - 1, 0) * self.tree_seconds
        )

    def draft_levels(self, levels: float, passes: float, request_passes: float) -> float:
        """Return the seconds of a round's draft levels, without the start of drafting and reading prompts.

        Args:
            levels: draft levels.
            passes: draft passes, one per level and SSM.
            request_passes: draft passes times the requests in each.
        """
        further = max(request_passes - passes, 0.0)
        return levels * self.draft_seconds + (passes - levels) * self.ssm_seconds + further * self.draft_request_seconds

    def draft(self, levels: float, passes: float, request_passes: float) -> float:
        """Return the seconds of a round's drafting, without reading prompts; arguments as in `draft_levels`."""
        return self.draft_levels(levels, passes, request_passes) + (self.draft_start_seconds if levels else 0.0)

    @cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        # A pass over fewer rows that measured slower was disturbed, so the curve is made non-decreasing.
        return np.array(self.rows, float), np.minimum.accumulate(self.verify_seconds[::-1])[::-1]


class RoundSeconds(NamedTuple):
    """Measured seconds of a round by part.

    Attributes:
        draft: drafting by the SSMs, without `read`.
        read: reading committed tokens, such as prompts, that the SSMs had not read yet.
        forward: the target pass.
        host: everything else.
    """

    draft: float
    read: float
    forward: float
    host: float


class RobustMean:
    """Running mean of times or ratios of times, with clipped steps to limit the influence of outliers.

    Without an initial value, it starts as the median of the first `warmup_samples` times.

    Args:
        config: weight, clipping and warm-up.
        known: initial value, as measured on an idle machine; None if there is none.
    """

    def __init__(self, config: PlannerConfig, known: float | None = None):
        self.value, self._config = known or 0.0, config
        self._settled = known is not None
        self._first: list[float] = []

    @property
    def known(self) -> bool:
        """Whether `value` is based on a measurement."""
        return self._settled or bool(self._first)

    def add(self, seen: float) -> None:
        """Update with the time or ratio of a round."""
        if self._settled:
            limit = self._config.seconds_clip * self.value
            self.value += self._config.seconds_ema * _clipped(seen - self.value, limit)
            return
        self._first.append(seen)
        self.value, self._settled = median(self._first), len(self._first) == self._config.warmup_samples

    def decay(self, to: float, share: float) -> None:
        """Reduce the excess over `to`, if any, by `share`."""
        self.value -= share * max(self.value - to, 0.0)
        self._settled = True


class _DraftScales:
    """Ratios of measured to modelled seconds of drafting, separately for its start and its levels.

    A round measures only their sum. The error is attributed to both in proportion to their modelled shares, so rounds
    of different depth separate them. With a single ratio, deep trees would make shallow ones look cheap.

    Attributes:
        start, level: the ratios.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.start = self.level = 1.0
        self._config = config

    def add(self, seconds: float, start: float, levels: float) -> None:
        """Update with the measured seconds of a round's drafting; `start`, `levels`: modelled seconds, unscaled."""
        start, levels = self.start * start, self.level * levels
        expected = start + levels
        step = self._config.seconds_ema * _clipped(seconds / expected - 1, self._config.seconds_clip)
        self.start *= 1 + step * start / expected
        self.level *= 1 + step * levels / expected


class _ExtraRowCost:
    """Online linear regression of pass times on the size of their extra rows, those beyond each request's first.

    Every pass measures the error of the curve together with the current speed of the machine. The regression separates
    the two: a slowdown scales all passes alike, whereas an error of the curve makes the residual depend on the size. So
    a machine that becomes slower does not make rows look expensive.

    The size of extra rows is their modelled time plus `min_row_share` for each. All times are in modelled passes over
    one row of each request.

    Attributes:
        slowdown: running mean of measured over expected pass times.
        excess: measured minus modelled time of extra rows, as a share of their size; at least -1.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.slowdown, self.excess, self._config = RobustMean(config), 0.0, config
        self._mean = self._variance = 0.0  # running mean and variance of the sizes

    def add(self, seconds: float, expected: float, size: float) -> None:
        """Update with a target pass.

        Args:
            seconds: measured time.
            expected: modelled time, corrected by `excess`.
            size: size of the extra rows.
        """
        weight, config = self._config.seconds_ema, self._config
        if not self.slowdown.known:
            self._mean = size
        deviation = size - self._mean
        self._mean += weight * deviation
        self._variance += weight * (max(deviation**2, config.min_row_share**2) - self._variance)
        if self.slowdown.known:
            # The second bound: a size close to the mean cannot explain a large error.
            limit = min(config.seconds_clip * expected, (1 + abs(self.excess)) * abs(deviation))
            error = _clipped(seconds / self.slowdown.value - expected, limit)
            self.excess = max(self.excess + weight * error * deviation / max(deviation**2, self._variance), -1.0)
        self.slowdown.add(seconds / expected)


class _Corrections:
    """Corrections of the curve learned from batches of one size class.

    A single-row pass is a target pass over one row of each request.

    Attributes:
        hosts: host seconds per request by kind of work; kinds that did not occur yet are missing.
        draft_scales: corrections of drafting.
        rows: correction of rows beyond each request's first.
        after_tree_scale: time of a single-row pass after a pass over trees, relative to one after a single-row pass.
        follows_tree: whether the last pass came after a pass over trees.
        fruitless: number of consecutive "search" rounds up to now.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.hosts: dict[HostWork, RobustMean] = {}
        self.draft_scales, self.after_tree_scale = _DraftScales(config), RobustMean(config, 1.0)
        self.follows_tree = False
        self.fruitless = 0
        self.rows = _ExtraRowCost(config)
        self._was_single_row = False  # whether the last pass was a single-row pass

    def add_forward(self, seconds: float, expected: float, size: float) -> None:
        """Update with a target pass. Times are in modelled single-row passes.

        Single-row passes correct the rows only if they follow another one, as in plain decoding: after a tree, such a
        pass takes 1.05 to 1.08 times as long back to back, and 1.1 to 1.3 times within rounds.

        Args:
            seconds: measured time.
            expected: modelled time, corrected.
            size: size of the extra rows as in `_ExtraRowCost`; 0 for a single-row pass.
        """
        self.follows_tree, self._was_single_row = not self._was_single_row, not size
        if size or not self.follows_tree:
            self.rows.add(seconds, expected, size)
        elif self.rows.slowdown.known:
            self.after_tree_scale.add(seconds / self.rows.slowdown.value)


def _speculative_work(trees: int, drafted: Drafted) -> HostWork:
    """Return the kind of host work in a round that asks sources; `trees` counts trees with drafted nodes."""
    return "drafted" if drafted.levels else "tree" if trees else "search"


def _clipped(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


class CostedBatch(NamedTuple):
    """What costs depend on of a batch.

    Attributes:
        requests: number of requests, as the curve counts them.
        extra_context: mean context length relative to the curve's.
    """

    requests: int
    extra_context: float


class RoundCosts:
    """Modelled seconds of the parts of a round, for the batch set by `begin`.

    Args:
        curve: the measured curve.
        learns: whether measured rounds correct it.
        config: weights and clipping of the corrections.

    Attributes:
        batch: the batch that costs are modelled for.
    """

    def __init__(self, curve: CostCurve, learns: bool = True, config: PlannerConfig = DEFAULT):
        self.curve, self.learns, self.config = curve, learns, config
        self._curve_cache: dict[tuple[int, int, int], float] = {}
        self._learned: dict[int, _Corrections] = {}
        self._read_scale = RobustMean(config, 1.0)  # measured over modelled seconds of reading
        self.batch = CostedBatch(1, 0.0)
        self._by_rows = np.empty(0)  # seconds of the curve by number of rows, for one request

    def begin(self, requests: Sequence[Request], count: int | None = None) -> None:
        """Set the batch: its number of requests and their mean context length relative to the curve's.

        Args:
            requests: the batch.
            count: number of requests as the curve counts them, if it was measured for whole batches; None = all.
        """
        context = sum(request.context_len for request in requests) / len(requests)
        self.batch = CostedBatch(len(requests) if count is None else count, context - self.curve.context)

    @property
    def learned(self) -> _Corrections:
        """Corrections of the current batch's size class."""
        size = self.batch.requests.bit_length()
        if size not in self._learned:
            self._learned[size] = _Corrections(self.config)
        return self._learned[size]

    @property
    def plain(self) -> float:
        """Seconds of a round of plain decoding."""
        return self._one_row(self.batch.requests) + self.batch.requests * self.host("plain")

    def speculative(self, rows: int, trees: int, drafted: Drafted) -> float:
        """Return the modelled seconds of the speculative round last passed to `learn`, without reading prompts.

        Args:
            rows, trees: as in `verify`.
            drafted: what the SSMs drafted.
        """
        host = self.batch.requests * self.host(_speculative_work(trees, drafted))
        return self._last_pass(rows, trees) + self.draft(drafted) + host

    def verify(self, rows: int, requests: int, trees: int = 0) -> float:
        """Return the seconds of a target pass; arguments as in `CostCurve.verify`."""
        further, number = self._extra_seconds(rows, requests, trees), rows - requests
        return self._one_row(requests) + max(further + self.learned.rows.excess * self._size(further, number), 0.0)

    def verify_more(self, rows: int, count: int, requests: int, trees: np.ndarray | int) -> np.ndarray:
        """Return the seconds of target passes over `rows` + 1 to `rows` + `count` rows, float64 [count].

        Args:
            rows, count: bounds of the row counts.
            requests: as in `verify`.
            trees: as in `verify`, int [count] or one number for all.
        """
        if rows + count >= len(self._by_rows):
            self._by_rows = self.curve.verify(np.arange(2 * (rows + count)))
        further = self._by_rows[rows + 1 : rows + count + 1] - self._by_rows[requests]
        further += np.maximum(trees - 1, 0) * self.curve.tree_seconds
        number = np.arange(rows + 1 - requests, rows + count + 1 - requests)
        further = np.maximum(further + number * self.batch.extra_context * self.curve.row_position_seconds, 0.0)
        further += self.learned.rows.excess * self._size(further, number)
        return self._one_row(requests) + np.maximum(further, 0.0)

    def host(self, work: HostWork) -> float:
        """Return the host's seconds per request; kinds of work not measured yet follow from others by prior ratios."""
        hosts = self.learned.hosts
        if work in hosts:
            return hosts[work].value
        tree = hosts["tree"].value if "tree" in hosts else hosts["drafted"].value / 2 if "drafted" in hosts else 0.0
        return _HOST_RATIOS[work] * tree

    def level(self, passes: float, request_passes: float) -> float:
        """Return the seconds of a draft level; arguments as in `CostCurve.draft_levels`."""
        return self.curve.draft_levels(1, passes, request_passes) * self.learned.draft_scales.level

    @property
    def draft_start(self) -> float:
        """Fixed seconds of a round's drafting."""
        return self.curve.draft_start_seconds * self.learned.draft_scales.start

    def further_request(self, passes: float) -> float:
        """Return the marginal seconds of a request in a draft level of `passes` passes."""
        return passes * self.curve.draft_request_seconds * self.learned.draft_scales.level

    def further_ssm(self, requests: int) -> float:
        """Return the marginal seconds of an SSM in a draft level of `requests` requests."""
        own = self.curve.ssm_seconds + (requests - 1) * self.curve.draft_request_seconds
        return own * self.learned.draft_scales.level

    def draft(self, drafted: Drafted) -> float:
        """Return the seconds of a round's drafting, without reading prompts."""
        if not drafted.levels:
            return 0.0
        return self.draft_start + self._modelled_levels(drafted) * self.learned.draft_scales.level

    def read(self, tokens: int) -> float:
        """Return the seconds in which SSMs read `tokens` tokens."""
        return tokens * self.curve.read_seconds * self._read_scale.value

    def learn(self, seconds: RoundSeconds, rows: int, trees: int, drafted: Drafted, drafting: bool) -> None:
        """Update the corrections with a round. Its parts are divided by the slowdown of its target pass.

        Args:
            seconds: measured seconds.
            rows, trees: of the target pass, as in `verify`.
            drafted: what the SSMs drafted.
            drafting: whether any source was asked.
        """
        if not self.learns:
            return
        count, learned = self.batch.requests, self.learned
        plain, size = self._one_row(count), self._size(self._extra_seconds(rows, count, trees), rows - count)
        learned.add_forward(seconds.forward / plain, self.verify(rows, count, trees) / plain, size / plain)
        slowdown = seconds.forward / self._last_pass(rows, trees)
        host = seconds.host / slowdown / count
        work: HostWork = _speculative_work(trees, drafted) if drafting else "plain"
        learned.hosts.setdefault(work, RobustMean(self.config)).add(host)
        learned.fruitless = learned.fruitless + 1 if work == "search" else 0
        # Trees that look expensive are not built, so without decay their cost would never be measured again.
        if learned.fruitless > self.config.fruitless_rounds and "tree" in learned.hosts:
            usual = learned.hosts["search"].value / _HOST_RATIOS["search"]
            learned.hosts["tree"].decay(usual, self.config.host_decay)
        if not drafting:
            return
        if modelled := self._modelled_levels(drafted):
            learned.draft_scales.add(seconds.draft / slowdown, self.curve.draft_start_seconds, modelled)
        if read := drafted.read_tokens * self.curve.read_seconds:
            self._read_scale.add(seconds.read / slowdown / read)

    def _last_pass(self, rows: int, trees: int) -> float:
        """Return the modelled seconds of the target pass last passed to `learn`."""
        learned, seconds = self.learned, self.verify(rows, self.batch.requests, trees)
        single_rows = rows <= self.batch.requests
        return seconds * learned.after_tree_scale.value if single_rows and learned.follows_tree else seconds

    def _modelled_levels(self, drafted: Drafted) -> float:
        return self.curve.draft_levels(drafted.levels, drafted.passes, drafted.request_passes)

    def _one_row(self, requests: int) -> float:
        """Return the seconds of a target pass over one row of each request."""
        seconds = self._curve(requests, requests, 0) + requests * self.batch.extra_context * self.curve.position_seconds
        return max(seconds, self.curve.verify_seconds[0] / 2)  # contexts shorter than the curve's subtract

    def _extra_seconds(self, rows: int, requests: int, trees: int) -> float:
        """Return the seconds that extra rows, those beyond each request's first, add to a pass, without `excess`."""
        own = self._curve(rows, requests, trees) - self._curve(requests, requests, 0)
        return max(own + (rows - requests) * self.batch.extra_context * self.curve.row_position_seconds, 0.0)

    def _size(self, further: _Seconds, rows: _Seconds) -> _Seconds:
        """Return the size of extra rows for `_ExtraRowCost`; `further`: their modelled seconds, uncorrected."""
        return further + rows * (self.config.min_row_share * self._one_row(self.batch.requests))

    def _curve(self, rows: int, requests: int, trees: int) -> float:
        """Return `curve.verify`, cached because every round uses the same few arguments."""
        key = rows, requests, trees
        if key not in self._curve_cache:
            self._curve_cache[key] = float(self.curve.verify(*key))
        return self._curve_cache[key]
