"""A device's memory: how much is free, and zeros that take none before they are written."""

import gc
import logging
import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("treespec")

UNKNOWN = 8 << 30  # bytes that are taken to be free where nothing says how many are


def free_memory(device: torch.device) -> int:
    """Bytes that are free now; on a CPU within the limit of the control group. Cached files count as free."""
    if device.type == "cuda":
        release_cached(device)  # an engine before this one may have left some
        return torch.cuda.mem_get_info(device)[0]
    return max(min(_available(), _left_in_group()), 0)


def release_cached(device: torch.device) -> None:
    """Give back what torch holds of a GPU's memory and nobody uses."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _available(system: Path = Path("/proc/meminfo")) -> int:
    """What the kernel could give to a new program, its file cache among it."""
    try:
        lines = dict(line.split(":", 1) for line in system.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):  # no Linux
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # macOS has the first two and not the third, Windows none
        logger.warning("the free memory is unknown here; assuming %d GiB", UNKNOWN >> 30)
        return UNKNOWN


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what deleted engines held: vLLM's name, for its scripts. There are no other processes to shut down."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _left_in_group(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process's control group may still take. The file cache that it counts as used would be given back."""
    try:
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit
        return sys.maxsize
    try:
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return left + int(counts["inactive_file"])
    except (OSError, KeyError, ValueError):
        return left


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a shape. On a CPU the system hands out their pages as they are first written: zeroing 8 GiB at once
    takes half a minute, and holds memory that no request may ever need."""
    count = math.prod(size)
    if device.type != "cpu" or not count or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(size))
