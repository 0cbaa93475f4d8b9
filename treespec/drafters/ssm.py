"""Several small speculative models (SSMs) that grow one token tree in lockstep.

At each depth every SSM scores the whole frontier; each proposes its likeliest tokens at each node; their union goes
on. A child's probability is the mean of all SSMs' probabilities, whoever proposed it. So the SSMs share one topology
and one slot table, and hold the K/V of every node that was expanded: after a commit they catch up on one or two tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.cache import KVCache
from treespec.models.decoder import Decoder, Pass
from treespec.request import Request
from treespec.tree import Draws, TokenTree
from treespec_kernels.tree_batch import RequestRows

MAX_CHILDREN = 8  # proposals of one SSM at one node
MAX_FRONTIER = 8  # nodes of one depth that the dynamic policy expands
CATCH_UP = 256  # committed tokens that the SSMs take in at once after a pause
MAX_SLOTS = 64  # nodes of one tree that the dynamic policy expands; more would leave the packed attention's reach


def topk_rows(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their columns, descending; x: [num_rows, width].

    Narrows to the k blocks with the largest maxima first: the k largest lie in them. For 24 rows and k = 8 on one
    thread: 62 us against torch.topk's 84 at a width of 4,096, 452 against 2,283 at 131,072.
    """
    rows, width = x.shape
    block = 64
    k = min(k, width)
    if width % block or width // block <= k:
        return x.topk(k, dim=1)
    blocks = x.view(rows, width // block, block)
    best = blocks.amax(2).topk(k, dim=1, sorted=False).indices
    narrowed = blocks.gather(1, best[:, :, None].expand(-1, -1, block)).view(rows, k * block)
    values, columns = narrowed.topk(k, dim=1)
    return values, best.gather(1, columns // block) * block + columns % block


@dataclass(frozen=True)
class DraftPlan:
    """What to grow for one request.

    `nodes` is how many nodes the tree will be cut to: only nodes that can be among them are expanded. `branching` gives
    the children per node by depth (static policy); None lets probabilities decide.
    """

    max_depth: int
    nodes: int
    branching: tuple[int, ...] | None = None
    adaptive: bool = False  # stop growing as soon as another level is not expected to pay

    def children(self, level: int) -> int:
        """The most children of a node at depth `level`."""
        return self.branching[level] if self.branching else MAX_CHILDREN


GrowthRule = Callable[[int, list[list[np.ndarray]]], bool]
"""(levels grown, values of each tree's candidates by level) -> whether another level is worth drafting."""


class _Level(NamedTuple):
    """The candidates of one depth."""

    tokens: np.ndarray
    parents: np.ndarray  # indices over all levels
    probs: np.ndarray  # of the mixture
    values: np.ndarray  # product of probs along the path
    proposed: np.ndarray  # bool [size, num_ssms], who proposed the token
    draft_probs: np.ndarray  # [size, num_ssms], each proposer's own probability


class _Growth:
    """One request's tree while it grows. Nodes are counted over all levels; level 0 is the root."""

    def __init__(self, request: Request, plan: DraftPlan, num_ssms: int):
        self.request, self.plan = request, plan
        one, nobody = np.ones(1), np.zeros((1, num_ssms))
        self.levels = [_Level(np.array([request.tokens[-1]]), np.array([-1]), one, one, nobody.astype(bool), nobody)]
        self.frontier = np.zeros(1, dtype=np.int64)  # nodes that are expanded next
        self.slots: list[int] = []  # nodes that were expanded, in the order of their draft slots
        self.masks = np.zeros((0, 0), dtype=bool)  # [num slots, num slots], which of them see which

    @property
    def values(self) -> list[np.ndarray]:
        return [level.values for level in self.levels]

    def all(self, field: str) -> np.ndarray:
        """A field of all levels, in the order of the nodes."""
        return np.concatenate([getattr(level, field) for level in self.levels])


class SsmDrafter:
    """A group of SSMs that drafts as one source; attribution names each SSM.

    Args:
        models: the SSMs, with the target's vocabulary.
        names: of each, for attribution.
        cache: the engine's; pool i + 1 belongs to SSM i.
    """

    def __init__(self, models: Sequence[Decoder], names: Sequence[str], cache: KVCache):
        self.name = "ssm"
        self.models, self.names, self.cache = list(models), tuple(names), cache
        self._valid: dict[str, int] = {}  # positions with K/V in the SSMs' pools
        self._slot_of_node: dict[str, np.ndarray] = {}  # draft slot of each proposed node, -1 where it was not expanded

    def propose(
        self, requests: Sequence[Request], plans: Sequence[DraftPlan], keep_growing: GrowthRule
    ) -> list[TokenTree]:
        """One tree per request over its last token; the one-node tree where the plan's depth is 0.

        Args:
            requests: prefilled, with their pages.
            plans: what to grow, by request.
            keep_growing: asked before each further level of the adaptive trees.
        """
        pairs = zip(requests, plans, strict=True)
        growths = [_Growth(request, plan, len(self.models)) for request, plan in pairs]
        active, level = [growth for growth in growths if growth.plan.max_depth > 0], 0
        while active:
            self._grow(active, level)
            level += 1
            active = [growth for growth in active if level < growth.plan.max_depth and len(growth.frontier)]
            adaptive = [growth.values for growth in active if growth.plan.adaptive]
            if adaptive and not keep_growing(level, adaptive):
                active = [growth for growth in active if not growth.plan.adaptive]
        return [self._finish(growth) for growth in growths]

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the SSMs' K/V of all positions that the target has committed."""
        behind = [(r, self._valid.get(r.request_id, 0)) for r in requests]
        behind = [(r, start) for r, start in behind if start < r.context_len]
        if not behind:
            return
        rows = [RequestRows.chain(start, r.context_len - start, r.pages) for r, start in behind]
        self._forward(rows, np.array([t for r, start in behind for t in r.tokens[start : r.context_len]]), None)
        for request, _ in behind:
            self._valid[request.request_id] = request.context_len

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Keep the K/V of accepted nodes. `paths[i]`: accepted nodes of the proposed tree, from the root on."""
        pages, context_lens, slots = [], [], []
        for request, path in zip(requests, paths, strict=True):
            if request.request_id not in self._slot_of_node:
                continue
            kept = self._slot_of_node.pop(request.request_id)[path]
            kept = kept[np.logical_and.accumulate(kept >= 0)]  # up to the first node that was not expanded
            pages.append(request.pages)
            context_lens.append(request.context_len)
            slots.append(kept)
            self._valid[request.request_id] = request.context_len + len(kept)
        for pool in range(1, 1 + len(self.models)):
            self.cache.commit(pool, pages, context_lens, slots)

    def release(self, request: Request) -> None:
        self._valid.pop(request.request_id, None)
        self._slot_of_node.pop(request.request_id, None)

    def assume_context(self, request: Request) -> None:
        """Take the K/V of all committed positions as computed: measuring repeats a round without committing it."""
        self._valid[request.request_id] = request.context_len

    def _grow(self, growths: list[_Growth], level: int) -> None:
        """Expand every frontier by one level."""
        probs = self._score_roots(growths) if level == 0 else self._score_frontiers(growths)
        widest = max(growth.plan.children(level) for growth in growths)
        num_ssms, rows, vocab = probs.shape
        proposals, columns = topk_rows(probs.view(-1, vocab), widest)
        if not torch.isfinite(proposals).all():  # NaN is the largest of values: an SSM that overflowed stays silent
            probs = probs.nan_to_num(0.0)
            proposals, columns = topk_rows(probs.view(-1, vocab), widest)
            for growth in growths:
                growth.request.poisoned = True
        width = proposals.shape[1]
        ids = columns.view(num_ssms, rows, width).transpose(0, 1).reshape(rows, -1)  # [rows, num_ssms * width]
        mixture = probs.mean(0).gather(1, ids) if num_ssms > 1 else proposals.view(rows, -1)
        all_ids, all_mixture = ids.numpy(), mixture.double().numpy()
        all_q = proposals.view(num_ssms, rows, width).numpy()
        first = 0
        for growth in growths:
            part = slice(first, first + len(growth.frontier))
            self._extend(growth, level, all_ids[part], all_mixture[part], all_q[:, part])
            first = part.stop

    def _extend(self, growth: _Growth, level: int, ids: np.ndarray, mixture: np.ndarray, q: np.ndarray) -> None:
        """Add the union of the SSMs' proposals below a frontier, and choose the next frontier."""
        num_ssms, count, width = q.shape
        # Merge: equal tokens under one node become one child. The first of its columns stands for it.
        order = np.argsort(ids, axis=1, kind="stable")
        ranked = np.take_along_axis(ids, order, 1)
        repeated = np.zeros_like(ids, dtype=bool)
        np.put_along_axis(repeated, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], 1)
        best = np.argsort(np.where(repeated, -1.0, mixture), axis=1, kind="stable")[:, ::-1]
        best = best[:, : growth.plan.children(level)]
        keep = ~np.take_along_axis(repeated, best, 1)
        node, column = np.nonzero(keep)
        picked = best[node, column]
        tokens, probs = ids[node, picked], np.minimum(mixture[node, picked], 1.0)
        by_ssm = ids.reshape(count, num_ssms, width)[node]  # [new, num_ssms, width]
        matches = by_ssm == tokens[:, None, None]
        parents = growth.frontier[node]
        known = growth.all("values")
        values = known[parents] * probs
        draft_probs = (matches * q.transpose(1, 0, 2)[node]).sum(2)
        growth.levels.append(_Level(tokens, parents, probs, values, matches.any(2), draft_probs))
        goes_on = ~np.isin(tokens, growth.request.end_tokens)  # nothing is emitted below an end token
        if not growth.plan.branching:
            everything, budget = np.concatenate([known, values]), growth.plan.nodes
            floor = np.partition(everything, -budget)[-budget] if len(everything) > budget else 0.0
            goes_on &= values >= floor  # others cannot be among the best `budget`
            room = min(MAX_FRONTIER, MAX_SLOTS - len(growth.slots))
            goes_on[np.argsort(-values, kind="stable")[room:]] = False
        growth.frontier = len(known) + np.flatnonzero(goes_on)

    def _score_roots(self, growths: list[_Growth]) -> Tensor:
        """Catch up on committed tokens, root included: [num_ssms, num growths, vocab] probabilities after the root."""
        starts = [self._prefill(g.request) for g in growths]
        rows = [
            RequestRows.chain(start, len(g.request.tokens) - start, g.request.pages)
            for g, start in zip(growths, starts, strict=True)
        ]
        tokens = [token for g, start in zip(growths, starts, strict=True) for token in g.request.tokens[start:]]
        last = np.cumsum([r.num_rows for r in rows]) - 1
        for g in growths:
            self._valid[g.request.request_id] = g.request.context_len
            g.slots, g.masks = [0], np.ones((1, 1), dtype=bool)
        return self._forward(rows, np.array(tokens), last)

    def _prefill(self, request: Request) -> int:
        """Bring the SSMs' caches to within a chunk of the root, after a pause; returns the first position to do."""
        # The bonus token may be among the expanded nodes, but the root is always scored anew.
        start = min(self._valid.get(request.request_id, 0), request.context_len)
        while len(request.tokens) - start > CATCH_UP:
            rows = RequestRows.chain(start, CATCH_UP, request.pages)
            self._forward([rows], np.array(request.tokens[start : start + CATCH_UP]), None)
            start += CATCH_UP
        return start

    def _score_frontiers(self, growths: list[_Growth]) -> Tensor:
        rows, tokens = [], []
        for g in growths:
            first, count = len(g.slots), len(g.frontier)
            slot_of = {node: slot for slot, node in enumerate(g.slots)}
            above = [slot_of[int(parent)] for parent in g.all("parents")[g.frontier]]
            grown = np.zeros((first + count, first + count), dtype=bool)
            grown[:first, :first] = g.masks
            grown[first:, :first] = g.masks[above]
            grown[np.arange(first, first + count), np.arange(first, first + count)] = True
            g.masks, g.slots = grown, g.slots + g.frontier.tolist()
            depths = grown.sum(1) - 1
            nodes = np.arange(first, first + count)
            rows.append(
                RequestRows(g.request.context_len, nodes, depths[first:], grown[first:], depths, g.request.pages)
            )
            tokens.append(g.all("tokens")[g.frontier])
        return self._forward(rows, np.concatenate(tokens), np.arange(sum(r.num_rows for r in rows)))

    def _forward(self, rows: list[RequestRows], tokens: np.ndarray, scored: np.ndarray | None) -> Tensor:
        """One pass of every SSM: probabilities [num_ssms, len(scored), vocab] of the scored rows."""
        ids = torch.from_numpy(tokens)
        results = []
        layouts: dict[tuple[object, ...], Pass] = {}  # SSMs of one shape share a plan: it takes a tenth of their pass
        for model, pool in zip(self.models, self.cache.pools[1:], strict=True):
            if model.plan_key not in layouts:
                layouts[model.plan_key] = model.plan(rows, pool)
            hidden = model.forward(ids.to(model.device), layouts[model.plan_key], pool)
            if scored is not None:
                logits = model.logits(hidden, torch.from_numpy(scored).to(model.device))
                results.append(torch.softmax(logits.float(), -1).cpu())
        return torch.stack(results) if results else torch.empty(0)

    def _finish(self, growth: _Growth) -> TokenTree:
        """The request's candidates as a tree, one draw per SSM that proposed a node."""
        parents = growth.all("parents")
        children, sources = np.nonzero(growth.all("proposed"))
        draft_probs = growth.all("draft_probs")[children, sources].astype(np.float64)
        tree = TokenTree(
            tokens=growth.all("tokens"),
            parents=parents,
            depths=np.repeat(np.arange(len(growth.levels)), [len(level.tokens) for level in growth.levels]),
            probs=growth.all("probs"),
            draws=Draws(parents[children], children, sources, draft_probs),
            source_names=self.names,
        )
        if growth.slots:
            slot_of_node = np.full(len(tree), -1, dtype=np.int64)
            slot_of_node[growth.slots] = np.arange(len(growth.slots))
            self._slot_of_node[growth.request.request_id] = slot_of_node
        return tree
