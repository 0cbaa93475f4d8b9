"""The cost model of a round: a measured curve, corrected by measured rounds.

Seconds here are the curve's, taken on an idle machine. What rounds teach are ratios to the same machine's other passes,
so that a busy machine does not look like dear drafting.
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

# What the host does in a round: as in plain decoding; asks sources, which find nothing; works on trees of guesses that
# cost no pass; works on trees that SSMs have grown.
HostWork = Literal["plain", "search", "tree", "drafted"]
# Over that of trees, before it was seen.
_USUAL_HOST: dict[HostWork, float] = {"plain": 1 / 3, "search": 2 / 3, "tree": 1.0, "drafted": 2.0}
_Seconds = TypeVar("_Seconds", float, np.ndarray)


@dataclass(frozen=True)
class CostCurve:
    """Measured times of this machine, in seconds.

    Args:
        rows, verify_seconds: a target pass of one request over so many rows.
        draft_seconds: one level of one SSM for one request, host work included.
        draft_start_seconds: what a round's drafting takes beside its levels, once.
        request_seconds: what each further request adds to a target pass, beside rows.
        tree_seconds: what it adds to that where it brings a tree of several nodes.
        draft_request_seconds: what each further request adds to a pass of one SSM.
        ssm_seconds: what each further SSM adds to a level.
        read_seconds: an SSM's for one token of a prompt.
        context: committed positions of each request while all this was measured.
        position_seconds: what each further committed position adds to a target pass over one row.
        row_position_seconds: what it adds for each further row that sees it.
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
        """Seconds of a pass, linear between and beyond what was measured.

        Args:
            rows: in all.
            requests: in all.
            trees: requests with more than one row.
        """
        x, y = self._measured
        # Beyond the last point at the mean slope of the upper half: two neighbours may measure alike by chance.
        middle = (len(x) - 1) // 2
        slope = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else y[-1] / x[-1]
        beyond = np.maximum(np.asarray(rows) - x[-1], 0) * slope
        return (
            np.interp(rows, x, y)
            + beyond
            + (requests - 1) * self.request_seconds
            + np.maximum(trees - 1, 0) * self.tree_seconds
        )

    def draft_levels(self, levels: float, passes: float, request_passes: float) -> float:
        """Seconds of a round's levels of drafting, without its start and without prompts.

        Args:
            levels: of the trees.
            passes: of one SSM.
            request_passes: passes, counted once for each request in them.
        """
        further = max(request_passes - passes, 0.0)
        return levels * self.draft_seconds + (passes - levels) * self.ssm_seconds + further * self.draft_request_seconds

    def draft(self, levels: float, passes: float, request_passes: float) -> float:
        """Seconds of a round's drafting, prompts left out; arguments as of `draft_levels`."""
        return self.draft_levels(levels, passes, request_passes) + (self.draft_start_seconds if levels else 0.0)

    @cached_property
    def _measured(self) -> tuple[np.ndarray, np.ndarray]:
        # Fewer rows never take longer: where they seem to, the measurement was disturbed.
        return np.array(self.rows, float), np.minimum.accumulate(self.verify_seconds[::-1])[::-1]


class RoundSeconds(NamedTuple):
    """What a round took, measured.

    Attributes:
        draft: the SSMs' drafting, without `read`.
        read: prompts and what else the SSMs had missed.
        forward: the target pass.
        host: everything else.
    """

    draft: float
    read: float
    forward: float
    host: float


class RobustMean:
    """Running mean of times, or of ratios of times, whose steps are clipped against disturbances.

    Args:
        config: memory and clipping.
        known: what it was measured to be on an idle machine; None: nothing is known.
    """

    def __init__(self, config: PlannerConfig, known: float | None = None):
        self.value, self._config = known or 0.0, config
        self._settled = known is not None
        self._first: list[float] = []

    @property
    def known(self) -> bool:
        return self._settled or bool(self._first)

    def add(self, seen: float) -> None:
        """Learn from a round."""
        if self._settled:
            limit = self._config.seconds_reach * self.value
            self.value += self._config.seconds_memory * _clipped(seen - self.value, limit)
            return
        self._first.append(seen)
        self.value, self._settled = median(self._first), len(self._first) == self._config.first_times

    def fade(self, to: float, share: float) -> None:
        """Let a share of what is beyond `to` go."""
        self.value -= share * max(self.value - to, 0.0)
        self._settled = True


class _DraftScales:
    """Measured over modelled seconds of drafting: of its start, and of its levels.

    A round tells their sum alone. Each of the two answers for what was misjudged by its share in what was expected, so
    rounds of different depth tell them apart. Were it one ratio, deep trees would make short ones seem cheap.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.start = self.level = 1.0
        self._config = config

    def add(self, seconds: float, start: float, levels: float) -> None:
        """Learn from a round of drafting; `start`, `levels`: modelled seconds, not yet scaled."""
        start, levels = self.start * start, self.level * levels
        expected = start + levels
        step = self._config.seconds_memory * _clipped(seconds / expected - 1, self._config.seconds_reach)
        self.start *= 1 + step * start / expected
        self.level *= 1 + step * levels / expected


class _RowPrice:
    """How far the curve is off about rows beyond each request's first.

    A pass tells this together with how fast the machine is just now; passes of different sizes that follow upon each
    other tell the two apart. So a machine that is slower from now on makes no rows dear.

    Attributes:
        pace: measured over expected seconds of the last passes.
        excess: what such rows take over what the curve says, as a share of their size: of what it says, and of
            `row_seconds` for each. Passes count by how far their size is from the others'.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.pace, self.excess, self._config = RobustMean(config), 0.0, config
        self._size = self._spread = 0.0  # running means: of sizes, and of their squared distance from that

    def add(self, seconds: float, expected: float, size: float) -> None:
        """Learn from a pass; all in modelled passes over one row of each request."""
        memory, config = self._config.seconds_memory, self._config
        if not self.pace.known:
            self._size = size
        beyond = size - self._size
        self._size += memory * beyond
        self._spread += memory * (max(beyond**2, config.row_seconds**2) - self._spread)
        if self.pace.known:
            # Rows few more than the others' do not make a pass much longer, whatever it took.
            limit = min(config.seconds_reach * expected, (1 + abs(self.excess)) * abs(beyond))
            missed = _clipped(seconds / self.pace.value - expected, limit)
            self.excess = max(self.excess + memory * missed * beyond / max(beyond**2, self._spread), -1.0)
        self.pace.add(seconds / expected)


class _Learned:
    """What rounds of one size of batch have taught.

    Attributes:
        hosts: per request, by the work; what was not seen yet is missing.
        draft_scales: of drafting.
        rows: what is learned of rows beyond each request's first.
        lone_scale: a pass over one row of each request after a tree, over one that follows upon such a pass.
        follows_tree: whether the last pass came after a tree.
        barren: rounds of searching since the last one that did something else.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.hosts: dict[HostWork, RobustMean] = {}
        self.draft_scales, self.lone_scale = _DraftScales(config), RobustMean(config, 1.0)
        self.follows_tree = False
        self.barren = 0
        self.rows = _RowPrice(config)
        self._was_lone = False  # whether the last pass was over one row of each request

    def see_forward(self, seconds: float, expected: float, size: float) -> None:
        """Learn from a target pass.

        Those over one row of each request count where they follow upon such a pass, as plain decoding's do: after a
        tree one takes 1.05 to 1.08 times as long back to back, 1.1 to 1.3 within rounds.

        Args:
            seconds: that it took.
            expected: modelled and corrected; both in modelled passes over one row of each request.
            size: of all other rows, as in `_RowPrice`; 0 where there are none.
        """
        self.follows_tree, self._was_lone = not self._was_lone, not size
        if size or not self.follows_tree:
            self.rows.add(seconds, expected, size)
        elif self.rows.pace.known:
            self.lone_scale.add(seconds / self.rows.pace.value)


def _speculative_work(trees: int, drafted: Drafted) -> HostWork:
    """Of a round in which sources were asked."""
    return "drafted" if drafted.levels else "tree" if trees else "search"


def _clipped(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


class RoundCosts:
    """Seconds of the parts of a round, for the batch that `begin` was told of.

    Args:
        curve: this machine's.
        learns: whether measured rounds correct it.
        config: how.
    """

    def __init__(self, curve: CostCurve, learns: bool = True, config: PlannerConfig = DEFAULT):
        self.curve, self.learns, self.config = curve, learns, config
        self._known: dict[tuple[int, int, int], float] = {}
        self._learned: dict[int, _Learned] = {}
        self._read_scale = RobustMean(config, 1.0)  # measured over modelled seconds
        self._requests, self._beyond = 1, 0.0
        self._by_rows = np.empty(0)  # the curve's seconds by number of rows, one request

    def begin(self, requests: Sequence[Request], count: int | None = None) -> None:
        """Take a batch: how many requests, and how far their contexts reach beyond the curve's on average.

        Args:
            requests: of the batch.
            count: requests as the curve counts them, where it was measured for whole batches; None: all.
        """
        self._requests = len(requests) if count is None else count
        self._beyond = sum(request.context_len for request in requests) / len(requests) - self.curve.context

    @property
    def learned(self) -> _Learned:
        """Of batches of this size."""
        size = self._requests.bit_length()
        if size not in self._learned:
            self._learned[size] = _Learned(self.config)
        return self._learned[size]

    @property
    def plain(self) -> float:
        """A round of plain decoding."""
        return self._one_row(self._requests) + self._requests * self.host("plain")

    def speculative(self, rows: int, trees: int, drafted: Drafted) -> float:
        """The round that was learned from last, prompts that SSMs read left out; sizes as in `verify`."""
        host = self._requests * self.host(_speculative_work(trees, drafted))
        return self._last_pass(rows, trees) + self.draft(drafted) + host

    def verify(self, rows: int, requests: int, trees: int = 0) -> float:
        """A target pass; `rows`, `requests` and `trees` as in `CostCurve.verify`."""
        further, number = self._further_rows(rows, requests, trees), rows - requests
        return self._one_row(requests) + max(further + self.learned.rows.excess * self._size(further, number), 0.0)

    def verify_more(self, rows: int, count: int, requests: int, trees: np.ndarray | int) -> np.ndarray:
        """The same of passes with 1 to `count` rows more than `rows`, float64 [count]; `trees`: of each, or of all."""
        if rows + count >= len(self._by_rows):
            self._by_rows = self.curve.verify(np.arange(2 * (rows + count)))
        further = self._by_rows[rows + 1 : rows + count + 1] - self._by_rows[requests]
        further += np.maximum(trees - 1, 0) * self.curve.tree_seconds
        number = np.arange(rows + 1 - requests, rows + count + 1 - requests)
        further = np.maximum(further + number * self._beyond * self.curve.row_position_seconds, 0.0)
        further += self.learned.rows.excess * self._size(further, number)
        return self._one_row(requests) + np.maximum(further, 0.0)

    def host(self, work: HostWork) -> float:
        """The host's work on one request."""
        hosts = self.learned.hosts
        if work in hosts:
            return hosts[work].value
        tree = hosts["tree"].value if "tree" in hosts else hosts["drafted"].value / 2 if "drafted" in hosts else 0.0
        return _USUAL_HOST[work] * tree

    def level(self, passes: float, request_passes: float) -> float:
        """One level of drafting, of so many passes."""
        return self.curve.draft_levels(1, passes, request_passes) * self.learned.draft_scales.level

    @property
    def draft_start(self) -> float:
        """What drafting takes beside its levels."""
        return self.curve.draft_start_seconds * self.learned.draft_scales.start

    def further_request(self, passes: float) -> float:
        """What another request adds to a level of so many passes."""
        return passes * self.curve.draft_request_seconds * self.learned.draft_scales.level

    def further_ssm(self, requests: int) -> float:
        """What another SSM adds to a level of so many requests."""
        own = self.curve.ssm_seconds + (requests - 1) * self.curve.draft_request_seconds
        return own * self.learned.draft_scales.level

    def draft(self, drafted: Drafted) -> float:
        """All drafting of a round, prompts left out."""
        if not drafted.levels:
            return 0.0
        return self.draft_start + self._modelled_levels(drafted) * self.learned.draft_scales.level

    def read(self, tokens: int) -> float:
        """SSMs that read so many tokens."""
        return tokens * self.curve.read_seconds * self._read_scale.value

    def learn(self, seconds: RoundSeconds, rows: int, trees: int, drafted: Drafted, drafting: bool) -> None:
        """Correct the curve by a round, each part in units of the same round's target pass.

        Args:
            seconds: measured.
            rows, trees: of the target pass, as in `verify`.
            drafted: by SSMs.
            drafting: whether any source was asked.
        """
        if not self.learns:
            return
        count, learned = self._requests, self.learned
        plain, size = self._one_row(count), self._size(self._further_rows(rows, count, trees), rows - count)
        learned.see_forward(seconds.forward / plain, self.verify(rows, count, trees) / plain, size / plain)
        unit = seconds.forward / self._last_pass(rows, trees)
        host = seconds.host / unit / count
        work: HostWork = _speculative_work(trees, drafted) if drafting else "plain"
        learned.hosts.setdefault(work, RobustMean(self.config)).add(host)
        learned.barren = learned.barren + 1 if work == "search" else 0
        if (
            learned.barren > self.config.barren_rounds and "tree" in learned.hosts
        ):  # what seems dear is not tried, and would ever seem so
            learned.hosts["tree"].fade(learned.hosts["search"].value / _USUAL_HOST["search"], self.config.fading)
        if not drafting:
            return
        if modelled := self._modelled_levels(drafted):
            learned.draft_scales.add(seconds.draft / unit, self.curve.draft_start_seconds, modelled)
        if read := drafted.read_tokens * self.curve.read_seconds:
            self._read_scale.add(seconds.read / unit / read)

    def _last_pass(self, rows: int, trees: int) -> float:
        """The target pass that was learned from last."""
        learned, seconds = self.learned, self.verify(rows, self._requests, trees)
        return seconds * learned.lone_scale.value if rows <= self._requests and learned.follows_tree else seconds

    def _modelled_levels(self, drafted: Drafted) -> float:
        return self.curve.draft_levels(drafted.levels, drafted.passes, drafted.request_passes)

    def _one_row(self, requests: int) -> float:
        """A target pass over one row of each request."""
        seconds = self._curve(requests, requests, 0) + requests * self._beyond * self.curve.position_seconds
        return max(seconds, self.curve.verify_seconds[0] / 2)  # contexts may be shorter than the curve's, too

    def _further_rows(self, rows: int, requests: int, trees: int) -> float:
        """What all rows but each request's first add to that, as the curve says."""
        own = self._curve(rows, requests, trees) - self._curve(requests, requests, 0)
        return max(own + (rows - requests) * self._beyond * self.curve.row_position_seconds, 0.0)

    def _size(self, further: _Seconds, rows: _Seconds) -> _Seconds:
        """Of rows beyond each request's first, that take `further` seconds as the curve says."""
        return further + rows * (self.config.row_seconds * self._one_row(self._requests))

    def _curve(self, rows: int, requests: int, trees: int) -> float:
        """Looked up once, as each round asks for a few of the same."""
        key = rows, requests, trees
        if key not in self._known:
            self._known[key] = float(self.curve.verify(*key))
        return self._known[key]
