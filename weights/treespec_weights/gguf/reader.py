"""Read the headers of GGUF files: metadata, and type, shape and offset of every tensor.

The package gguf provides the names and block sizes of tensor types. Headers are parsed here, because its own reader
creates several arrays per string: 4 s for a vocabulary of 49,152 tokens instead of 0.15 s.
"""

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from treespec_weights.errors import CheckpointError
from treespec_weights.files import remedy

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class GgufTensor(NamedTuple):
    file: str  # name of the file that holds it
    type: str  # ggml's name: "F16", "Q4_K" ...
    shape: tuple[int, ...]  # numbers of values, in torch's order
    offset: int  # position of its first byte in the file
    nbytes: int


@dataclass(frozen=True, eq=False)
class GgufFile:
    """Header of a GGUF file, or of a model split into several files. It is cached: do not modify its mappings."""

    path: Path  # path of the file, or of the first part
    metadata: Mapping[str, Any]  # values by key; arrays are lists
    tensors: Mapping[str, GgufTensor]  # entries by GGUF name, in file order
    files: Mapping[str, int]  # file name to size in bytes

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    def value(self, key: str) -> Any:
        """Return a metadata value of the architecture, such as "block_count", or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def gguf_package(path: Path) -> ModuleType:
    """Import the package gguf. Raises CheckpointError, naming the extra to install, if it is missing."""
    try:
        import gguf
    except ImportError as error:
        message = "GGUF files need the package gguf, which is not installed: pip install 'treespec[gguf]'"
        raise CheckpointError.of(path, "file", path.name, message) from error
    module: ModuleType = gguf
    return module


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, and of its other parts if the model is split.

    Headers are cached until the file changes. Raises CheckpointError for a file that is not GGUF, truncated or
    malformed, for a missing part, and if the package gguf is missing; OSError if the file cannot be opened.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count < 2:
        return first
    shard_name = SHARD.fullmatch(path.name)
    if shard_name is None or int(shard_name["count"]) != count:
        message = f"a part of a model split into {count} files, which must be named NAME-00001-of-{count:05}.gguf"
        raise CheckpointError.of(path, "file", path.name, message)
    names = [f"{shard_name['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if int(shard_name["part"]) != 1:
        message = f"part {int(shard_name['part'])} of {count}; give the first one, {names[0]!r}"
        raise CheckpointError.of(path, "file", path.name, message)
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        message = f"{', '.join(map(repr, missing))} missing beside it; a split model needs all {count} files"
        raise CheckpointError.of(path, "file", path.name, message)
    tensors, files = dict(first.tensors), dict(first.files)
    for name in names[1:]:
        split = _read_part(path.parent / name)
        if twice := tensors.keys() & split.tensors.keys():
            message = f"holds {min(twice)!r}, which another part holds too"
            raise CheckpointError.of(path, "file", name, message)
        tensors |= split.tensors
        files |= split.files
    return GgufFile(path, first.metadata, tensors, files)


def _read_part(path: Path) -> GgufFile:
    stat = path.stat()
    return _read_header(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=16)
def _read_header(path: Path, mtime_ns: int, size: int) -> GgufFile:
    ggml = gguf_package(path)
    try:
        if not size:
            raise ValueError("empty; download it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data), path, ggml)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = "metadata nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError.of(path, "file", path.name, f"not a usable GGUF file: {reason}") from error


def _parse(cursor: "_Cursor", path: Path, ggml: ModuleType) -> GgufFile:
    """Parse a header. Raises ValueError if it is malformed."""
    if (magic := cursor.take(4)) != MAGIC:
        raise ValueError(f"it starts with {magic!r} instead of {MAGIC!r}; {remedy(path)}")
    version = cursor.number("I")
    if version not in VERSIONS:
        order = ", in big-endian byte order" if version & 0xFFFF == 0 else ""
        raise ValueError(f"version {version:#x}{order}; supported: {' and '.join(map(str, VERSIONS))}, little-endian")
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        if name in entries:
            raise ValueError(f"the tensor {name!r} occurs twice")
        if (dims := cursor.number("I")) > _MAX_DIMS:
            raise ValueError(f"the tensor {name!r} has {dims} dimensions; at most {_MAX_DIMS} are valid")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        if not 0 < math.prod(shape) < 2**63:
            raise ValueError(f"the tensor {name!r} has the impossible shape {list(shape)}")
        entries[name] = shape, cursor.number("I"), cursor.number("Q")
    alignment = metadata.get("general.alignment", ggml.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}; a power of two is valid")
    start, tensors = -(-cursor.offset // alignment) * alignment, {}
    for name, (shape, kind, offset) in entries.items():
        tensors[name] = _entry(ggml, path.name, name, shape, kind, start + offset)
        if (end := start + offset + tensors[name].nbytes) > cursor.size:
            ends = f"the tensor {name!r} ends at byte {end:,}, and the file has {cursor.size:,}"
            raise ValueError(f"truncated: {ends}; download it again")
    return GgufFile(path, metadata, tensors, {path.name: cursor.size})


def _entry(ggml: ModuleType, file: str, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """Return a tensor's entry. A type unknown to the package gguf is named "type N" and has no bytes."""
    try:
        quant_type = ggml.GGMLQuantizationType(kind)
    except ValueError:
        return GgufTensor(file, f"type {kind}", shape, offset, 0)
    values, nbytes = ggml.GGML_QUANT_SIZES[quant_type]
    if (row := shape[-1] if shape else 1) % values:
        raise ValueError(f"the tensor {name!r} has rows of {row} values; {quant_type.name} needs multiples of {values}")
    return GgufTensor(file, quant_type.name, shape, offset, math.prod(shape) // values * nbytes)


class _Cursor:
    """Sequential reader of header values. Methods raise ValueError past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset, self.size = data, 0, len(data)

    def take(self, count: int) -> bytes:
        end = self.offset + count
        if end > self.size:
            raise ValueError(f"truncated: its header goes beyond the file's {self.size:,} bytes; download it again")
        start, self.offset = self.offset, end
        return self.data[start:end]

    def number(self, code: str) -> Any:
        """Return a little-endian number; `code` is its format in the module struct."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        # Round a float32 to its shortest decimal, as in config.json: 1e-05 instead of 9.999999747378752e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Return a metadata value of the type `kind`."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a metadata value has the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if kind == _STRING:
            return self._texts(count)
        return [self.value(kind) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """Return strings as by `text`, in a third of the time: 0.1 s for a vocabulary of 150,000 tokens and merges."""
        texts, data, offset, size_at = list[str](), self.data, self.offset, struct.Struct("<Q").unpack_from
        while len(texts) < count and offset + 8 <= self.size:
            start = offset + 8
            offset = start + size_at(data, offset)[0]
            texts.append(str(data[start:offset], "utf-8", "replace"))
        self.take(offset - self.offset)  # raises if the last one is truncated
        return [*texts, *(self.text() for _ in range(count - len(texts)))]
