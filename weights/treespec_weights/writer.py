"""Write safetensors files one tensor at a time. safetensors' own writer needs a whole file in memory.

File format: the header's length in eight little-endian bytes, the header as JSON, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from treespec_weights.checkpoint import INDEX, SINGLE
from treespec_weights.dtypes import NAMES, TORCH_DTYPES
from treespec_weights.errors import WriteError

CHUNK = 16 << 20  # bytes between progress reports


class Output(NamedTuple):
    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


class Shard(NamedTuple):
    file: str
    outputs: tuple[Output, ...]

    def header(self) -> dict[str, dict[str, Any]]:
        """Return the header entries of the tensors. The widest dtypes come first, so that all tensors are aligned."""
        entries, start = {}, 0
        for output in sorted(self.outputs, key=lambda output: -TORCH_DTYPES[output.dtype].itemsize):
            end = start + output.nbytes
            entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [start, end]}
            start = end
        return entries

    def encoded(self) -> bytes:
        """Return the file's first bytes: the length of the header and the header."""
        text = json.dumps({"__metadata__": {"format": "pt"}} | self.header(), separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def tensor_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)

    @property
    def nbytes(self) -> int:
        return len(self.encoded()) + self.tensor_bytes


def plan_shards(groups: Iterable[Sequence[Output]], shard_bytes: int) -> list[Shard]:
    """Distribute tensors over files of at most `shard_bytes` each. A group is never split, even if it is larger."""
    shards: list[list[Output]] = [[]]
    size = 0
    for group in groups:
        group_bytes = sum(output.nbytes for output in group)
        if shards[-1] and size + group_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1] += group
        size += group_bytes
    if len(shards) == 1:
        return [Shard(SINGLE, tuple(shards[0]))]
    return [
        Shard(f"model-{i:05}-of-{len(shards):05}.safetensors", tuple(outputs)) for i, outputs in enumerate(shards, 1)
    ]


def write_shard(
    folder: Path, shard: Shard, tensors: Iterable[Tensor], on_bytes: Callable[[int], None] | None = None
) -> None:
    """Write one file under a temporary name, then rename it.

    `tensors` are the values of the shard's outputs, in order, on any device; each is written before the next is
    requested. `on_bytes` is called with the number of bytes written since the last call. Raises WriteError; no partial
    file is left.
    """
    path, temporary = folder / shard.file, folder / f"{shard.file}.part"
    temporary.unlink(missing_ok=True)  # left by a killed process
    name = ""
    try:
        with temporary.open("xb") as file:
            encoded, header = shard.encoded(), shard.header()
            file.write(encoded)
            following = iter(tensors)
            for output in shard.outputs:
                name = output.name
                tensor = next(following)
                assert (NAMES[tensor.dtype], tuple(tensor.shape)) == output[1:], f"{name}: not as planned"
                file.seek(len(encoded) + header[name]["data_offsets"][0])
                write_tensor(file, tensor, on_bytes)
                del tensor  # free it before the next one is created (zip would keep a reference)
            name = ""
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        problem = f"tensor {name!r} cannot be written" if name else "cannot be written"
        raise WriteError.of(folder, "file", shard.file, f"{problem}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def is_written(folder: Path, shard: Shard) -> bool:
    """Return whether size and header show that `write_shard` finished this file."""
    path = folder / shard.file
    if path.is_symlink() or not path.is_file() or path.stat().st_size != shard.nbytes:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.encoded())) == shard.encoded()


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of several files; a single file needs none. Raises WriteError."""
    if len(shards) == 1 and shards[0].file == SINGLE:
        return
    outputs = [(output, shard.file) for shard in shards for output in shard.outputs]
    total = sum(output.nbytes for output, _ in outputs)
    write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": {o.name: file for o, file in outputs}})


def write_json(folder: Path, name: str, document: Any) -> None:
    """Write a JSON file. Raises WriteError."""
    write_text(folder, name, json.dumps(document, indent=2) + "\n")


def write_text(folder: Path, name: str, text: str) -> None:
    """Write a file in UTF-8. Raises WriteError."""
    try:
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError.of(folder, "file", name, f"cannot be written: {error.strerror}") from error


def write_tensor(file: BinaryIO, tensor: Tensor, on_bytes: Callable[[int], None] | None) -> None:
    """Write the bytes of a tensor in chunks, reporting the size of each to `on_bytes`."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        file.write(chunk)
        if on_bytes:
            on_bytes(len(chunk))
