"""Memory on huge pages for weights that every pass streams.

With pages of 4 KiB, a pass over 270 MB of weights needs 66,000 address translations, and hardware prefetching stops at
every page. Linux gives pages of 2 MiB to memory that asks for them.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK = 64 * PAGE  # bytes of a mapping, which several tensors share; its last page may stay partly unused
ALIGNMENT = 64
SMALLEST = 1 << 16  # bytes of a tensor for which this is worth while


class HugePages:
    """Allocator of tensors that live and die together, such as a model's weights.

    Chunks are unmapped with their last tensor. Where the kernel has no huge pages, they consist of ordinary ones.
    """

    def __init__(self, smallest: int | None = SMALLEST) -> None:
        """Create an allocator; tensors of fewer bytes than `smallest` are on ordinary pages, None for all."""
        self._smallest = smallest if hasattr(mmap, "MADV_HUGEPAGE") else None
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return uninitialised memory, uint8 [nbytes]."""
        if self._smallest is None or nbytes < self._smallest:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > len(self._chunk):
            self._chunk, start = _map(max(nbytes, CHUNK)), 0
        self._used = start + nbytes
        return self._chunk[start : self._used]


def _map(size: int) -> Tensor:
    """Return zeros, uint8 [>= size], that begin at a page and are on huge pages once they are written."""
    size = -(-size // PAGE) * PAGE
    # mmap's default is a shared mapping, which gets huge pages only if those of shmem are enabled.
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    return whole[first : first + size]
