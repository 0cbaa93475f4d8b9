"""All levels in one compiled call against `Forest`, level by level: trees, slots, scores, counts and what is learned.

The SSMs' probabilities are functions of the tokens that their caches hold.
"""

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.drafters.test_forest import EVIDENCE, VOCAB, random_case
from tests.helpers.libraries import LIBRARIES
from tests.helpers.models import assert_same_tree, quick
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec.drafters.ssm.forest import CompiledForest, Forest, SsmProbs, TreeLimits
from treespec.drafters.ssm.levels import stop_unprofitable
from treespec.drafters.ssm.reference_forest import ReferenceForest
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.decoder_cpu import PassEntries
from treespec_kernels.cpu.growth_cpu import (
    CallPasses,
    DraftInputs,
    DraftModels,
    DraftSampling,
    ScoredRows,
    TreePlaces,
    growth_library,
)
from treespec_kernels.sampling.coupled_choice import gumbel_integers_of_row
from treespec_kernels.tree.level_rule import LevelRule

pytestmark = needs_compiler

LAYERS, NUM_PLACES, MAX_COMMITTED = 3, 70, 90
LEAST_SHARE = 2.0**-12  # twice that in sampling_cpu.h


class Batch(ctypes.Structure):
    """`Batch` in batch_cpu.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_layers")),
        *(
            (name, ctypes.POINTER(ctypes.c_int64))
            for name in ("tokens", "learned_positions", "slots", "tables", "direct", "starts", "counts")
        ),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("pages", "paths", "positions")),
        *((name, ctypes.c_void_p) for name in ("rotation", "cache")),
        ("num_pages", ctypes.c_int64),
        ("out", ctypes.POINTER(ctypes.c_int64)),
    )


class Ssm:
    """An SSM with entry points like a compiled one's. Its cache holds the token of each slot; `errors` collects what a
    pass should not look like."""

    def __init__(self, seed: tuple[int, ...], columns: np.ndarray, places: bool):
        self.seed, self.columns = seed, columns
        self.cache: dict[int, int] = {}
        self.errors: list[str] = []
        self.least_share = 0.0
        self._sequences: list[tuple[int, ...]] = []
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._callbacks = (
            ctypes.CFUNCTYPE(None, pointer, ctypes.POINTER(Batch))(self._forward),
            ctypes.CFUNCTYPE(None, pointer, ctypes.POINTER(number), number, ctypes.POINTER(ctypes.c_float), number)(
                self._probs
            ),
        )
        forward, probs = (ctypes.cast(each, pointer).value for each in self._callbacks)
        assert forward and probs
        self.entries = PassEntries(forward, probs, 1, 1, NUM_PLACES if places else 0, 8, 1)

    def probs(self, sequence: tuple[int, ...]) -> np.ndarray:
        """Probabilities after a sequence of tokens; sometimes not finite."""
        rng = np.random.default_rng((*self.seed, *sequence[-6:]))
        weights = rng.exponential(size=len(self.columns)) ** 4
        weights = np.maximum(weights, self.least_share * weights.max())
        weights = (weights / weights.sum()).astype(np.float32)
        if rng.random() < 0.04:
            weights[int(rng.integers(len(weights)))] = rng.choice([np.nan, np.inf])
        return weights

    def _forward(self, model: int, batch: "ctypes._Pointer[Batch]") -> None:
        at = batch.contents
        for row in range(at.num_rows):
            self.cache[at.slots[row]] = at.tokens[row]
            learned = min(at.positions[row], NUM_PLACES - 1)
            if self.entries.num_learned_positions and at.learned_positions[row] != learned:
                self.errors.append(f"learned position {at.learned_positions[row]} at position {at.positions[row]}")
        for row in range(at.num_rows):
            slots = [
                at.pages[at.tables[row] + position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                for position in range(at.direct[row])
            ] + [at.paths[at.starts[row] + i] for i in range(at.counts[row])]
            if slots[-1] != at.slots[row] or len(slots) != at.positions[row] + 1 or at.num_layers != LAYERS:
                self.errors.append(f"a row at {at.positions[row]} in slot {at.slots[row]} reads {slots}")
            self._sequences.append(tuple(self.cache.get(slot, -1) for slot in slots))
            at.out[row] = len(self._sequences) - 1

    def _probs(self, head: int, hidden: "ctypes._Pointer", rows: int, out: "ctypes._Pointer", threads: int) -> None:
        for row in range(rows):
            for column, prob in enumerate(self.probs(self._sequences[hidden[row]])):
                out[row * len(self.columns) + column] = prob


@dataclasses.dataclass
class Case:
    """Trees, the SSMs that draft for each, committed tokens and how many of them each SSM has read."""

    rng: np.random.Generator
    seeds: list[TokenTree]
    shapes: list[TreeLimits]
    ssms: list[Ssm]
    active: np.ndarray
    weights: list[np.ndarray]
    limits: dict[str, int]
    committed: list[list[int]]
    valid: np.ndarray
    adaptive: np.ndarray
    rule: LevelRule
    sampling: DraftSampling | None = None

    @classmethod
    def random(cls, seed: int) -> "Case":
        rng = np.random.default_rng((11, seed))
        seeds, shapes, count = random_case(rng)
        # Wide seeds: ten children at one node, whose masses must be added in the same order.
        if rng.random() < 0.3:
            seeds[0] = TokenTree.from_parents(
                range(VOCAB - 1), [-1] + [0] * (VOCAB - 2), rng.uniform(0, 0.1, VOCAB - 1), "lookup"
            )
        trees = len(seeds)
        active = rng.random((trees, count)) < 0.7
        active[~active.any(1), 0] = True
        weights = [np.where(on, rng.uniform(0.1, 1, count), 0) for on in active]
        columns = [
            np.sort(rng.choice(VOCAB, int(rng.integers(4, VOCAB)), replace=False)) if rng.random() < 0.5 else None
            for _ in range(count)
        ]
        ssms = [
            Ssm((seed, i), np.arange(VOCAB) if own is None else own, bool(rng.random() < 0.5))
            for i, own in enumerate(columns)
        ]
        committed = [
            [*rng.integers(0, VOCAB, int(rng.integers(5, MAX_COMMITTED))).tolist(), int(own.tokens[0])] for own in seeds
        ]
        valid = np.array([[len(own) - 1 - int(rng.integers(0, 5)) for _ in ssms] for own in committed])
        level = float(rng.choice([0.0, 0.02, 0.1, 0.3]))
        rule = LevelRule(
            float(rng.uniform(0.5, 1.2)),
            rng.uniform(0.2, 1, trees + 3).tolist(),
            0.0,
            level,
            level * float(rng.uniform(0, 0.5)),
            float(rng.choice([0.0, 0.05])),
        )
        return cls(
            rng,
            seeds,
            shapes,
            ssms,
            active,
            [own / own.sum() for own in weights],
            {"max_children": int(rng.integers(1, 10)), "max_frontier": int(rng.integers(1, 9))},
            committed,
            valid,
            rng.random(trees) < 0.8,
            rule,
        )

    @property
    def places(self) -> list[int]:
        """The trees' requests in a batch that has others too."""
        return list(range(2, len(self.seeds) + 2))

    def sampled(self) -> "Case":
        """The case with requests that sample, some with and some without the target's noise.

        No token is so unlikely that its noise is not computed.
        """
        for ssm in self.ssms:
            ssm.least_share = LEAST_SHARE
        count = len(self.seeds)
        temperatures = np.where(self.rng.random(count) < 0.8, self.rng.uniform(0.2, 1.5, count), 0.0).tolist()
        keys = [self.rng.integers(0, 2**64, count, dtype=np.uint64).tolist() for _ in range(2)]
        return dataclasses.replace(
            self, sampling=DraftSampling(temperatures, (self.rng.random(count) < 0.7).tolist(), *keys)
        )

    def choice_probs(self, tree: int, position: int, probs: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the probabilities that the target of a tree chooses the tokens of some columns."""
        if self.sampling is None or not self.sampling.temperatures[tree] or not np.isfinite(probs).all():
            return probs
        temperature, adds_noise, seed, sample = (part[tree] for part in self.sampling)
        values = probs.astype(np.float64) ** (1 / temperature)
        if adds_noise:  # p * exp(g), with g as in `gumbel_ref` but in float64
            integers = gumbel_integers_of_row(seed, sample, position, VOCAB)[columns]
            values /= -np.log1p(-(integers + 0.5) * 2.0**-32)
        return (values / values.sum()).astype(np.float32)

    def forest(self, kind: type[Forest], **more: ctypes.CDLL) -> Forest:
        return kind(self.seeds, self.shapes, len(self.ssms), EVIDENCE, **self.limits, **more)


class Grown(NamedTuple):
    """What growth returns and leaves behind.

    Attributes:
        scores: by SSM, of each scored node in slot order: its tree, and the probabilities after it.
        counts: by SSM, passes and passes times trees.
        broken: the trees of broken nodes.
    """

    trees: list[TokenTree]
    depth: int
    scores: list[list[tuple[int, np.ndarray]]]
    counts: list[tuple[int, int]]
    broken: list[int]


def by_levels(case: Case) -> Grown:
    forest = case.forest(ReferenceForest)
    scores: list[list[tuple[int, np.ndarray]]] = [[] for _ in case.ssms]
    counts, broken = [(0, 0)] * len(case.ssms), []
    last_open_mass, rule = forest.open_mass(), case.rule.select(case.places)
    while len(forest.frontier.nodes):
        if forest.depth and case.adaptive.any():
            last_open_mass = stop_unprofitable(forest, case.adaptive, rule, last_open_mass)
            if not len(forest.frontier.nodes):
                break
        owners, said = forest.frontier.owners, []
        sequences = [
            (*case.committed[owner], *path) for owner, path in zip(owners.tolist(), forest.paths(), strict=True)
        ]
        for i, ssm in enumerate(case.ssms):
            rows = np.flatnonzero(case.active[owners, i])
            if len(rows):
                own = [(int(owners[row]), ssm.probs(sequences[row])) for row in rows]
                choices = [
                    case.choice_probs(owner, len(sequences[row]), probs, ssm.columns)
                    for row, (owner, probs) in zip(rows.tolist(), own, strict=True)
                ]
                said.append(SsmProbs(i, rows, np.stack(choices), ssm.columns))
                scores[i] += own
                counts[i] = counts[i][0] + 1, counts[i][1] + len(set(owners[rows].tolist()))
        broken += owners[forest.extend(said, case.weights)].tolist()
    return Grown(forest.finish(names(case)), forest.depth, scores, counts, broken)


def in_one_call(case: Case) -> Grown:
    library = growth_library(find_compiler(), LIBRARIES)
    forest = case.forest(CompiledForest, library=library)
    assert isinstance(forest, CompiledForest)
    contexts = [len(own) - 1 for own in case.committed]
    needed = [context // PAGE_SIZE + 3 for context in contexts]
    pages = np.split(case.rng.permutation(sum(needed)) + 1, np.cumsum(needed)[:-1])
    for tree, (own, table) in enumerate(zip(case.committed, pages, strict=True)):
        for i, ssm in enumerate(case.ssms):
            for position in range(case.valid[tree, i]):
                slot = int(table[position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
                ssm.cache[slot] = own[position]
    roots = forest.frontier.owners
    ssms = np.flatnonzero(case.active[roots].any(0)).tolist()
    unread = [tokens[int(valid.min()) :] for tokens, valid in zip(case.committed, case.valid, strict=True)]
    models = DraftModels(
        library,
        ssms,
        [case.ssms[i].entries for i in ssms],
        [torch.zeros(1, 2, 16)] * len(ssms),
        [torch.zeros(LAYERS, 2, 1, 1)] * len(ssms),
        [case.ssms[i].columns for i in ssms],
    )
    passes = CallPasses(
        models,
        TreePlaces(library, contexts, pages),
        case.active[:, ssms].T.tolist(),
        case.valid[:, ssms].T.tolist(),
        [[0] * len(case.committed)] * len(ssms),
        [*itertools.chain(*unread)],
        [*itertools.accumulate(map(len, unread), initial=0)],
        reads=len(case.ssms) > 1,
        inputs=[DraftInputs()] * len(ssms),
        sampling=case.sampling,
    )
    rule, adaptive = case.rule.select(case.places), case.adaptive.tolist() if case.adaptive.any() else ()
    drafted = forest.draft(passes, case.weights, rule, adaptive) if len(roots) else None
    scores: list[list[tuple[int, np.ndarray]]] = [[] for _ in case.ssms]
    counts = [(0, 0)] * len(case.ssms)
    for draft, i in zip(models.drafts, ssms, strict=True):
        assert drafted is not None and not case.ssms[i].errors
        counts[i] = draft.passes, draft.tree_passes
        owners = drafted.owners[case.active[drafted.owners, i]].tolist()
        read, own = np.split(drafted.scores[ssms.index(i)], [draft.num_read])
        scores[i] = list(zip(owners, own, strict=True))
        for expected, found in zip(probs_of_read_tokens(case, i, roots) if passes.reads else [], read, strict=True):
            np.testing.assert_array_equal(expected, found)
    broken = [] if drafted is None else drafted.owners[drafted.broken].tolist()
    return Grown(forest.finish(names(case)), forest.depth, scores, counts, broken)


def probs_of_read_tokens(case: Case, ssm: int, roots: np.ndarray) -> Iterator[np.ndarray]:
    for tree in roots[case.active[roots, ssm]].tolist():
        own = case.committed[tree]
        for position in range(case.valid[tree, ssm], len(own) - 1):
            yield case.ssms[ssm].probs(tuple(own[: position + 1]))


def names(case: Case) -> tuple[str, ...]:
    return tuple(f"ssm-{i}" for i in range(len(case.ssms)))


@pytest.mark.parametrize("part", quick(range(6), (0,)))
def test_levels_of_one_call_are_those_of_numpy(part: int) -> None:
    """Adaptive, fixed and static trees, SSMs that draft for some of them, reduced vocabularies, tokens to read first,
    and broken probabilities."""
    deep = stopped = multiple = broken = 0
    for seed in range(part, 240, 6):
        case = Case.random(seed)
        ours, theirs = in_one_call(case), by_levels(case)
        assert ours.depth == theirs.depth and ours.counts == theirs.counts, seed
        assert ours.broken == theirs.broken, seed
        for tree, expected in zip(ours.trees, theirs.trees, strict=True):
            assert_same_tree(tree, expected)
            np.testing.assert_array_equal(tree.slots, expected.slots)
            assert tree.values.tolist() == expected.values.tolist()
        for own, expected_scores in zip(ours.scores, theirs.scores, strict=True):
            for (owner, probs), (expected_owner, expected_probs) in zip(own, expected_scores, strict=True):
                assert owner == expected_owner
                np.testing.assert_array_equal(probs, expected_probs)
        deep += ours.depth > 2
        stopped += ours.depth < max(shape.max_depth for shape in case.shapes)
        multiple += len(case.ssms) > 1 and len(case.seeds) > 1
        broken += bool(ours.broken)
    assert min(deep, stopped, multiple, broken) > 3


@pytest.mark.parametrize("part", quick(range(2), (0,)))
def test_drafts_of_sampling_requests_predict_the_choice_with_its_noise(part: int) -> None:
    """Temperatures, with and without the target's noise, in batches with requests that do not sample. What is learned
    from are the probabilities without them."""
    sampled = grown = 0
    for seed in range(part, 120, 2):
        case = Case.random(seed).sampled()
        ours, theirs = in_one_call(case), by_levels(case)
        assert ours.depth == theirs.depth and ours.counts == theirs.counts and ours.broken == theirs.broken, seed
        for tree, expected in zip(ours.trees, theirs.trees, strict=True):
            assert_same_tree(tree, expected, rtol=1e-5)
            np.testing.assert_array_equal(tree.slots, expected.slots)
        for own, expected_scores in zip(ours.scores, theirs.scores, strict=True):
            for (owner, probs), (expected_owner, expected_probs) in zip(own, expected_scores, strict=True):
                assert owner == expected_owner
                np.testing.assert_array_equal(probs, expected_probs)
        sampled += any(case.sampling.temperatures)
        grown += ours.depth > 2
    assert min(sampled, grown) > 10


def test_parts_of_the_scored_nodes() -> None:
    """By level, or the whole of it if there is only one tree."""
    owners = np.array([0, 2, 0, 0, 2, 2, 2])
    drafted = ScoredRows([2, 3, 2], owners, owners > 5, [])
    assert list(drafted.runs()) == [(0, 1), (2, 1), (0, 2), (2, 1), (2, 2)]
    assert list(drafted._replace(owners=np.full(7, 3)).runs()) == [(3, 7)]
