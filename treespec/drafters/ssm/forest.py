"""Trees of several requests while they grow, one level of all of them at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from treespec.sampling.transforms import topk_rows
from treespec.tree import Draws, TokenTree
from treespec_kernels.tree.tree_levels import Frontier, Level

_SEED_WEIGHT, _MIXTURE_WEIGHT, _AGREEMENT, _LEAST_DOUBTED = 0.64, 1.16, 0.83, 0.05


class Laws(NamedTuple):
    """An SSM's probabilities of the next token after some rows of the frontier, float32 [len(rows), vocab].

    rows: int64, ascending.
    """

    ssm: int
    rows: np.ndarray
    probs: np.ndarray


class _Candidates(NamedTuple):
    """What the SSMs and the seeds say below each row of the frontier.

    ssms: those that scored the frontier, or a part of it.
    tokens: int64 [num rows, width], -1 where there is none; a row may name a token twice.
    ssm_probs: float64 [len(ssms), num rows, width], each SSM's probability, 0 where it did not draft.
    proposed: bool [len(ssms), num rows, width], whether the token is among those that the SSM proposes.
    weights: float64 [num rows, len(ssms)], of the mixture, sum 1; None for one SSM.
    ranked: whether every row names its tokens in falling order of probability, each once.
    """

    ssms: Sequence[int]
    tokens: np.ndarray
    ssm_probs: np.ndarray
    proposed: np.ndarray
    weights: np.ndarray | None
    ranked: bool


class _Seeds:
    """The trees that are grown over, side by side. Node i of tree t is number `first[t] + i`."""

    def __init__(self, trees: Sequence[TokenTree]):
        sizes = np.array([len(tree) for tree in trees])
        self.trees, self.first = trees, np.concatenate([[0], np.cumsum(sizes)])
        self.tokens = np.concatenate([tree.tokens for tree in trees])
        self.probs = np.concatenate([tree.probs for tree in trees])
        parents = np.concatenate([tree.parents for tree in trees])
        shift = np.repeat(self.first[:-1], sizes)
        below = np.flatnonzero(parents >= 0)
        self.parents = parents + shift  # a root's own is meaningless
        order = below[np.argsort(self.parents[below], kind="stable")]
        ranked = self.parents[order]
        place = np.arange(len(order)) - np.searchsorted(ranked, ranked)
        self.width = int(place.max(initial=-1)) + 1
        self.children = np.full((len(parents) + 1, self.width), -1)  # the last row is for nodes that are no seed
        self.children[ranked, place] = order
        self.any = len(below) > 0


@dataclass(frozen=True)
class Shape:
    """What one tree may become. `branching` is the children per node by depth, None lets values decide."""

    max_depth: int
    nodes: int
    branching: tuple[int, ...] | None
    end_tokens: tuple[int, ...]


class Forest:
    """One tree per request, over its root and what other sources have proposed (the seeds).

    Args:
        seeds: by request; their roots are the trees' roots.
        shapes: by request.
        num_ssms: sources of the draws to come.
        max_children: proposals at one node.
        max_frontier, max_slots: nodes of one tree that are expanded, at one depth and in all.
    """

    def __init__(
        self,
        seeds: Sequence[TokenTree],
        shapes: Sequence[Shape],
        num_ssms: int,
        max_children: int,
        max_frontier: int,
        max_slots: int,
    ):
        count = len(seeds)
        self.shapes, self.num_ssms = shapes, num_ssms
        self.max_children, self.max_frontier, self.max_slots = max_children, max_frontier, max_slots
        self.seeds = _Seeds(seeds)
        roots, trees, one = self.seeds.first[:-1], np.arange(count), np.ones(count)
        nobody = np.zeros((count, num_ssms), dtype=bool)
        tokens = self.seeds.tokens[roots]
        self._levels = [Level(tokens, np.full(count, -1), trees, roots, one, one, nobody, nobody.astype(float))]
        self._size = count
        self.slots: list[list[np.ndarray]] = [[] for _ in seeds]  # nodes that were expanded, by tree, by level
        self._num_slots = np.zeros(count, dtype=np.int64)
        self._least = np.zeros(count)  # value that a node must have to be among the best
        self._values: list[list[np.ndarray]] = [[np.ones(1)] for _ in seeds]  # by tree, by level
        grows = np.array([shape.max_depth > 0 for shape in shapes], dtype=bool)
        everything = Frontier(trees, tokens, trees, roots, np.full(count, -1), one)
        self.frontier = Frontier(*(part[grows] for part in everything))

    @property
    def depth(self) -> int:
        """Levels grown."""
        return len(self._levels) - 1

    def _seed_tokens(self) -> np.ndarray:
        """int64 [frontier rows, width]: what the seeds propose below each row, -1 where nothing."""
        seeds = self.seeds
        if not seeds.any:
            return np.empty((len(self.frontier.nodes), 0), dtype=np.int64)
        below = seeds.children[self.frontier.seeds]
        return np.where(below >= 0, seeds.tokens[below], -1)

    def extend(self, laws: Sequence[Laws], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Add what the SSMs and the seeds propose below the frontier, and choose the next frontier.

        Args:
            laws: of the SSMs that scored it, or a part of it. One stays silent where its likeliest are not finite.
            weights: by tree, float64 [num_ssms]: of the mixture; 0 for an SSM that did not score, sum 1.

        Returns:
            bool [frontier rows]: where some SSM's likeliest are not finite.
        """
        at = self.frontier
        candidates, broken = self._candidates(laws, weights)
        mixture, valid, seeded = self._merge(candidates)
        values = at.values[:, None] * mixture
        parts = at.parts()
        slots = np.empty(len(at.nodes), dtype=np.int64)  # the frontier's rows take the next slots of their trees
        for owner, part in parts.items():
            first, count = self._num_slots[owner], part.stop - part.start
            slots[part] = np.arange(first, first + count)
            self._num_slots[owner] += count
            self.slots[owner].append(at.nodes[part])
            self._keep(owner, values[part], valid[part], None if seeded is None else seeded[part])
        rows, columns = np.nonzero(valid)
        tokens, values = candidates.tokens[rows, columns], values[rows, columns]
        seeds = np.full(len(rows), -1) if seeded is None else seeded[rows, columns]
        proposed = np.zeros((len(rows), self.num_ssms), dtype=bool)
        draft_probs = np.zeros((len(rows), self.num_ssms))
        proposed[:, candidates.ssms] = candidates.proposed[:, rows, columns].T
        draft_probs[:, candidates.ssms] = candidates.ssm_probs[:, rows, columns].T
        level = Level(
            tokens, at.nodes[rows], at.owners[rows], seeds, mixture[rows, columns], values, proposed, draft_probs
        )
        self._levels.append(level)
        edges = np.searchsorted(rows, [*(part.start for part in parts.values()), len(at.nodes)]).tolist()
        going = []
        for owner, (begin, end) in zip(parts, pairwise(edges), strict=True):
            self._values[owner].append(values[begin:end])
            going.append(begin + self._expanded(owner, tokens[begin:end], values[begin:end]))
        chosen = np.concatenate(going)
        self.frontier = Frontier(
            self._size + chosen,
            tokens[chosen],
            level.owners[chosen],
            seeds[chosen],
            slots[rows[chosen]],
            values[chosen],
        )
        self._size += len(tokens)
        return broken

    def _candidates(self, laws: Sequence[Laws], weights: Sequence[np.ndarray]) -> tuple[_Candidates, np.ndarray]:
        """The union of the SSMs' proposals and the seeds' below each row, and which rows are broken."""
        at, seeds = self.frontier, self._seed_tokens()
        widest = max(self.children_at(owner) for owner in at.owners.tolist())
        best, broken, finite = [], np.zeros(len(at.nodes), dtype=bool), []
        for _, rows, probs in laws:
            values, columns = topk_rows(torch.from_numpy(probs), widest)
            sound = torch.isfinite(values).all(1).numpy()  # NaN is the largest of values
            if not sound.all():
                broken[rows[~sound]] = True
                probs = np.where(sound[:, None], probs, 0)
                columns[torch.from_numpy(~sound)] = -1
            finite.append(probs)
            best.append((values.numpy(), columns.numpy()))
        ssms = [each.ssm for each in laws]
        if len(laws) == 1 and not seeds.shape[1] and not broken.any():
            likeliest, ids = best[0]
            alone = np.ones((1, *ids.shape), dtype=bool)
            return _Candidates(ssms, ids, likeliest[None].astype(np.float64), alone, None, True), broken
        width = best[0][1].shape[1]
        tokens = np.full((len(at.nodes), len(laws) * width + seeds.shape[1]), -1)
        tokens[:, len(laws) * width :] = seeds
        for i, (each, (_, ids)) in enumerate(zip(laws, best, strict=True)):
            tokens[each.rows, i * width : (i + 1) * width] = ids
        ssm_probs = np.zeros((len(laws), *tokens.shape))
        proposed = np.zeros(ssm_probs.shape, dtype=bool)
        for i, (each, probs, (likeliest, _)) in enumerate(zip(laws, finite, best, strict=True)):
            asked = tokens[each.rows]
            found = np.take_along_axis(probs, np.maximum(asked, 0), 1) * (asked >= 0)
            ssm_probs[i, each.rows] = found
            proposed[i, each.rows] = (found >= likeliest[:, -1:]) & (asked >= 0)
        mixture = None if len(laws) == 1 else np.stack([own[ssms] for own in weights])[at.owners]
        return _Candidates(ssms, tokens, ssm_probs, proposed, mixture, False), broken

    def _merge(self, candidates: _Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Equal tokens under one node become one child: by row and column its probability, whether the column stands
        for it, and which seed's node it is (-1 for none; None where there are no seeds)."""
        tokens, ssm_probs = candidates.tokens, candidates.ssm_probs
        if candidates.weights is None:
            mixture = ssm_probs[0]
        else:
            mixture = (ssm_probs * candidates.weights.T[:, :, None]).sum(0)
        mixture = np.minimum(mixture, 1.0)
        if candidates.ranked:
            return mixture, np.ones(tokens.shape, dtype=bool), None
        order = np.argsort(tokens, axis=1, kind="stable")
        ranked = np.take_along_axis(tokens, order, 1)
        first = np.ones(tokens.shape, dtype=bool)  # the first of equal columns stands for all
        np.put_along_axis(first, order[:, 1:], ranked[:, 1:] != ranked[:, :-1], 1)
        first &= tokens >= 0
        if not self.seeds.any:
            return mixture, first, None
        below = self.seeds.children[self.frontier.seeds]  # [num rows, named]
        same = (tokens[:, :, None] == self.seeds.tokens[below][:, None, :]) & (below >= 0)[:, None, :]
        seeds = np.where(same.any(2), np.take_along_axis(below, same.argmax(2), 1), -1)
        return self._with_seeds(mixture, seeds, first), first, seeds

    def _with_seeds(self, mixture: np.ndarray, seeds: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Probabilities where SSMs and seeds both speak: of two opinions the odds; the rest shares what is left."""
        own = np.where(seeds >= 0, self.seeds.probs[seeds], 0.0)
        both = combine(own, mixture)
        named = (seeds >= 0) & first
        taken, before = (both * named).sum(1), (mixture * named).sum(1)
        scale = np.minimum((1 - taken) / np.maximum(1 - before, 1e-9), 1.0)
        return np.where(seeds >= 0, both / np.maximum(taken, 1.0)[:, None], mixture * np.maximum(scale, 0.0)[:, None])

    def paths(self) -> list[list[int]]:
        """By row of the frontier, the tokens from below its root down to it."""
        tokens = np.concatenate([level.tokens for level in self._levels])
        parents = np.concatenate([level.parents for level in self._levels])
        nodes, upwards = self.frontier.nodes, []
        for _ in range(self.depth):
            upwards.append(tokens[nodes])
            nodes = parents[nodes]
        return np.stack(upwards[::-1], axis=1).tolist() if upwards else [[] for _ in nodes]

    def children_at(self, owner: int) -> int:
        """The most children of a node of the frontier."""
        branching = self.shapes[owner].branching
        return branching[min(self.depth, len(branching) - 1)] if branching else self.max_children

    def _keep(self, owner: int, values: np.ndarray, valid: np.ndarray, seeds: np.ndarray | None) -> None:
        """Narrow `valid` to those of a tree's new nodes that stay; all [num rows, width]."""
        shape = self.shapes[owner]
        if shape.branching:
            ranks = np.argsort(np.argsort(np.where(valid, -values, 1.0), axis=1, kind="stable"), axis=1)
            valid &= ranks < self.children_at(owner)
            return
        everything = np.concatenate([*self._values[owner], values[valid]])
        if len(everything) > shape.nodes:  # others cannot be among the best `nodes`
            self._least[owner] = np.partition(everything, -shape.nodes)[-shape.nodes]
            stays = values >= self._least[owner]
            if seeds is not None:
                stays |= seeds >= 0  # left out, they would come back with their old value
            valid &= stays

    def _expanded(self, owner: int, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Which of a tree's newest nodes are expanded next; indices."""
        shape = self.shapes[owner]
        if self.depth >= shape.max_depth:
            return np.empty(0, dtype=np.int64)
        going = np.ones(len(tokens), dtype=bool)
        for token in shape.end_tokens:  # nothing is emitted below one
            going &= tokens != token
        if not shape.branching:
            going &= (values > 0) & (values >= self._least[owner])
            room = max(min(self.max_frontier, self.max_slots - int(self._num_slots[owner])), 0)
            if len(values) > room:
                going[np.argsort(-values, kind="stable")[room:]] = False
        return np.flatnonzero(going)

    def stop(self, owners: np.ndarray) -> None:
        """Grow these trees no further; bool [num trees]."""
        going = ~owners[self.frontier.owners]
        self.frontier = Frontier(*(part[going] for part in self.frontier))

    def open_mass(self) -> np.ndarray:
        """float64 [num trees]: the chance that the frontier is reached and no seed says what follows."""
        at, seeds = self.frontier, self.seeds
        values = at.values
        if seeds.any:
            below = seeds.children[at.seeds]
            values = values * np.maximum(1 - (seeds.probs[below] * (below >= 0)).sum(1), 0.0)
        return np.bincount(at.owners, values, minlength=len(self.shapes))

    def level_mass(self, least: float) -> np.ndarray:
        """float64 [num trees]: the chance that the newest level is reached, by nodes of at least this value that are no
        seed's."""
        level = self._levels[-1]
        counted = (level.values >= least) & (level.seeds < 0)
        return np.bincount(level.owners[counted], level.values[counted], minlength=len(self.shapes))

    def finish(self, names: Sequence[str]) -> list[tuple[TokenTree, np.ndarray]]:
        """The trees, seeds and all, and the draft slot of each node, -1 where it was not expanded.

        Args:
            names: of the SSMs.
        """
        joined = Level(*(np.concatenate(parts) for parts in zip(*self._levels, strict=True)))
        depths = np.repeat(np.arange(len(self._levels)), [len(level.tokens) for level in self._levels])
        return [self._finish(owner, joined, depths, names) for owner in range(len(self.shapes))]

    def _finish(
        self, owner: int, nodes: Level, depths: np.ndarray, names: Sequence[str]
    ) -> tuple[TokenTree, np.ndarray]:
        own = np.flatnonzero(nodes.owners == owner)
        slot_of_node = np.full(len(own), -1)
        if self.slots[owner]:
            expanded = np.searchsorted(own, np.concatenate(self.slots[owner]))
            slot_of_node[expanded] = np.arange(len(expanded))
        parents = nodes.parents[own]
        parents[1:] = np.searchsorted(own, parents[1:])
        children, sources = np.nonzero(nodes.proposed[own])
        draws = Draws(parents[children], children, sources, nodes.draft_probs[own][children, sources])
        tree = TokenTree(nodes.tokens[own], parents, depths[own], nodes.probs[own], draws, tuple(names))
        seed = self.seeds.trees[owner]
        if len(seed) > 1:
            complete = not self.shapes[owner].branching or not self.slots[owner]
            tree = _join(tree, seed, nodes.seeds[own] - self.seeds.first[owner], complete)
            slot_of_node = np.concatenate([slot_of_node, np.full(len(tree) - len(own), -1)])
        return tree, slot_of_node


def combine(seed: np.ndarray, mixture: np.ndarray) -> np.ndarray:
    """One probability out of two opinions on the same event: a weighted sum of their log-odds.

    The weights are those of a logistic regression on 1,364 guesses of prompt lookup that the embedded SSMs scored too.
    SSMs that think next to nothing of a guess count as if they gave it 5 %: it fits as well, and poor SSMs cannot talk
    a good source down.
    """
    a, b = (np.log(p / (1 - p)) for p in (np.clip(seed, 1e-4, 0.999), np.clip(mixture, _LEAST_DOUBTED, 0.999)))
    return 1 / (1 + np.exp(-(_SEED_WEIGHT * a + _MIXTURE_WEIGHT * b + _AGREEMENT)))


def _join(tree: TokenTree, seed: TokenTree, seed_of_node: np.ndarray, complete: bool) -> TokenTree:
    """Add the seed's draws, last, and, where `complete`, its nodes that the tree lacks, behind the tree's own.

    seed_of_node: int64 [num_nodes], negative where a node is none of the seed's. Parents precede their children in the
    result, but nodes are not sorted by depth.
    """
    node_of_seed = np.full(len(seed), -1)
    known = np.flatnonzero(seed_of_node >= 0)
    node_of_seed[seed_of_node[known]] = known
    rest = np.flatnonzero(node_of_seed < 0) if complete else np.empty(0, dtype=np.int64)
    node_of_seed[rest] = len(tree) + np.arange(len(rest))
    drawn = np.flatnonzero(node_of_seed[seed.draws.children] >= 0)
    own = seed.draws
    names = tree.source_names + tuple(name for name in seed.source_names if name not in tree.source_names)
    index = np.array([names.index(name) for name in seed.source_names], dtype=np.int64)
    draws = Draws(
        np.concatenate([tree.draws.parents, node_of_seed[own.parents[drawn]]]),
        np.concatenate([tree.draws.children, node_of_seed[own.children[drawn]]]),
        np.concatenate([tree.draws.sources, index[own.sources[drawn]]]),
        np.concatenate([tree.draws.probs, own.probs[drawn]]),
    )
    return TokenTree(
        np.concatenate([tree.tokens, seed.tokens[rest]]),
        np.concatenate([tree.parents, node_of_seed[seed.parents[rest]]]),
        np.concatenate([tree.depths, seed.depths[rest]]),
        np.concatenate([tree.probs, seed.probs[rest]]),
        draws,
        names,
    )
