"""How large a tree is worth its pass: budget and topology from measured cost and drafted probabilities.

A drafted node's value is the product of edge probabilities on its path, the chance that it is accepted. With
candidates sorted by value, a prefix of N of them gives G(N) = (requests + sum of values) / (draft time + verify
time(N)) tokens per second; the planner takes the N of the largest G, over all requests of the batch at once. So trees
shrink by themselves as the batch grows, down to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treespec.drafters.ssm import DraftPlan
from treespec.request import Request
from treespec.tree import TokenTree

AUTO_NODES = 32  # nodes drafted for an automatic tree; passes over more rows were never worth it on a CPU
PAUSE = 64  # rounds of plain decoding after speculation was seen to cost more than it saves
LONGEST_PAUSE = 1024  # each pause in a row doubles
_MEMORY = 0.05  # weight of the newest round in the running mean
_HOPE = 1.2  # what speculation is assumed to gain before it was tried, and after a pause


@dataclass(frozen=True)
class CostCurve:
    """Measured times of this machine, in seconds.

    `verify_seconds[i]` is a target pass over `rows[i]` rows; `draft_seconds` one level of all SSMs, host work included.
    """

    rows: tuple[int, ...]
    verify_seconds: tuple[float, ...]
    draft_seconds: float

    def verify(self, rows: np.ndarray | float) -> np.ndarray:
        """Seconds of a pass over `rows` rows, linear between and beyond what was measured."""
        x, y = np.array(self.rows, float), np.maximum.accumulate(self.verify_seconds)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else y[-1] / x[-1]
        return np.interp(rows, x, y) + np.maximum(np.asarray(rows) - x[-1], 0) * slope


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
            adaptive = spec.nodes == "auto" and spec.branching is None
            if spec.is_plain or (adaptive and self._paused_rounds):
                depth = 0
            nodes = spec.max_nodes if not adaptive else AUTO_NODES
            plans.append(DraftPlan(depth if nodes > 1 else 0, nodes, spec.branching, adaptive))
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
        seconds = level * self.cost.draft_seconds + float(self.cost.verify(len(values) * (2 + level)))
        return gain / self.cost.draft_seconds > (len(values) + accepted) / seconds

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Keep of each tree what its configuration asks for, or, for "auto", what pays in this batch."""
        kept: list[TokenTree] = list(trees)
        self._levels = max((int(tree.depths.max()) for tree in trees), default=0)
        free = []
        for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            if request.spec.nodes == "auto" and request.spec.branching is None:
                free.append(i)
            elif request.spec.branching is None and len(tree) > request.spec.max_nodes:
                best = np.argsort(-tree.values, kind="stable")[: request.spec.max_nodes]
                kept[i] = tree.keep(np.sort(best))
        if not free or all(len(trees[i]) == 1 for i in free):
            return kept
        owner = np.concatenate([np.full(len(trees[i]) - 1, i) for i in free])
        node = np.concatenate([np.arange(1, len(trees[i])) for i in free])
        value = np.concatenate([trees[i].values[1:] for i in free])
        order = np.argsort(-value, kind="stable")  # stable: a parent stays ahead of a child of equal value
        fixed_rows = sum(len(tree) for i, tree in enumerate(kept) if i not in free) + len(free)
        gains = len(requests) + np.concatenate([[0.0], np.cumsum(value[order])])
        seconds = self._levels * self.cost.draft_seconds + self.cost.verify(fixed_rows + np.arange(len(order) + 1))
        count = int(np.argmax(gains / seconds))
        owner, node = owner[order[:count]], node[order[:count]]
        for i in free:
            kept[i] = trees[i].keep(np.concatenate([[0], np.sort(node[owner == i])]))
        return kept

    def observe(self, requests: Sequence[Request], trees: Sequence[TokenTree], emitted: Sequence[int]) -> None:
        """Learn from a round. Where automatic trees emit fewer tokens per second than plain decoding would, they pause.

        Seconds are the cost curve's: they do not shake, and a pause depends on tokens alone.
        """
        if not self._levels or not any(request.spec.nodes == "auto" for request in requests):
            return
        rows = sum(len(tree) for tree in trees)
        seconds = self._levels * self.cost.draft_seconds + float(self.cost.verify(rows))
        gain = sum(emitted) / seconds / (len(requests) / float(self.cost.verify(len(requests))))
        self._gain += _MEMORY * (gain - self._gain)
        if self._gain < 1:
            self._paused_rounds, self._gain = self._pause, _HOPE
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._gain > _HOPE:
            self._pause = PAUSE
