"""Memory on huge pages for weights that every pass streams.

With 4 KiB pages, a pass over 270 MB of weights needs 66,000 address translations, and hardware prefetching stops at
every page. Linux provides 2 MiB pages on request.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK = 64 * PAGE  # bytes per mapping, shared by several tensors; its last page may stay partly unused
ALIGNMENT = 64
SMALLEST = 1 << 16  # minimum bytes of a tensor to place on huge pages


class HugePages:
    """Allocator for tensors with a common lifetime, such as a model's weights.

    Chunks are unmapped with their last tensor. Without huge pages in the kernel, they use ordinary pages.
    """

    def __init__(self, smallest: int | None = SMALLEST) -> None:
        """Create an allocator; tensors smaller than `smallest` bytes use ordinary pages, None: all tensors."""
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
    """Return page-aligned zeros, uint8 [>= size], that use huge pages once they are written."""
    size = -(-size // PAGE) * PAGE
    # mmap's default is a shared mapping, which gets huge pages only if they are enabled for shmem.
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    return whole[first : first + size]
