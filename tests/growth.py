"""Trees of a batch as a dictionary of paths: the model that the ops tree_root, tree_merge and tree_select must agree
with, and proposals to grow them by. Python and float32 scalars only; no flat indices, no padding."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch

from treespec_kernels.tree.device_trees import DeviceForest, DeviceTrees

Path = tuple[int, ...]
ONE, ZERO = np.float32(1), np.float32(0)


@dataclass
class Node:
    order: tuple[int, ...]  # level, frontier node, SSM, proposal of the one that first named it
    value: np.float32
    ssms: set[int] = field(default_factory=set)
    expanded: int = -1  # the how-manieth of its frontier


class Trie:
    """The tree of one request."""

    def __init__(self, root: int, frontier: int):
        self.root, self.width, self.level = root, frontier, 0
        self.nodes: dict[Path, Node] = {}
        self.frontier: list[Path] = [()] if root >= 0 else []

    def value(self, path: Path) -> np.float32:
        return self.nodes[path].value if path else ONE

    def merge(self, tokens: np.ndarray, probs: np.ndarray, weights: np.ndarray, ends: set[int]) -> None:
        """tokens, probs: [G, F, C]; weights: [G]."""
        new: dict[Path, Node] = {}
        for f, above in enumerate(self.frontier):
            chances: dict[Path, np.float32] = {}
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
            for path, chance in chances.items():
                new[path].value = np.float32(self.value(above) * (chance if chance < 1 else ONE))
        going = [path for path in new if path[-1] not in ends]
        self.frontier = sorted(going, key=lambda path: (-new[path].value, new[path].order))[: self.width]
        for i, path in enumerate(self.frontier):
            new[path].expanded = i
        self.nodes |= new
        self.level += 1

    def select(self, nodes: int, least: float, deepest: int) -> list[Path]:
        """The best, root first and then in the order in which they were named."""
        if self.root < 0:
            return []
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
            "slots": [self.slot(path) for path in paths] + [-1] * padding,
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
        none = forest.frontier_width - len(trie.frontier)
        depth, slots = (
            trie.level,
            [0 if not path else 1 + (len(path) - 1) * trie.width + i for i, path in enumerate(trie.frontier)],
        )
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

    def forest(self, device: str = "cpu") -> DeviceForest:
        return DeviceForest.allocate(
            self.requests,
            frontier=self.frontier,
            num_ssms=self.ssms,
            proposals=self.proposals,
            max_depth=self.depth,
            device=device,
        )


KINDS = ("random", "ties", "ones", "tiny", "broken", "silent", "repeats")


def proposals(sizes: Sizes, kind: str, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and probabilities, [G, B, F, C] each. An SSM names a token once, but for "repeats" and "broken".

    "ones": every probability is 1 or 0. "tiny": products run through the subnormal numbers to 0. "broken": NaN,
    infinities, negative and huge numbers among others. "silent": SSMs that say nothing at all, or less than they could.
    """
    shape = (sizes.ssms, sizes.requests, sizes.frontier, sizes.proposals)
    vocab = sizes.proposals + 3  # small, so that SSMs agree often
    tokens = rng.permuted(np.broadcast_to(np.arange(vocab), (*shape[:3], vocab)), axis=3)[..., : sizes.proposals]
    probs = np.float32(rng.dirichlet(np.ones(vocab), shape[:3])[..., : sizes.proposals])
    match kind:
        case "ties":
            probs = rng.choice(np.float32([0.25, 0.5, 0.5, 1]), shape)
        case "ones":
            probs = rng.choice(np.float32([0, 1, 1]), shape)
        case "tiny":
            probs = probs * rng.choice(np.float32([1, 1e-19, 1e-30]), shape)
        case "broken":
            tokens = rng.integers(-2, vocab, shape)
            wrong = rng.choice(np.float32([np.nan, np.inf, -np.inf, -0.5, 3e38, -0.0, 2]), shape)
            probs = np.where(rng.random(shape) < 0.4, wrong, probs)
        case "silent":
            tokens = np.where((rng.random((*shape[:3], 1)) < 0.4) | (rng.random(shape) < 0.2), -1, tokens)
        case "repeats":
            tokens = rng.integers(0, 3, shape)
    return torch.tensor(tokens.tolist(), dtype=torch.int32), torch.tensor(probs.tolist())


def mixtures(sizes: Sizes, rng: np.random.Generator) -> torch.Tensor:
    """[B, G] float32 weights; some are 0, and some sum to more than 1."""
    weights = rng.dirichlet(np.ones(sizes.ssms), sizes.requests) * rng.choice([1, 1, 2], (sizes.requests, 1))
    return torch.from_numpy(np.float32(weights * (rng.random(weights.shape) < 0.9)))
