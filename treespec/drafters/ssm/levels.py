"""Levels of growing trees: KV slots, attention layouts in the SSMs' pools, and the stopping rule.

Expanded nodes take consecutive slots of their tree; the root has slot 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from treespec.cache.kv_cache import KVCache
from treespec.drafters.ssm.forest import Frontier, GrowingForest
from treespec.drafters.ssm.ssm_state import grown_masks, rows_of_level
from treespec.models.decoder import Pass
from treespec.models.group_model import GroupModel
from treespec.request import Request
from treespec_kernels.recurrent.request_state import StateRows
from treespec_kernels.tree.level_rule import LevelRule


class PlannedLevels:
    """Levels for any decoder. Models with equal plan keys share a plan, since planning takes a tenth of a pass."""

    def __init__(self, models: Sequence[GroupModel], cache: KVCache, requests: Sequence[Request]):
        self._models, self._cache, self._requests = models, cache, requests
        self._masks = [np.ones((1, 1), dtype=bool) for _ in requests]  # ancestor masks by tree, bool [slots, slots]
        self._offsets = {model.offset for model in models}

    def extend(self, frontier: Frontier, depth: int) -> None:
        """Add the level of this depth: assign slots to the frontier's nodes."""
        self._rows, self._plans = {}, dict[object, Pass]()
        for tree_id, part in frontier.slices().items():
            request, count = self._requests[tree_id], part.stop - part.start
            masks = self._masks[tree_id] = grown_masks(self._masks[tree_id], frontier.parent_slots[part])
            for offset in self._offsets:
                root = request.context_len - offset
                self._rows[tree_id, offset] = rows_of_level(masks, count, root, request.pages, request.max_len)
        self._row_trees = frontier.tree_ids

    def plan(self, ssm: int, rows: np.ndarray, states: Mapping[int, StateRows]) -> Pass:
        """Lay out an SSM's pass over the newest level's `rows`: int64, ascending, all or none of each tree's.

        `states`, by tree, are the states of the SSM's recurrent layers; empty without such layers.
        """
        tree_ids = np.unique(self._row_trees[rows]).tolist()
        key = self._models[ssm].plan_key, tuple(tree_ids)
        if key not in self._plans:
            served = [self._rows[tree_id, self._models[ssm].offset] for tree_id in tree_ids]
            if states:
                served = [replace(tree_rows, state=states[i]) for i, tree_rows in zip(tree_ids, served, strict=True)]
            self._plans[key] = self._models[ssm].plan(served, self._cache.pools[1 + ssm])
        return self._plans[key]


def stop_unprofitable(
    forest: GrowingForest, adaptive: np.ndarray, rule: LevelRule, last_open_mass: np.ndarray
) -> np.ndarray:
    """Stop adaptive trees whose next level does not pay off; return all trees' open mass, float64 [num_trees].

    `last_open_mass` is the open mass before the newest level.
    """
    growing = np.unique(forest.frontier.tree_ids)
    growing = growing[adaptive[growing]]
    current = forest.open_mass()
    reached = forest.level_mass(rule.least_value)[growing] / np.maximum(last_open_mass[growing], 1e-9)
    if len(growing):
        stops = np.zeros(len(adaptive), dtype=bool)
        stops[growing] = ~rule.worth_a_level(growing, current[growing], reached, forest.depth)
        forest.stop(stops)
    return current
