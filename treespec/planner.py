"""How large a tree is worth its pass: budget and topology from measured cost and drafted probabilities.

A drafted node's value is the product of edge probabilities on its path, the chance that it is accepted. With
candidates sorted by value, a prefix of N of them gives G(N) = (requests + sum of values) / (draft time + verify
time(N)) tokens per second; the planner takes the N of the largest G, over all requests of the batch at once. So trees
shrink by themselves as the batch grows, down to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treespec.config import SpecConfig
from treespec.drafters.ssm import DraftPlan
from treespec.request import Request
from treespec.tree import TokenTree

PAUSE = 64  # rounds of plain decoding after speculation was seen to cost more than it saves
LONGEST_PAUSE = 1024  # each pause in a row doubles
_MEMORY = 0.05  # weight of the newest round in the running mean
_HOPE = 1.2  # what speculation is assumed to gain before it was tried, and after a pause


@dataclass(frozen=True)
class CostCurve:
    """Measured times of this machine, in seconds.

    Args:
        rows, verify_seconds: a target pass of one request over so many rows.
        draft_seconds: one level of all SSMs for one request, host work included.
        request_seconds, draft_request_seconds: what each further request adds to a pass and to a level, beside rows.
    """

    rows: tuple[int, ...]
    verify_seconds: tuple[float, ...]
    draft_seconds: float
    request_seconds: float = 0.0
    draft_request_seconds: float = 0.0

    def verify(self, rows: np.ndarray | float, requests: int = 1) -> np.ndarray:
        """Seconds of a pass over `rows` rows of `requests` requests, linear between and beyond what was measured."""
        x, y = self._measured
        # Beyond the last point at the mean slope of the upper half: two neighbours may measure alike by chance.
        middle = (len(x) - 1) // 2
        slope = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else y[-1] / x[-1]
        beyond = np.maximum(np.asarray(rows) - x[-1], 0) * slope
        return np.interp(rows, x, y) + beyond + (requests - 1) * self.request_seconds

    def draft(self, levels: int, requests: int) -> float:
        """Seconds of `levels` levels of drafting for `requests` requests."""
        return levels * (self.draft_seconds + (requests - 1) * self.draft_request_seconds)

    @cached_property
    def _measured(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.rows, float), np.maximum.accumulate(self.verify_seconds)


def is_adaptive(spec: SpecConfig) -> bool:
    """Whether the planner sizes this configuration's trees."""
    return spec.nodes == "auto" and spec.branching is None


class Planner:
    """Chooses what to draft and what to keep of it."""

    def __init__(self, cost: CostCurve):
        self.cost = cost
        self._gain = _HOPE  # running mean: tokens per modelled second of automatic trees, over plain decoding's
        self._pause, self._paused_rounds = PAUSE, 0
        self._levels = 0

    def draft_plans(self, requests: Sequence[Request], max_model_len: int) -> list[DraftPlan]:
        """What to draft for each request; depth 0 where nothing is worth drafting."""
        self._paused_rounds = max(self._paused_rounds - 1, 0)
        plans = []
        for request in requests:
            spec = request.spec
            room = min(request.tokens_left - 1, max_model_len - len(request.tokens) - 1)
            depth = min(spec.max_depth, len(spec.branching) if spec.branching else spec.max_depth, max(room, 0))
            adaptive = is_adaptive(spec)
            if spec.is_plain or (adaptive and self._paused_rounds):
                depth = 0
            plans.append(DraftPlan(depth, spec.max_nodes, spec.branching, adaptive))
        return plans

    def keep_growing(self, level: int, values: list[list[np.ndarray]]) -> bool:
        """Whether another level is expected to pay: its gain per second against the rate without it.

        The gain of a level is estimated from each tree's best leaf v at depth `level`: its best child should be worth
        about v * v^(1 / level), as if the path went on as it did so far.
        """
        gain = 0.0
        for tree in values:
            best = float(tree[-1].max(initial=0.0))
            gain += best * best ** (1.0 / level)
        accepted = sum(float(level_values.max(initial=0.0)) for tree in values for level_values in tree[1:])
        seconds = self.cost.draft(level, len(values)) + float(self.cost.verify(len(values) * (2 + level), len(values)))
        return gain * seconds > (len(values) + accepted) * self.cost.draft(1, len(values))

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Keep of each tree what its configuration asks for, or, for "auto", what pays in this batch."""
        kept = [_best(tree, request.spec.max_nodes) for request, tree in zip(requests, trees, strict=True)]
        self._levels = max((int(tree.depths.max()) for tree in trees), default=0)
        free = [i for i, request in enumerate(requests) if is_adaptive(request.spec) and len(kept[i]) > 1]
        if not free:
            return kept
        owner = np.concatenate([np.full(len(kept[i]) - 1, i) for i in free])
        node = np.concatenate([np.arange(1, len(kept[i])) for i in free])
        value = np.concatenate([kept[i].values[1:] for i in free])
        order = np.argsort(-value, kind="stable")  # stable: a parent stays ahead of a child of equal value
        fixed_rows = sum(len(tree) for i, tree in enumerate(kept) if i not in free) + len(free)
        gains = len(requests) + np.concatenate([[0.0], np.cumsum(value[order])])
        seconds = self.cost.verify(fixed_rows + np.arange(len(order) + 1), len(requests))
        count = int(np.argmax(gains / (self.cost.draft(self._levels, len(requests)) + seconds)))
        owner, node = owner[order[:count]], node[order[:count]]
        for i in free:
            kept[i] = kept[i].keep(np.concatenate([[0], np.sort(node[owner == i])]))
        return kept

    def observe(self, requests: Sequence[Request], trees: Sequence[TokenTree], emitted: Sequence[int]) -> None:
        """Learn from a round. Where automatic trees emit fewer tokens per second than plain decoding would, they pause.

        Seconds are the cost curve's: they do not shake, and a pause depends on tokens alone.
        """
        if not self._levels or not any(is_adaptive(request.spec) for request in requests):
            return
        count, rows = len(requests), sum(len(tree) for tree in trees)
        seconds = self.cost.draft(self._levels, count) + float(self.cost.verify(rows, count))
        gain = sum(emitted) / count * float(self.cost.verify(count, count)) / seconds
        self._gain += _MEMORY * (gain - self._gain)
        if self._gain < 1:
            self._paused_rounds, self._gain = self._pause, _HOPE
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._gain > _HOPE:
            self._pause = PAUSE


def _best(tree: TokenTree, nodes: int) -> TokenTree:
    """The `nodes` nodes of the largest value; connected, because values fall along a path and parents come first."""
    if len(tree) <= nodes:
        return tree
    return tree.keep(np.sort(np.argsort(-tree.values, kind="stable")[:nodes]))
