"""Levels of growing trees: KV slots and attention layouts in the SSMs' pools, and when trees stop growing.

Expanded nodes take consecutive slots of their tree; the root has slot 0.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from treespec.cache.kv_cache import KVCache
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, Frontier
from treespec.drafters.ssm.ssm_state import grown_masks, rows_of_level
from treespec.models.compiled import CompiledDecoder
from treespec.models.decoder import Pass
from treespec.models.group_model import GroupModel
from treespec.request import Request
from treespec_kernels.cpu.compiled_plan import CompiledPlan
from treespec_kernels.cpu.growth_cpu import TreePlaces
from treespec_kernels.tree.level_rule import LevelRule


def levels_for(
    models: Sequence[GroupModel], active: Collection[int], cache: KVCache, requests: Sequence[Request]
) -> "PlannedLevels | CompiledLevels":
    """Create the levels of these requests' trees, which consist of their roots only, for the `active` SSMs."""
    stepwise = [ssm for ssm in active if models[ssm].block is None]
    compiled = {ssm: decoder for ssm in stepwise if not models[ssm].offset and (decoder := models[ssm].compiled)}
    if compiled and len(compiled) == len(stepwise):
        return CompiledLevels(compiled, requests)
    return PlannedLevels(models, cache, requests)


class PlannedLevels:
    """Levels for any decoder. Equal plan keys share a plan, because planning takes a tenth of a pass."""

    def __init__(self, models: Sequence[GroupModel], cache: KVCache, requests: Sequence[Request]):
        self._models, self._cache, self._requests = models, cache, requests
        self._masks = [np.ones((1, 1), dtype=bool) for _ in requests]  # by tree: ancestor mask, bool [slots, slots]
        self._offsets = {model.offset for model in models}

    def extend(self, frontier: Frontier, depth: int) -> None:
        """Add a level: assign slots to the nodes of the frontier, which have this depth."""
        self._rows, self._plans = {}, dict[object, Pass]()
        for owner, part in frontier.slices().items():
            request, count = self._requests[owner], part.stop - part.start
            masks = self._masks[owner] = grown_masks(self._masks[owner], frontier.above[part])
            for offset in self._offsets:
                root = request.context_len - offset
                self._rows[owner, offset] = rows_of_level(masks, count, root, request.pages, request.max_len)
        self._row_owners = frontier.owners

    def plan(self, ssm: int, rows: np.ndarray) -> Pass:
        """Lay out an SSM's pass over some rows of the newest level: int64, ascending; all or none of a tree's rows."""
        owners = np.unique(self._row_owners[rows]).tolist()
        key = self._models[ssm].plan_key, tuple(owners)
        if key not in self._plans:
            served = [self._rows[owner, self._models[ssm].offset] for owner in owners]
            self._plans[key] = self._models[ssm].plan(served, self._cache.pools[1 + ssm])
        return self._plans[key]


class CompiledLevels:
    """`PlannedLevels` for compiled passes, without `RequestRows`: a row's path is its parent's and its own slot."""

    def __init__(self, models: Mapping[int, CompiledDecoder], requests: Sequence[Request]):
        self._models = models
        contexts, pages = [request.context_len for request in requests], [request.pages for request in requests]
        self._places = TreePlaces(next(iter(models.values())).growth, contexts, pages)
        self._longest, self._max_lens = max(contexts) + 1, [request.max_len for request in requests]

    def extend(self, frontier: Frontier, depth: int) -> None:
        self._plan = self._places.extend(frontier.owners, frontier.above, depth)
        self._num_positions, self._owners = self._longest + depth, frontier.owners
        self._plans = dict[object, Pass]()

    def plan(self, ssm: int, rows: np.ndarray) -> Pass:
        model, plan = self._models[ssm], self._plan
        whole = len(rows) == plan.num_rows
        key = model.plan_key, None if whole else rows.tobytes()
        if key not in self._plans:
            if not whole:
                index = torch.from_numpy(rows)
                plan = CompiledPlan(
                    len(rows), plan.slots[index], plan.rows[:, index], plan.pages, plan.paths, plan.positions[index]
                )
            if model.config.short_context:
                first = np.array([model.config.first_rotation(max_len) for max_len in self._max_lens])
                plan = plan._replace(positions=plan.positions + torch.from_numpy(first[self._owners[rows]]))
            self._plans[key] = model.layout(plan, self._num_positions)
        return self._plans[key]


def stop_unprofitable(
    forest: Forest | DrawnForest, adaptive: np.ndarray, rule: LevelRule, last_open_mass: np.ndarray
) -> np.ndarray:
    """Stop adaptive trees whose next level does not pay; return the current open mass of all, float64 [num_trees].

    `last_open_mass` is the open mass before the newest level.
    """
    growing = np.unique(forest.frontier.owners)
    growing = growing[adaptive[growing]]
    current = forest.open_mass()
    reached = forest.level_mass(rule.least_value)[growing] / np.maximum(last_open_mass[growing], 1e-9)
    if len(growing):
        stops = np.zeros(len(adaptive), dtype=bool)
        stops[growing] = ~rule.worth_a_level(growing, current[growing], reached, forest.depth)
        forest.stop(stops)
    return current
