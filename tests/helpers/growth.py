"""Cases of trees that grow: proposals for the ops, and batches that the host and the ops must grow alike to the bit."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.helpers.libraries import LIBRARIES
from tests.helpers.models import tree_of
from treespec import SamplingParams, SpecConfig
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.compiled_growth import CompiledGrowth, DraftReads, GrowthBatch, ScoredRows
from treespec.drafters.ssm.forest import Forest, SsmProbs, TreeLimits
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.growth_cpu import STRUCTS, DraftInputs, growth_library
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceForest, DeviceTrees, ProposedTrees
from treespec_kernels.tree.level_rule import LevelRule
from treespec_kernels.tree.tree_merge import tree_merge_ref
from treespec_kernels.tree.tree_root import tree_root_ref
from treespec_kernels.tree.tree_select import tree_select_ref

Path = tuple[int, ...]
Seeds = dict[Path, tuple[float, float]]  # probability and evidence ratio


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
                own[path] = tuple(np.float32([rng.random(), np.exp(rng.normal(1, 2))]).tolist())
        found.append(own)
    return found


def as_proposed(sizes: Sizes, seeds: list[Seeds], device: str = "cpu") -> ProposedTrees:
    """Seeds as the ops take them."""
    trees = sizes.unproposed()
    for i, own in enumerate(seeds):
        numbers = {(): -1} | {path: number for number, path in enumerate(own)}
        for path, (prob, ratio) in own.items():
            for tensor, value in zip(trees, (path[-1], numbers[path[:-1]], prob, ratio), strict=True):
                tensor[i, numbers[path]] = value
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
        hints = {path: prob for path, (prob, _) in own.items() if max(path) < vocab}
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


def said_by(case: GrowthCase, forest: Forest) -> list[SsmProbs]:
    """What those SSMs that speak say of the frontier."""
    tree_ids, paths, said = forest.frontier.tree_ids, [tuple(path) for path in forest.paths()], []
    for ssm in range(case.weights.shape[1]):
        rows = np.flatnonzero(case.weights[tree_ids, ssm] > 0)
        if len(rows):
            said.append(SsmProbs(ssm, rows, np.stack([case.probs(int(tree_ids[i]), ssm, paths[i]) for i in rows])))
    return said


def grown_on_host(case: GrowthCase) -> list[TokenTree]:
    """The best nodes of every tree that a `Forest` grows."""
    sizes = case.sizes
    shapes = [TreeLimits(sizes.depth, nodes, None, ends) for nodes, ends in zip(case.nodes, case.ends, strict=True)]
    limits = {"max_children": sizes.proposals, "max_frontier": sizes.frontier}
    forest = Forest(case.trees, shapes, case.evidence, **limits)
    while len(forest.frontier.nodes):
        forest.extend(said_by(case, forest), case.weights)
    grown = forest.finish([f"ssm-{i}" for i in range(sizes.ssms)])
    return [tree.best(nodes) for tree, nodes in zip(grown, case.nodes, strict=True)]


class SpokenDrafts:
    """The drafts of a case in the place of compiled models: their passes look up what the case says of a path."""

    def __init__(self, case: GrowthCase, ssms: Sequence[int], tree_ids: dict[int, int]):
        self.case, self.library = case, growth_library(find_compiler(), LIBRARIES)
        self._owners, self._paths, self._rows = tree_ids, dict[int, tuple[int, Path]](), list[tuple[int, Path]]()
        batch = ctypes.POINTER(STRUCTS["Batch"])
        self._forward = ctypes.CFUNCTYPE(None, ctypes.c_void_p, batch)(self._run_pass)
        floats = ctypes.POINTER(ctypes.c_float)
        signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, floats, ctypes.c_int64)
        self._probs = signature(self._score)
        addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in (self._forward, self._probs))
        functions = dict(zip(("forward", "probs"), addresses, strict=True))
        self.drafts = (STRUCTS["Draft"] * len(ssms))(
            *(STRUCTS["Draft"](**functions, head=1 + ssm, hidden_bytes=2, ssm=ssm, width=case.vocab) for ssm in ssms)
        )

    def _run_pass(self, model: int, batch: Any) -> None:
        """Remember the path of every row: its parent's, whose slot is the last but one of its own path, and its token.

        A root's row has no path of slots; its slot is the first of its request's page.
        """
        own, self._rows = batch.contents, []
        columns = {
            name: _integers(getattr(own, name), own.num_rows) for name in ("tokens", "slots", "starts", "counts")
        }
        for token, slot, start, count in zip(*columns.values(), strict=True):
            if not count:
                row: tuple[int, Path] = self._owners[slot // PAGE_SIZE], ()
            else:
                *_, above, last = _integers(own.paths + 8 * start, count)
                assert last == slot
                row = self._paths[above][0], (*self._paths[above][1], token)
            self._paths[slot] = row
            self._rows.append(row)

    def _score(self, head: int, hidden: int, count: int, out: Any, threads: int) -> None:
        rows = [self.case.probs(tree_id, head - 1, path) for tree_id, path in self._rows[-count:]]
        np.ctypeslib.as_array(out, (count, self.case.vocab))[:] = rows


def _integers(address: int, count: int) -> list[int]:
    return [*(ctypes.c_int64 * count).from_address(address)]


def grown_compiled(
    case: GrowthCase, limits: Sequence[TreeLimits], rule: LevelRule, adaptive: Sequence[bool], **options: int
) -> tuple[list[TokenTree], ScoredRows]:
    """What one C++ call grows, on a page range per request that shares no page with others."""
    requests, pages_of = [], 64
    for i, tree in enumerate(case.trees):
        request = Request([int(tree.tokens[0])], SamplingParams(), SpecConfig())
        request.pages = np.arange(i * pages_of, (i + 1) * pages_of)
        requests.append(request)
    ssms = [ssm for ssm in range(case.sizes.ssms) if (case.weights[:, ssm] > 0).any()]
    drafts = SpokenDrafts(case, ssms, {i * pages_of: i for i in range(len(requests))})
    grows = [limit.max_depth > 0 for limit in limits]
    reads = [
        DraftReads(
            [own and bool(weights[ssm] > 0) for own, weights in zip(grows, case.weights, strict=True)],
            [0] * len(requests),
            [0] * len(requests),
            DraftInputs(),
        )
        for ssm in ssms
    ]
    growth = CompiledGrowth([f"ssm-{i}" for i in range(case.sizes.ssms)], case.evidence, **options)
    models: Any = SimpleNamespace(library=drafts.library, drafts=drafts.drafts)
    return growth.grow(models, reads, GrowthBatch(requests, case.trees, limits, [*case.weights], adaptive, rule))


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
        for node, depth in enumerate(tree.depths.tolist()):
            assert trees.ancestors[request, node, : depth + 1].tolist() == tree.path_to(node).tolist()
        assert trees.masks[request, : len(tree)].tolist() == masks
