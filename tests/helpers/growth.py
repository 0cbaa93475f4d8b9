"""Trees that grow, as a dictionary of paths: the model that the ops tree_root, tree_merge and tree_select must agree
with. And cases, in which trees of the host and of these ops must be the same to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.helpers.models import tree_of
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import Forest, SsmProbs, TreeLimits
from treespec.tree import TokenTree
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceForest, DeviceTrees, ProposedTrees
from treespec_kernels.tree.growth_limits import frontier_width
from treespec_kernels.tree.tree_merge import tree_merge_ref
from treespec_kernels.tree.tree_root import tree_root_ref
from treespec_kernels.tree.tree_select import tree_select_ref

Path = tuple[int, ...]
ONE, ZERO = np.float32(1), np.float32(0)
LATER = 1 << 20  # order of what growth has not reached


@dataclass
class Node:
    order: tuple[int, ...]  # level, frontier node, source, proposal of the one that first named it
    value: np.float32
    ssms: set[int] = field(default_factory=set)
    expanded: int = -1  # the how-manieth of its frontier


@dataclass(frozen=True)
class Seed:
    number: int
    prob: np.float32
    ratio: np.float32


Seeds = dict[Path, Seed]


class Trie:
    """The tree of one request."""

    def __init__(self, root: int, frontier: int, seeds: Seeds | None = None):
        self.root, self.width, self.level, self.seeds = root, frontier, 0, seeds or {}
        self.nodes: dict[Path, Node] = {}
        self.frontier: list[Path] = [()] if root >= 0 else []

    def value(self, path: Path) -> np.float32:
        return self.nodes[path].value if path else ONE

    def merge(self, tokens: np.ndarray, probs: np.ndarray, weights: np.ndarray, ends: set[int]) -> None:
        """tokens, probs: [G, F, C]; weights: [G]."""
        new: dict[Path, Node] = {}
        for f, above in enumerate(self.frontier):
            chances: dict[Path, np.float32] = {}
            below = [path for path in self.seeds if path[:-1] == above]
            for ssm, weight in enumerate(weights):
                shares: dict[Path, list[np.float32]] = {}
                for c, (token, prob) in enumerate(zip(tokens[ssm, f].tolist(), probs[ssm, f], strict=True)):
                    with np.errstate(all="ignore"):
                        share = np.float32(weight * prob)
                    if token < 0 or np.isnan(share) or np.isinf(share) or share < 0:
                        continue
                    path = (*above, token)
                    new.setdefault(path, Node((self.level, f, ssm, c), ZERO)).ssms.add(ssm)
                    shares.setdefault(path, []).append(share)
                for path, said in shares.items():
                    with np.errstate(over="ignore"):
                        chances[path] = np.float32(chances.get(path, ZERO) + max(said))
            for c, path in enumerate(below[: tokens.shape[2]]):
                new.setdefault(path, Node((self.level, f, len(weights), c), ZERO))
            for path in {**chances, **dict.fromkeys(below)}:
                if path in new:
                    chance = min(chances.get(path, ZERO), ONE)
                    if path in self.seeds:
                        new[path].ssms.add(SEED_BIT)
                        chance = self.merged(chance, self.seeds[path]) if chances else self.seeds[path].prob
                    new[path].value = np.float32(self.value(above) * chance)
        going = [path for path in new if path[-1] not in ends and new[path].value > 0]
        room = frontier_width(self.level + 1, self.width)
        self.frontier = sorted(going, key=lambda path: (-new[path].value, new[path].order))[:room]
        for i, path in enumerate(self.frontier):
            new[path].expanded = i
        self.nodes |= new
        self.level += 1

    @staticmethod
    def merged(mixture: np.float32, seed: Seed) -> np.float32:
        """The odds of the mixture times the seed's ratio, as a probability."""
        held = np.float32(min(max(mixture, np.float32(0.05)), np.float32(0.999)))
        told = np.float32(seed.ratio * held)
        return np.float32(told / np.float32(told + np.float32(ONE - held)))

    def join(self) -> None:
        """Add the seeds that growth has not reached."""
        for path, seed in self.seeds.items():
            if path not in self.nodes and self.root >= 0:
                value = np.float32(self.value(path[:-1]) * seed.prob)
                self.nodes[path] = Node((LATER, seed.number), value, {SEED_BIT})

    def select(self, nodes: int, least: float, deepest: int) -> list[Path]:
        """The best, root first and then in the order in which they were named."""
        if self.root < 0:
            return []
        self.join()
        allowed = [p for p, node in self.nodes.items() if len(p) <= deepest and node.value >= np.float32(least)]
        allowed.sort(key=lambda path: (-self.nodes[path].value, self.nodes[path].order))
        return [(), *sorted(allowed[: nodes - 1], key=lambda path: self.nodes[path].order)]

    def slot(self, path: Path) -> int:
        """Where the drafts hold it, -1 where none has seen it."""
        if len(path) >= self.level or (path and self.nodes[path].expanded < 0):
            return -1
        return 1 + (len(path) - 1) * self.width + self.nodes[path].expanded if path else 0

    def tensors(self, paths: list[Path], num_nodes: int, max_depth: int) -> dict[str, list]:
        """What a request's part of DeviceTrees must be, with the padding."""
        padding = num_nodes - len(paths)
        number = {path: i for i, path in enumerate(paths)}
        prefixes = [[number[path[:d]] for d in range(len(path) + 1)] for path in paths]
        return {
            "num_nodes": len(paths),
            "tokens": [path[-1] if path else self.root for path in paths] + [0] * padding,
            "parents": [number[path[:-1]] if path else -1 for path in paths] + [-1] * padding,
            "depths": [len(path) for path in paths] + [-1] * padding,
            "ancestors": [(own + own[-1:] * max_depth)[: max_depth + 1] for own in prefixes]
            + [[i] * (max_depth + 1) for i in range(len(paths), num_nodes)],
            "masks": [sum(1 << ssm for ssm in self.nodes[path].ssms) if path else 0 for path in paths] + [0] * padding,
            "values": [float(self.value(path)) for path in paths] + [0.0] * padding,
        }


def assert_trees(trees: DeviceTrees, tries: list[Trie], nodes: int, least: torch.Tensor, deepest: torch.Tensor) -> None:
    """Compares every tensor by equality, padding included, and checks that parents were chosen with their children."""
    for request, trie in enumerate(tries):
        paths = trie.select(nodes, least[request].item(), deepest[request].item())
        assert all(path[:-1] in paths for path in paths if path), "a node without its parent"
        for name, expected in trie.tensors(paths, trees.max_nodes, trees.max_depth).items():
            actual = getattr(trees, name)[request].tolist()
            assert actual == expected, f"request {request}, {name}: {actual}, expected {expected}"


def assert_frontier(forest: DeviceForest, tries: list[Trie]) -> None:
    """What the drafts score next, and the scratch slots that each of its nodes sees."""
    for request, trie in enumerate(tries):
        none, depth = forest.frontier_width - len(trie.frontier), trie.level
        slots = [1 + (len(path) - 1) * trie.width + i if path else 0 for i, path in enumerate(trie.frontier)]
        above = [[trie.slot(path[:d]) for d in range(depth)] for path in trie.frontier]
        expected = {
            "tokens": [path[-1] if path else trie.root for path in trie.frontier] + [0] * none,
            "values": [float(trie.value(path)) for path in trie.frontier] + [0.0] * none,
            "depths": [depth] * len(trie.frontier) + [-1] * none,
            "slots": slots + [0] * none,
            "ancestors": [own + [slot] * (forest.max_depth + 1 - depth) for own, slot in zip(above, slots, strict=True)]
            + [[0] * (forest.max_depth + 1)] * none,
        }
        assert forest.level.tolist() == [depth]
        for name, values in expected.items():
            actual = getattr(forest, f"frontier_{name}")[request].tolist()
            assert actual == values, f"request {request}, frontier_{name}: {actual}, expected {values}"


def poison(state: object) -> None:
    """Fills every tensor of a dataclass or tuple with NaN or the largest integer, so that what nobody writes shows."""
    tensors = [getattr(state, f.name) for f in dataclasses.fields(state)] if dataclasses.is_dataclass(state) else state
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)


@dataclass(frozen=True)
class Sizes:
    requests: int
    ssms: int
    frontier: int
    proposals: int
    depth: int
    seeds: int = 4

    def forest(self, device: str = "cpu") -> DeviceForest:
        sizes = {"frontier": self.frontier, "num_ssms": self.ssms, "proposals": self.proposals}
        return DeviceForest.allocate(self.requests, **sizes, max_depth=self.depth, seeds=self.seeds, device=device)

    def unproposed(self, device: str = "cpu") -> ProposedTrees:
        """No seeds."""
        shape = self.requests, self.seeds
        none = torch.full(shape, -1, dtype=torch.int32, device=device)
        return ProposedTrees(none, none.clone(), torch.zeros(shape, device=device), torch.zeros(shape, device=device))


def random_seeds(sizes: Sizes, rng: np.random.Generator) -> list[Seeds]:
    """By request up to S seeds over few tokens, in any order in which parents precede."""
    found: list[Seeds] = []
    for _ in range(sizes.requests):
        own: Seeds = {}
        for _ in range(int(rng.integers(0, 3 * sizes.seeds))):
            above = [(), *own][int(rng.integers(len(own) + 1))]
            path = (*above, int(rng.integers(sizes.proposals + 3)))
            if path not in own and len(own) < sizes.seeds and len(path) <= sizes.depth:
                own[path] = Seed(len(own), np.float32(rng.random()), np.float32(np.exp(rng.normal(1, 2))))
        found.append(own)
    return found


def as_proposed(sizes: Sizes, seeds: list[Seeds], device: str = "cpu") -> ProposedTrees:
    """Seeds as the ops take them."""
    trees = sizes.unproposed()
    for i, own in enumerate(seeds):
        for path, seed in own.items():
            trees.tokens[i, seed.number] = path[-1]
            trees.parents[i, seed.number] = own[path[:-1]].number if len(path) > 1 else -1
            trees.probs[i, seed.number], trees.ratios[i, seed.number] = float(seed.prob), float(seed.ratio)
    return ProposedTrees(*(tensor.to(device) for tensor in trees))


KINDS = ("random", "ties", "ones", "tiny", "broken", "silent", "repeats")


def proposals(sizes: Sizes, kind: str, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and probabilities, [G, B, F, C] each. An SSM names a token once, but for "repeats" and "broken"."""
    shape = (sizes.ssms, sizes.requests, sizes.frontier, sizes.proposals)
    vocab = sizes.proposals + 3  # small, so that SSMs agree often
    tokens = rng.permuted(np.broadcast_to(np.arange(vocab), (*shape[:3], vocab)), axis=3)[..., : sizes.proposals]
    probs = np.float32(rng.dirichlet(np.ones(vocab), shape[:3])[..., : sizes.proposals])
    match kind:
        case "ties":
            probs = rng.choice(np.float32([0.25, 0.5, 0.5, 1]), shape)
        case "ones":
            probs = rng.choice(np.float32([0, 1, 1]), shape)
        case "tiny":  # products run through the subnormal numbers to 0
            probs = probs * rng.choice(np.float32([1, 1e-19, 1e-30]), shape)
        case "broken":
            tokens = rng.integers(-2, vocab, shape)
            wrong = rng.choice(np.float32([np.nan, np.inf, -np.inf, -0.5, 3e38, -0.0, 2]), shape)
            probs = np.where(rng.random(shape) < 0.4, wrong, probs)
        case "silent":  # at all, or they say less than they could
            tokens = np.where((rng.random((*shape[:3], 1)) < 0.4) | (rng.random(shape) < 0.2), -1, tokens)
        case "repeats":
            tokens = rng.integers(0, 3, shape)
    return torch.tensor(tokens.tolist(), dtype=torch.int32).view(shape), torch.tensor(probs.tolist()).view(shape)


def mixtures(sizes: Sizes, rng: np.random.Generator) -> torch.Tensor:
    """[B, G] float32 weights; some are 0, some NaN for an SSM that is silent, and some sum to more than 1."""
    weights = rng.dirichlet(np.ones(sizes.ssms), sizes.requests) * rng.choice([1, 1, 2], (sizes.requests, 1))
    fates = rng.random(weights.shape)
    return torch.from_numpy(np.float32(np.where(fates < 0.05, np.nan, weights * (fates < 0.9))))


@dataclass(frozen=True)
class GrowthCase:
    """Trees of a batch to grow: the SSMs' probabilities are a function of the path."""

    seed: int
    kind: str
    sizes: Sizes
    vocab: int
    trees: list[TokenTree]
    evidence: SeedEvidence
    weights: np.ndarray  # float32 [B, G], 0 for who is silent
    nodes: list[int]
    ends: list[tuple[int, ...]]

    def probs(self, request: int, ssm: int, path: Path) -> np.ndarray:
        """float32 [vocab]."""
        rng = np.random.default_rng((self.seed, request, ssm, *path))
        row = rng.exponential(size=self.vocab) ** 3
        match self.kind:
            case "ties":
                row = rng.choice([0.0, 1.0, 1.0, 2.0], self.vocab) + 1e-3
            case "sure":
                row = np.where(np.arange(self.vocab) == rng.integers(self.vocab), 1.0, 0.0)
            case "tiny":
                row *= rng.choice([1, 1e-15, 1e-30], self.vocab)
        row = (row / row.sum()).astype(np.float32)
        if self.kind == "broken" and rng.random() < 0.3:
            row[int(rng.integers(self.vocab))] = rng.choice([np.nan, np.inf])
        return row


CASE_KINDS = ("random", "ties", "sure", "tiny", "broken")


def growth_case(number: int) -> GrowthCase:
    """A small batch of any kind: some trees with seeds, some with end tokens, some deep, some SSMs silent."""
    rng = np.random.default_rng((11, number))
    deep = number % 8 == 0
    requests, ssms = (int(rng.integers(1, end)) for end in (5, 4))
    frontier, proposals = (int(rng.integers(1, 4 if deep else 9)) for _ in range(2))
    depth = 8 if deep else int(rng.integers(1, 6))
    sizes = Sizes(requests, ssms, frontier, proposals, depth, seeds=8)
    vocab = int(rng.integers(sizes.proposals, 16))
    trees = []
    for i, own in enumerate(random_seeds(sizes, rng)):
        hints = {path: float(seed.prob) for path, seed in own.items() if max(path) < vocab}
        trees.append(tree_of(i, hints, "lookup") if hints else TokenTree.root(i))
    silent = rng.random((sizes.requests, sizes.ssms)) < 0.2
    silent[silent.all(1), 0] = False
    weights = np.where(silent, 0, rng.random(silent.shape) + 0.1)
    weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    evidence = SeedEvidence(float(rng.normal(1, 1)), float(rng.random()))
    nodes = rng.integers(1, 40, requests).tolist()
    ends = [tuple(rng.integers(0, vocab, int(rng.integers(0, 3))).tolist()) for _ in range(requests)]
    kind = CASE_KINDS[number % len(CASE_KINDS)]
    return GrowthCase(number, kind, sizes, vocab, trees, evidence, weights, nodes, ends)


def grown_on_host(case: GrowthCase, forest_type: Callable[..., Forest]) -> list[TokenTree]:
    """The best nodes of every tree that a `Forest` grows."""
    sizes, active = case.sizes, case.weights > 0
    shapes = [TreeLimits(sizes.depth, nodes, None, ends) for nodes, ends in zip(case.nodes, case.ends, strict=True)]
    limits = {"max_children": sizes.proposals, "max_frontier": sizes.frontier}
    forest = forest_type(case.trees, shapes, sizes.ssms, case.evidence, **limits)
    while len(forest.frontier.nodes):
        owners, paths, said = forest.frontier.owners, [tuple(path) for path in forest.paths()], []
        for ssm in range(sizes.ssms):
            rows = np.flatnonzero(active[owners, ssm])
            if len(rows):
                said.append(SsmProbs(ssm, rows, np.stack([case.probs(int(owners[i]), ssm, paths[i]) for i in rows])))
        forest.extend(said, case.weights)
    grown = forest.finish([f"ssm-{i}" for i in range(sizes.ssms)])
    return [tree.best(nodes) for tree, nodes in zip(grown, case.nodes, strict=True)]


def grown_by_ops(case: GrowthCase) -> DeviceTrees:
    """What the references of tree_root, tree_merge and tree_select make of the same."""
    sizes = case.sizes
    forest, proposed = sizes.forest(), sizes.unproposed()
    for i, tree in enumerate(case.trees):
        below = slice(0, len(tree) - 1)
        of_nodes = tree.tokens, tree.parents - 1, tree.probs, case.evidence.ratios(tree.probs)
        for tensor, values in zip(proposed, of_nodes, strict=True):
            tensor[i, below] = torch.tensor(values[1:].tolist(), dtype=tensor.dtype)
    roots = torch.arange(sizes.requests, dtype=torch.int32)
    weights = torch.from_numpy(np.where(case.weights > 0, case.weights, np.nan).astype(np.float32))
    width = max(len(own) for own in case.ends)
    ends = torch.tensor([[*own, *[-1] * (width - len(own))] for own in case.ends], dtype=torch.int32)
    ends = ends.view(sizes.requests, width)
    tree_root_ref(forest, roots)
    for _ in range(sizes.depth):
        shape = sizes.ssms, sizes.requests, sizes.frontier, sizes.proposals
        tokens, probs = np.full(shape, -1, dtype=np.int32), np.full(shape, np.nan, dtype=np.float32)
        for request in range(sizes.requests):
            for f, path in enumerate(frontier_paths(forest, request)):
                for ssm in range(sizes.ssms):
                    row = case.probs(request, ssm, path)
                    if np.isfinite(row).all():
                        best = np.argsort(-row, kind="stable")[: sizes.proposals]
                        tokens[ssm, request, f, : len(best)], probs[ssm, request, f, : len(best)] = best, row[best]
        tree_merge_ref(forest, torch.from_numpy(tokens), torch.from_numpy(probs), weights, ends, proposed)
    nodes = torch.tensor(case.nodes, dtype=torch.int32)
    out = DeviceTrees.allocate(sizes.requests, nodes=max(case.nodes), max_depth=sizes.depth)
    deepest = torch.full((sizes.requests,), sizes.depth, dtype=torch.int32)
    return tree_select_ref(forest, proposed, roots, nodes, torch.zeros(sizes.requests), deepest, out=out)


def frontier_paths(forest: DeviceForest, request: int) -> list[Path]:
    """The tokens from the root down to each frontier node."""
    tokens, parents = forest.cand_tokens[request].flatten().tolist(), forest.cand_parents[request].flatten().tolist()
    paths = []
    for flat in forest.frontier[request].tolist():
        if flat >= 0:
            path: Path = ()
            while 0 <= flat < len(tokens):
                path, flat = (tokens[flat], *path), parents[flat]
            paths.append(path)
    return paths


def assert_same_trees(trees: DeviceTrees, expected: list[TokenTree]) -> None:
    """Node for node: tokens, parents, depths, who proposed it, and values to the bit."""
    for request, tree in enumerate(expected):
        names = [name for name in tree.source_names if name.startswith("ssm-")]
        said = [tree.sources_of(node) for node in range(len(tree))]
        bits = [sum(1 << i for i, name in enumerate(names) if name in own) for own in said]
        masks = [own | ("lookup" in names) << SEED_BIT for own, names in zip(bits, said, strict=True)]
        found = {name: getattr(trees, name)[request, : len(tree)].tolist() for name in ("tokens", "parents", "depths")}
        assert int(trees.num_nodes[request]) == len(tree)
        assert found == {name: getattr(tree, name).tolist() for name in found}
        assert trees.values[request, : len(tree)].tolist() == tree.values.tolist()
        assert trees.masks[request, : len(tree)].tolist() == masks
