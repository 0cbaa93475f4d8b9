"""The library that grows token trees in C++, and the passes of drafts that run in its calls.

A call assigns slots to the frontier, runs the SSMs' passes over it, merges their proposals with those of other sources,
selects the next frontier, and goes on with it while another level pays. The source is `growth_cpu.cpp`, the reference
treespec_kernels/tree/tree_merge.py, and the caller `CompiledForest` in treespec/drafters/ssm/forest.py.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.compiled_plan import CompiledPlan
from treespec_kernels.cpu.cpu_library import address_of, compile_library, read_structs
from treespec_kernels.cpu.decoder_cpu import PassEntries
from treespec_kernels.tree.growth_limits import MAX_MIXTURE, MIN_MIXTURE

MOST_CANDIDATES = 256  # of a choice, see choice_cpu.h; a multiple of 64
NO_PAGE = "a tree has no page for its nodes"
_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("growth_cpu.cpp", "choice_cpu.h", "drafts_cpu.h", "sampling_cpu.h", "vectors_cpu.h", "batch_cpu.h")
)
STRUCTS: dict[str, Any] = read_structs(*_SOURCES)


@functools.cache
def growth_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Load or compile the library; arguments and errors as in `compile_library`."""
    bounds = f"-DMIN_MIXTURE={MIN_MIXTURE}f", f"-DMAX_MIXTURE={MAX_MIXTURE}f", f"-DMOST_CANDIDATES={MOST_CANDIDATES}"
    return compile_library(compiler, _SOURCES, bounds, folder)


def packed(*sequences: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int64], list[int]]:
    """Return all numbers in one array, and the address of each sequence: an array's address takes a microsecond."""
    numbers = [*chain(*sequences)]
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    address = ctypes.addressof(array)
    return array, [address + 8 * first for first in accumulate(map(len, sequences[:-1]), initial=0)]


class DraftSampling(NamedTuple):
    """How the targets of a batch's trees choose, for drafts that predict it; one entry per tree."""

    temperatures: Sequence[float]  # 0 for the most likely token
    adds_noise: Sequence[bool]  # whether the drafts add the noise of the target (see sampling/coupled_choice.py)
    rng_seeds: Sequence[int]  # this and `samples`: the key of the noise
    samples: Sequence[int]


class DraftInputs(NamedTuple):
    """What a call that grows trees needs of one draft."""

    # What a draft head reads in its first pass, [num_rows, hidden_size] in its dtype: first for the committed tokens,
    # tree by tree, then for the roots; None for an SSM
    features: Tensor | None = None
    # Probabilities of a block draft, which runs no pass and has read all tokens, float32 [num_trees, depths, width],
    # without temperature and noise; None for others
    block_probs: np.ndarray | None = None


class ScoredRows(NamedTuple):
    """What SSMs scored in a call that grew all levels."""

    level_rows: list[int]  # by level, number of scored nodes
    owners: np.ndarray  # int64 [num_rows], their trees, by level
    broken: np.ndarray  # bool [num_rows], whether an SSM's probabilities are not finite
    # By SSM of the passes, float32 [num_rows, width]: probabilities without temperature and noise, after the committed
    # tokens that it read, if `CallPasses.reads`, and then after the nodes that it scored, by level
    scores: list[np.ndarray]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Return the trees and numbers of consecutive scored nodes of the same tree."""
        owners = self.owners
        if len(owners) and (owners == owners[0]).all():
            yield int(owners[0]), len(owners)
            return
        first = 0
        for count in self.level_rows:
            level, sizes = np.unique(owners[first : first + count], return_counts=True)
            yield from zip(level.tolist(), sizes.tolist(), strict=True)
            first += count


class TreePlaces:
    """KV slots of a batch's tree nodes in the SSMs' caches. The root has slot 0, each node the next slot of its tree.

    The arguments are committed positions and pages of each tree's request.
    """

    def __init__(self, library: ctypes.CDLL, context_lens: Sequence[int], pages: Sequence[np.ndarray]):
        count = len(context_lens)
        self._library = library
        self._pages = pages[0] if count == 1 else np.concatenate(pages)
        self._paths: Tensor | None = None  # of the newest level
        # Per tree: context length, number of slots in use, and a row minus its slot.
        first_page = [*accumulate(map(len, pages), initial=0)]
        self._held, addresses = packed(context_lens, [1] * count, [0] * count, first_page)
        self.placing = STRUCTS["Placing"](
            page_size=PAGE_SIZE,
            context=addresses[0],
            num_slots=addresses[1],
            row_of_slot=addresses[2],
            first_page=addresses[3],
            pages=address_of(self._pages),
        )

    def extend(self, owners: np.ndarray, above: np.ndarray, depth: int) -> CompiledPlan:
        """Assign slots to the nodes of a level, and plan a pass over them.

        `owners` and `above`, int64 [num_rows], are each node's tree, and its parent's slot in it, grouped by tree.
        """
        count, p = len(owners), self.placing
        p.num_rows, p.depth, p.owners, p.above = count, depth, address_of(owners), address_of(above)
        results = torch.empty(count * (depth + 7), dtype=torch.int64, device="cpu")
        address, step = results.data_ptr(), 8 * count
        p.slots, p.positions = address, address + step
        p.rows, p.paths = address + 2 * step, address + 6 * step
        placed = self._library.treespec_place(ctypes.byref(p))
        assert placed, NO_PAGE
        self._paths = results[6 * count :]
        p.paths_above = p.paths
        return CompiledPlan(
            count,
            results[:count],
            results[2 * count : 6 * count].view(4, count),
            torch.from_numpy(self._pages),
            self._paths,
            results[count : 2 * count],
        )


class DraftModels:
    """SSMs and draft heads whose passes run in the call that grows trees."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `growth_library`
        ssms: Sequence[int],  # their indices, ascending; the others have an entry for each
        entries: Sequence[PassEntries],
        rotations: Sequence[Tensor],  # as in `CompiledModel.forward`
        pools: Sequence[Tensor],  # parts of the cache
        # Tokens of the columns of the probabilities, int64 [width], ascending; or their number, if they are 0, 1, ...
        tokens: Sequence[np.ndarray | int],
    ):
        assert all(tensor.is_contiguous() for tensor in (*rotations, *pools))
        self.library, self._held = library, (rotations, pools, tokens)
        # Number of positions that the rotations cover
        self.num_positions = min((len(rotation) for rotation in rotations if rotation.numel()), default=sys.maxsize)
        self.drafts = (STRUCTS["Draft"] * len(ssms))(
            *(
                STRUCTS["Draft"](
                    *entry[:4],
                    rotation.data_ptr(),
                    pool.data_ptr(),
                    len(pool),
                    pool.shape[2],
                    *entry[4:7],
                    ssm,
                    vocabulary if isinstance(vocabulary, int) else len(vocabulary),
                    None if isinstance(vocabulary, int) else address_of(vocabulary),
                    *entry[7:],
                )
                for ssm, entry, rotation, pool, vocabulary in zip(ssms, entries, rotations, pools, tokens, strict=True)
            )
        )


class CallPasses(NamedTuple):
    """The SSMs' passes over a batch of trees."""

    models: DraftModels  # the SSMs that draft for any tree
    places: TreePlaces  # slots of the trees; only these passes may assign slots in it
    active: Sequence[Sequence[bool]]  # by SSM and tree, whether the SSM drafts for the tree
    valid: Sequence[Sequence[int]]  # by SSM and tree, number of leading positions with K/V, at most the root's
    first_rotations: Sequence[Sequence[int]]  # by SSM and tree, row of the SSM's rotations for position 0
    tokens: Sequence[int]  # each tree's last committed tokens, from the first one that an SSM has not read to the root
    first_token: Sequence[int]  # start of each tree's part of `tokens`, and their number
    reads: bool  # whether to return the probabilities after the committed tokens that are read
    inputs: Sequence[DraftInputs]  # by SSM
    sampling: DraftSampling | None  # how the targets choose; None if all of them choose the most likely token

    def allocate_scores(self, num_nodes: int) -> list[np.ndarray]:
        """Allocate the scores of `ScoredRows` for at most `num_nodes` nodes, and pass every draft its inputs."""
        rows = num_nodes + (len(self.tokens) - len(self.first_token) + 1 if self.reads else 0)  # with those read
        scores = [np.empty((rows, draft.width), dtype=np.float32) for draft in self.models.drafts]
        for draft, probs, (features, block) in zip(self.models.drafts, scores, self.inputs, strict=True):
            draft.out = address_of(probs, np.float32)
            draft.features = None if features is None else features.data_ptr()
            draft.block_probs = None if block is None else address_of(block, np.float32)
            draft.block_depths = 0 if block is None else block.shape[1]
        return scores
