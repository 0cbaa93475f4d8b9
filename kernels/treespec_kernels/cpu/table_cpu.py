"""Proposals of an n-gram table in one C++ call; the reference is `TableDrafter.expand`.

The source is `table_cpu.cpp`.
"""

import ctypes
import functools
from pathlib import Path

import numpy as np

from treespec_kernels.cpu.cpu_library import compile_library, read_structs

CONTEXTS = 3  # tokens of the longest context
SLOT = 8  # stored continuations per context seen while serving
CANDIDATES = 64  # maximum number of children of a node
BYTES_PER_SLOT = 4 + 8 * SLOT
# Weights of stored continuations, evenly spaced in log odds; rounding errors are at most 3 %.
PROBS = np.append(0.0, 1 / (1 + np.exp(-np.linspace(-10.0, 6.0, 255))))

_SOURCE = Path(__file__).with_name("table_cpu.cpp")
STRUCTS = read_structs(_SOURCE)


@functools.cache
def table_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Load or compile the library; arguments and errors as in `compile_library`."""
    sizes = [f"-D{name}={globals()[name]}" for name in ("CONTEXTS", "SLOT", "CANDIDATES")]
    return compile_library(compiler, (_SOURCE,), sizes, folder)
