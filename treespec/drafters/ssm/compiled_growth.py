"""Growth of all levels of a batch's trees in one C++ call, with the same result as `Forest`.

Python overhead dominates a call (taking the address of an array alone takes 1 us), so all inputs are packed into one
integer array, and outputs are written in place into preallocated columns.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import addressof
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import TreeLimits
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.cpu_library import address_of, packed
from treespec_kernels.cpu.growth_cpu import NO_PAGE, STRUCTS, DraftInputs, DraftModels
from treespec_kernels.tree.growth_limits import CHILDREN, DEEPEST, FRONTIER, SEEDS, frontier_width, level_widths
from treespec_kernels.tree.level_rule import LevelRule

_Narrow = ctypes.CFUNCTYPE(None, *3 * [ctypes.c_int64], ctypes.POINTER(ctypes.c_int64))  # `Trees.narrow`
MAX_SCORES = 1 << 27  # maximum number of probabilities per SSM in a call
KEPT_SCORES = 1 << 24  # maximum number of probabilities whose buffer is kept for the next call
# Inputs that are integer lists, in packing order
_LISTS = (
    *("max_depths", "nodes", "context", "first_seed", "first_page", "first_token", "end_starts", "first_seed_draw"),
    *("tokens", "end_tokens", "active", "valid", "first_rotations"),
    *("seed_tokens", "seed_parents", "seed_draw_nodes", "seed_draw_sources"),
)


class DraftReads(NamedTuple):
    """Per-tree inputs of one draft in a call."""

    active: Sequence[bool]  # whether the draft is active for the tree
    valid: Sequence[int]  # number of leading positions with K/V, at most the root's
    first_rotations: Sequence[int]  # row of the rotations for position 0
    inputs: DraftInputs


class GrowthBatch(NamedTuple):
    """Trees to grow in a call, by request."""

    requests: Sequence[Request]
    seed_trees: Sequence[TokenTree]  # proposals of other sources
    limits: Sequence[TreeLimits]
    weights: Sequence[np.ndarray]  # mixture weights, float [num_ssms]; sum 1
    adaptive: Sequence[bool]  # whether `rule` ends the growth
    rule: LevelRule


class ScoredRows(NamedTuple):
    """The drafts' scores in a call."""

    tree_ids: np.ndarray  # int64 [num_rows], tree of each expanded node, level by level
    broken: list[int]  # trees with non-finite draft probabilities
    # Per draft, float32 [num_rows, width], valid until the next call: probabilities without temperature and noise;
    # first after the committed tokens that it read (if there are several SSMs), then after the nodes that it scored
    scores: list[np.ndarray]


class CompiledGrowth:
    """Compiled growth, with buffers that are reused for all batches."""

    def __init__(
        self,
        names: Sequence[str],  # names of all SSMs
        evidence: SeedEvidence,
        max_children: int = CHILDREN,  # like `max_frontier`, as in `Forest`
        max_frontier: int = FRONTIER,
    ):
        self.names, self.evidence = tuple(names), evidence
        self.num_levels = 0  # number of levels of the last batch
        self._max_children, self._max_frontier = max_children, max_frontier
        widths = [frontier_width(depth, max_frontier) for depth in range(1, DEEPEST + 2)]
        self._widths, (address,) = packed(widths)
        self.rule: Any = None  # the `Rule` of the last call
        self._held = list[Any]()  # owners of its arguments' memory
        self.trees = STRUCTS["Trees"](
            num_ssms=len(names), page_size=PAGE_SIZE, max_children=max_children, num_widths=len(widths), widths=address
        )
        self._scores: dict[int, np.ndarray] = {}  # score buffers by SSM
        self._capacity = [0, 0, 0, 0]  # allocated numbers of trees, nodes, expanded nodes and draws

    def has_room(self, models: DraftModels, limits: Sequence[TreeLimits]) -> bool:
        """Return whether a call's scores fit into the memory limits."""
        return self._room(limits)[1] * max(draft.width for draft in models.drafts) <= MAX_SCORES

    def grow(
        self,
        models: DraftModels,  # models that draft for at least one tree
        reads: Sequence[DraftReads],  # by model
        batch: GrowthBatch,
    ) -> tuple[list[TokenTree], ScoredRows]:
        """Return the trees and the scores."""
        t, drafts = self.trees, models.drafts
        seeds = [
            tree.best(1 + SEEDS) if limit.max_depth and len(tree.tokens) > 1 + SEEDS else tree
            for tree, limit in zip(batch.seed_trees, batch.limits, strict=True)
        ]
        scores = self.prepare(models, reads, batch._replace(seed_trees=seeds))
        if any(request.restriction for request in batch.requests):
            self._held.append(narrow := _Narrow(functools.partial(self._narrow, batch.requests, models, scores)))
            t.narrow = ctypes.cast(narrow, ctypes.c_void_p)
        placed = models.library.treespec_draft(ctypes.byref(t), drafts)
        assert placed, NO_PAGE
        self.num_levels = t.num_levels
        scores = [probs[: draft.num_rows] for draft, probs in zip(drafts, scores, strict=True)]
        scored = ScoredRows(self._row_trees[: t.num_rows], self.broken, scores)
        return self._finish(seeds), scored

    @property
    def broken(self) -> list[int]:
        """Indices of the last call's trees with draft probabilities that are not finite."""
        indices: list[int] = np.flatnonzero(self._broken[: self.trees.num_trees]).tolist()
        return indices

    def prepare(
        self,
        models: DraftModels | None,  # None if nothing will be drafted
        reads: Sequence[DraftReads],  # by model
        batch: GrowthBatch,
        further_seeds: int = 0,  # number of seeds besides these to make room for
        further_reads: int = 0,  # number of committed tokens, besides these, whose scores to make room for
    ) -> list[np.ndarray]:
        """Set `trees` and the drafts' inputs and outputs; return the buffers of their scores."""
        t, drafts = self.trees, () if models is None else models.drafts
        requests, seeds, count = batch.requests, batch.seed_trees, len(batch.requests)
        num_seeds, num_draws = sum([len(t.tokens) for t in seeds]), sum([len(t.draw_nodes) for t in seeds])
        num_seeds, num_draws = num_seeds + further_seeds, num_draws + 2 * further_seeds
        t.num_trees, t.num_drafts, t.reads = count, len(drafts), t.num_ssms > 1
        nodes, rows = self._room(batch.limits)
        self._reserve(count, num_seeds + nodes, rows, (num_seeds + nodes) * t.num_ssms + num_draws)
        firsts = [
            min([read.valid[i] for read in reads if read.active[i]], default=request.context_len)
            for i, request in enumerate(requests)
        ]
        tokens = [r.tokens[first : r.context_len + 1] for r, first in zip(requests, firsts, strict=True)]
        arguments = self._pack(batch, reads, tokens)
        mixture = np.array(batch.weights, dtype=np.float32)
        self._held, self.rule = [arguments, mixture, _pack_sampling(t, requests)], arguments[-1]
        t.weights = address_of(mixture, np.float32)
        num_read = sum(map(len, tokens)) - count + further_reads if t.reads else 0
        scores = [self._scores_of(draft, rows + num_read) for draft in drafts]
        for draft, read, probs in zip(drafts, reads, scores, strict=True):
            features, block, states = read.inputs
            draft.out = address_of(probs, np.float32)
            draft.features = None if features is None else features.data_ptr()
            draft.block_probs = None if block is None else address_of(block, np.float32)
            draft.block_depths = 0 if block is None else block.shape[1]
            draft.states = None if states is None else addressof(states)
        t.narrow = None
        return scores

    def _narrow(
        self,
        requests: Sequence[Request],
        models: DraftModels,
        scores: Sequence[np.ndarray],
        draft: int,
        row: int,
        count: int,
        nodes: Sequence[int],
    ) -> None:
        """Apply the requests' restrictions to a draft's scores at some nodes."""
        new_tokens, parents, tree_ids = self._ints[:3]
        for probs, node in zip(scores[draft][row : row + count], nodes[:count], strict=True):
            request = requests[tree_ids[node]]
            if request.restriction is not None:
                path = list[int]()
                while parents[node] >= 0:
                    path.append(int(new_tokens[node]))
                    node = parents[node]
                request.restriction.narrow_probs(probs, models.vocabularies[draft], request.tokens, path[::-1])

    def _scores_of(self, draft: Any, rows: int) -> np.ndarray:
        """Return a buffer for a draft's probabilities, float32 [at least rows, width]."""
        probs = self._scores.get(draft.ssm)
        if probs is None or len(probs) < rows:
            probs = np.empty((rows, draft.width), dtype=np.float32)
            if probs.size <= KEPT_SCORES:
                self._scores[draft.ssm] = probs
        return probs

    def _pack(
        self,
        batch: GrowthBatch,
        reads: Sequence[DraftReads],
        tokens: Sequence[Sequence[int]],  # last committed tokens by request, the root last
    ) -> Any:
        """Set the call's list arguments and its rule; return the owners of their memory, the rule's struct last."""
        requests, seeds, limits, _, adaptive, rule = batch
        t, count = self.trees, len(requests)
        pages, ends = [request.pages for request in requests], [limit.end_tokens for limit in limits]
        depths, is_fixed = [limit.max_depth for limit in limits], any(limit.branching for limit in limits)
        numbers, addresses = packed(
            depths,
            [max(limit.nodes, 1) for limit in limits],
            [request.context_len for request in requests],
            [*accumulate([len(tree.tokens) for tree in seeds], initial=0)],
            *([*accumulate(map(len, parts), initial=0)] for parts in (pages, tokens, ends)),
            [*accumulate([len(tree.draw_nodes) for tree in seeds], initial=0)],
            [*chain(*tokens)],
            [*chain(*ends)],
            [*chain(*(read.active for read in reads))],
            [*chain(*(read.valid for read in reads))],
            [*chain(*(read.first_rotations for read in reads))],
            *(
                [*chain(*(column.tolist() for column in columns))]
                for columns in zip(*((s.tokens, s.parents, s.draw_nodes, s.draw_sources) for s in seeds), strict=True)
            ),
            adaptive,
            [limit.children_at(depth) for depth in range(max(depths)) for limit in limits] if is_fixed else (),
        )
        for name, address in zip(_LISTS, addresses, strict=False):
            setattr(t, name, address)
        adaptive_address, branching = addresses[len(_LISTS) :]
        t.branching = branching if is_fixed else None
        all_pages = pages[0] if count == 1 else np.concatenate(pages)
        t.pages, seed_columns = address_of(all_pages), list[np.ndarray]()
        if any(len(tree.tokens) > 1 for tree in seeds):
            probs = np.concatenate([tree.probs for tree in seeds], dtype=np.float32)
            seed_columns = [probs, self.evidence.ratios(probs), np.concatenate([tree.draw_probs for tree in seeds])]
            t.seed_probs, t.seed_ratios = address_of(probs, np.float32), address_of(seed_columns[1], np.float32)
            t.seed_draw_probs = address_of(seed_columns[2], np.float64)
        token_weights = (ctypes.c_double * count)(*rule.token_weights)
        costs = rule.calibration, rule.level_cost, rule.marginal_cost, rule.least_value
        rule_struct = STRUCTS["Rule"](*costs, adaptive_address, addressof(token_weights))
        t.rule = addressof(rule_struct) if any(adaptive) else None
        return numbers, all_pages, seed_columns, token_weights, rule_struct

    def _room(self, limits: Sequence[TreeLimits]) -> tuple[int, int]:
        """Return upper bounds of the numbers of grown nodes and of expanded nodes."""
        widest = max([self._max_children, *(max(limit.branching) for limit in limits if limit.branching)])
        nodes = expanded = 0
        for limit in limits:
            rows = _expanded_nodes(limit.max_depth, limit.branching, self._max_frontier)
            below = max(limit.branching) if limit.branching else self.trees.num_ssms * widest + self._max_children
            nodes, expanded = nodes + rows * below, expanded + rows
        return nodes, expanded

    def _reserve(self, *needed: int) -> None:
        """Grow the output buffers to the needed numbers of trees, nodes, expanded nodes and draws."""
        if all(map(int.__le__, needed, self._capacity)):
            return
        t = self.trees
        trees, nodes, rows, draws = self._capacity = [*map(max, needed, self._capacity)]
        self._ints, self._floats = np.empty((6, nodes), dtype=np.int64), np.empty((2, nodes), dtype=np.float32)
        self._draft_probs = np.empty((nodes, t.num_ssms), dtype=np.float32)
        self._proposed = np.empty((nodes, t.num_ssms), dtype=np.uint8)
        self._node_values = np.empty((2, nodes), dtype=np.float64)
        self._drawn, self._drawn_probs = np.empty((2, draws), dtype=np.int64), np.empty(draws, dtype=np.float64)
        self._firsts = np.empty((2, trees + 1), dtype=np.int64)
        self._broken, self._row_trees = np.empty(trees, dtype=np.uint8), np.empty(rows, dtype=np.int64)
        first, step = address_of(self._ints), 8 * nodes
        t.new_tokens, t.parents, t.tree_ids, t.seeds, t.depths, t.slots = range(first, first + 6 * step, step)
        t.probs = address_of(self._floats, np.float32)
        t.values, t.draft_probs = t.probs + 4 * nodes, address_of(self._draft_probs, np.float32)
        t.proposed, t.broken = address_of(self._proposed, np.uint8), address_of(self._broken, np.uint8)
        t.row_trees = address_of(self._row_trees)
        t.node_probs = address_of(self._node_values, np.float64)
        t.drawn_probs = address_of(self._drawn_probs, np.float64)
        t.drawn_nodes, t.first_node = address_of(self._drawn), address_of(self._firsts)
        t.node_values, t.drawn_sources = t.node_probs + 8 * nodes, t.drawn_nodes + 8 * draws
        t.first_draw = t.first_node + 8 * (trees + 1)

    def _finish(self, seeds: Sequence[TokenTree]) -> list[TokenTree]:
        """Build the trees from the columns of all nodes."""
        first_node, first_draw = self._firsts[:, : len(seeds) + 1].tolist()
        nodes, draws, trees = first_node[-1], first_draw[-1], list[TokenTree]()
        tokens, parents, _, _, depths, slots = self._ints[:, :nodes].copy()
        probs, values = self._node_values[:, :nodes].copy()
        drawn_nodes, sources = self._drawn[:, :draws].copy()
        drawn_probs = self._drawn_probs[:draws].copy()
        for i, seed_tree in enumerate(seeds):
            node_slice, draw_slice = slice(first_node[i], first_node[i + 1]), slice(first_draw[i], first_draw[i + 1])
            columns = tokens[node_slice], parents[node_slice], depths[node_slice], probs[node_slice]
            draw_columns = drawn_nodes[draw_slice], sources[draw_slice], drawn_probs[draw_slice]
            names = self.names if len(seed_tree.tokens) == 1 else self.names + seed_tree.source_names
            tree = TokenTree(*columns, *draw_columns, names, slots=slots[node_slice])
            trees.append(tree.with_values(values[node_slice]))
        return trees


@functools.cache
def _expanded_nodes(depth: int, branching: Sequence[int] | None, widest: int) -> int:
    """Return the maximum number of expanded nodes of a tree; arguments as in `level_widths`."""
    return sum(level_widths(depth, branching, widest))


def _pack_sampling(trees: Any, requests: Sequence[Request]) -> Any:
    """Set the call's sampling arguments; return the objects that own their memory."""
    trees.sampling = None
    if not any(request.is_sampled for request in requests):
        return None
    samplers = [request.sampler for request in requests]
    keys = [(0, 0) if sampler is None else sampler.key for sampler in samplers]
    adds_noise = [request.spec.verification == "coupled" for request in requests]
    numbers, addresses = packed(adds_noise, *([*column] for column in zip(*keys, strict=True)))
    temperatures = [0.0 if sampler is None else sampler.temperature for sampler in samplers]
    temperature_array = (ctypes.c_double * len(requests))(*temperatures)
    sampling = STRUCTS["Sampling"](addressof(temperature_array), *addresses)
    trees.sampling = addressof(sampling)
    return numbers, temperature_array, sampling
