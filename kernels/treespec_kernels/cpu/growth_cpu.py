"""The C++ library that grows token trees, and the draft passes that run within its calls.

A call assigns slots to the frontier, runs the SSMs' passes on it, merges their proposals with those of other sources,
selects the next frontier, and repeats this while another level pays off. The source is `growth_cpu.cpp`, the reference
treespec_kernels/tree/tree_merge.py, and the caller treespec/drafters/ssm/compiled_growth.py.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from treespec_kernels.cpu.cpu_library import address_of, compile_library, read_structs
from treespec_kernels.cpu.decoder_cpu import PassEntries
from treespec_kernels.tree.growth_limits import MAX_MIXTURE, MIN_MIXTURE

MOST_CANDIDATES = 256  # maximum candidates of a choice (choice_cpu.h), a multiple of 64
NO_PAGE = "a tree has no page for its nodes"
_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        *("growth_cpu.cpp", "choice_cpu.h", "drafts_cpu.h", "sampling_cpu.h", "vectors_cpu.h", "batch_cpu.h"),
        *("lookup_cpu.h", "rounds_cpu.h"),
    )
)
STRUCTS: dict[str, Any] = read_structs(*_SOURCES)


@functools.cache
def growth_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Load or compile the library; arguments and errors as in `compile_library`."""
    bounds = f"-DMIN_MIXTURE={MIN_MIXTURE}f", f"-DMAX_MIXTURE={MAX_MIXTURE}f", f"-DMOST_CANDIDATES={MOST_CANDIDATES}"
    return compile_library(compiler, _SOURCES, bounds, folder)


class DraftInputs(NamedTuple):
    """Inputs of one draft to a call that grows trees."""

    # Features for a draft head's first pass, [num_rows, hidden_size] in its dtype: first for the committed tokens, tree
    # by tree, then for the roots; None for an SSM
    features: Tensor | None = None
    # Probabilities of a block draft, which runs no pass and has read all tokens, float32 [num_trees, depths, width],
    # without temperature and noise; None for other drafts
    block_probs: np.ndarray | None = None
    # By tree, addresses and sizes of the recurrent state, and `replayed`; None without recurrent layers
    states: ctypes.Array[ctypes.Structure] | None = None


class DraftModels:
    """SSMs and draft heads with passes that run in the call that grows trees."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `growth_library`
        ssms: Sequence[int],  # indices of the SSMs, ascending; the following arguments have one entry for each
        entries: Sequence[PassEntries],
        rotations: Sequence[Tensor],  # see `CompiledModel.forward`
        pools: Sequence[Tensor],  # parts of the cache
        # Token ids of the probabilities' columns, int64 [width], ascending; or their number, if they are 0, 1, ...
        tokens: Sequence[np.ndarray | int],
    ):
        assert all(tensor.is_contiguous() for tensor in (*rotations, *pools))
        self.library, self._held, self.vocabularies = library, (rotations, pools), tokens
        # number of positions covered by the rotations
        self.num_positions = min((len(rotation) for rotation in rotations if rotation.numel()), default=sys.maxsize)
        self.drafts = (STRUCTS["Draft"] * len(ssms))(
            *(
                STRUCTS["Draft"](
                    *entry[:4],
                    rotation.data_ptr(),
                    pool.data_ptr(),
                    entry.num_layers,
                    pool.shape[2],
                    *entry[5:8],
                    ssm,
                    vocabulary if isinstance(vocabulary, int) else len(vocabulary),
                    None if isinstance(vocabulary, int) else address_of(vocabulary),
                    *entry[8:],
                )
                for ssm, entry, rotation, pool, vocabulary in zip(ssms, entries, rotations, pools, tokens, strict=True)
            )
        )
