"""Time the loading of a checkpoint against a plain read of the same files."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from treespec_weights.checkpoint import Checkpoint
from treespec_weights.documents import read_model
from treespec_weights.errors import OptionError
from treespec_weights.files import resolve_folder
from treespec_weights.load import load_weights

PAGE = 4096


def time_loading(
    folder: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    repeats: int = 3,
    cold: bool = False,
    on_repeat: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Time `load_weights` and safetensors' `load_file` alternately, after a first read that fills the page cache.

    Every page is touched, because mapped pages are read only on access. `load_file` checks no names and shapes, so its
    time is a lower bound. With `cold` (Linux), files are dropped from the page cache before each load. `share` is the
    speed as a fraction of the plain read's: the median over pairs of consecutive loads. Raises the errors of
    `load_weights`, and OptionError for a GGUF file.
    """
    if cold and not hasattr(os, "posix_fadvise"):
        raise OptionError("--cold: this system cannot drop files from its page cache; omit the option")
    root = resolve_folder(folder)
    if root.is_file():
        raise OptionError(f"{root} is a GGUF file, and loading is compared with a plain read of safetensors")
    shape, rules = read_model(root)
    with Checkpoint.open(root) as checkpoint:
        files = [root / file for file in checkpoint.files]
        size = sum(info.size * checkpoint.dtype(name).itemsize for name, info in checkpoint.tensors.items())

    def plain() -> None:
        # Keep the whole result, as a loader does: reusing freed memory would be faster.
        touch([tensor.to(dtype) for file in files for tensor in load_file(file, device=str(device)).values()])

    def ours() -> None:
        touch(load_weights(root, shape, rules, dtype, device).values())

    seconds: dict[str, list[float]] = {"plain": [], "load_weights": []}
    pairs = [("plain", plain), ("load_weights", ours)]
    for repeat in range(repeats + 1):  # the first fills the page cache
        for name, load in pairs:
            if cold:
                _drop_from_cache(files)
            start = time.perf_counter()
            load()
            seconds[name].append(time.perf_counter() - start)
        pairs.reverse()
        if on_repeat:
            on_repeat(repeat + 1, repeats + 1)
    seconds = {name: values[1:] for name, values in seconds.items()}
    shares = [of_plain / of_load for of_plain, of_load in zip(*seconds.values(), strict=True)]
    return {
        "folder": str(folder),
        "bytes": size,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "device": str(device),
        "repeats": repeats,
        "cold": cold,
        **{name: _figures(values, size) for name, values in seconds.items()},
        "share": statistics.median(shares),
    }


def touch(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type == "cpu":
            tensor.flatten().view(torch.uint8)[::PAGE].sum().item()
        else:
            tensor.flatten()[-1:].cpu()  # waits for the copy


def _drop_from_cache(files: Iterable[Path]) -> None:
    """Drop files from the page cache. This affects only pages that are written to disk and not mapped."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _figures(seconds: list[float], size: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {"seconds": seconds, "median": median, "gb_per_second": size / median / 1e9}
