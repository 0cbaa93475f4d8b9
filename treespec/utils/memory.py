"""Device memory, lazily allocated zeros, and pages of memory-mapped files."""

import ctypes
import gc
import logging
import math
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("treespec")

_LEAST_MAPPED = 1 << 20  # minimum bytes of a tensor whose mapped pages are dropped
UNKNOWN = 8 << 30  # bytes assumed free if the platform does not report them


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device. On a CPU, respects the cgroup limit and counts file cache as free."""
    if device.type == "cuda":
        release_cached(device)  # frees memory of deleted engines
        return torch.cuda.mem_get_info(device)[0]
    return max(min(_available(), _left_in_group()), 0)


def release_cached(device: torch.device) -> None:
    """Return unused memory of torch's caching allocator to the GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def drop_mapped(tensors: Iterable[Tensor]) -> None:
    """Drop file-mapped pages of large tensors from memory; they are read again on access.

    Discards changes to a private mapping.
    """
    large = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST_MAPPED]
    if not large or not hasattr(mmap, "MADV_DONTNEED"):
        return
    try:
        mappings = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:  # only Linux has this file
        return
    # Other mappings, with inode 0, would lose their contents.
    files = [[int(bound, 16) for bound in fields[0].split("-")] for fields in mappings if fields[4] != "0"]
    for tensor in large:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if tensor.is_contiguous() and any(first <= start and end <= last for first, last in files):
            start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _available(system: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes available to a new process, including reclaimable file cache."""
    try:
        lines = dict(line.split(":", 1) for line in system.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):  # only Linux has this file
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # macOS lacks SC_AVPHYS_PAGES, Windows lacks sysconf
        logger.warning("cannot determine the free memory; assuming %d GiB", UNKNOWN >> 30)
        return UNKNOWN


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of deleted engines. Provided for vLLM scripts; there are no worker processes to shut down."""
    release_cached(torch.device("cuda"))


def _left_in_group(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes left under the cgroup's limit, including inactive file cache, which is reclaimable."""
    try:
        free_bytes = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group or no limit
        return sys.maxsize
    try:
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return free_bytes + int(counts["inactive_file"])
    except (OSError, KeyError, ValueError):
        return free_bytes


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, pages are allocated on first write, because zeroing 8 GiB takes half a minute.

    Linux provides pages of 2 MiB on request: with them, two threads read the K/V of 4,096 positions at 27 GB/s, and at
    17 GB/s with pages of 4 KiB (Sapphire Rapids).
    """
    count = math.prod(size)
    if device.type != "cpu" or not count or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(size))
