"""Open a folder of safetensors files lazily, checked against its index."""

import logging
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treespec_weights.blocks import FORMS, Blocks
from treespec_weights.dtypes import LOADABLE, TORCH_DTYPES
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.files import file_inside, is_plain_name, read_json, remedy, resolve_folder
from treespec_weights.gguf.reader import read_gguf
from treespec_weights.gguf.tensors import GgufTensors
from treespec_weights.text_part import is_composite, text_names

logger = logging.getLogger("treespec")

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ITEM_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "C64": 64}


class TensorInfo(NamedTuple):
    """A tensor's entry in the header of a safetensors or GGUF file."""

    file: str
    dtype: str  # safetensors' name: "BF16", "F32" ..., or a GGUF type of blocks: "Q4_K" ...
    shape: tuple[int, ...]
    nbytes: int  # size in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False, repr=False)
class Checkpoint:
    """The tensors of a checkpoint folder, by name. Create it with `Checkpoint.open`.

    Tensors are memory-mapped: opening reads only headers, and pages are read on access. Files must not be modified in
    place while their tensors are in use (replacing a file is safe).
    """

    folder: Path  # the real path
    tensors: dict[str, TensorInfo]  # in file order
    files: dict[str, int]  # file name to size in bytes
    _handles: dict[str, Any]
    absent: dict[str, str]  # name to file of the index's entries for tensors that no file holds
    block_types: tuple[str, ...] = ()  # dtypes of the blocks in a GGUF file, which `tensor` dequantises to float32
    # names in the files, if only the text part is opened; None for unchanged names
    stored_names: dict[str, str] | None = None

    @property
    def loadable(self) -> tuple[str, ...]:
        """Dtypes of tensors that can be loaded as weights."""
        return (*LOADABLE, *self.block_types)

    @classmethod
    def open(cls, folder: Path | str, single: str = SINGLE) -> "Checkpoint":
        """Open `model.safetensors`, the shards listed in `model.safetensors.index.json`, or a GGUF file.

        Another `single` opens the file of that name.

        Raises FileNotFoundError or NotADirectoryError for a wrong folder, and CheckpointError with all problems of the
        files.
        """
        root = resolve_folder(folder)
        if root.is_file():
            gguf = GgufTensors(read_gguf(root))
            infos = {name: TensorInfo(e.file, e.type, e.shape, e.nbytes) for name, e in gguf.entries.items()}
            sizes = dict(gguf.file.files)
            return cls(root, infos, sizes, dict.fromkeys(sizes, gguf), {}, gguf.block_types)
        placement, shards, problems = _placement(root, single)
        config = read_json(root, CONFIG) if (root / CONFIG).exists() else None
        tensors: dict[str, TensorInfo] = {}
        files: dict[str, int] = {}
        handles: dict[str, Any] = {}
        holders: dict[str, list[str]] = {}
        for file in shards:
            try:
                path = file_inside(root, file)
                handle = safe_open(path, "pt")
                infos = {name: _info(handle, file, name) for name in handle.offset_keys()}
            except CheckpointError as error:
                problems += error.problems
                continue
            except (SafetensorError, OSError, ValueError) as error:
                problems.append(Problem("file", repr(file), f"not a valid safetensors file: {error}; {remedy(path)}"))
                continue
            tensors |= infos
            handles[file] = handle
            files[file] = path.stat().st_size
            for name in infos:
                holders.setdefault(name, []).append(file)
        if not tensors and not problems:
            problems.append(Problem("file", repr(single), "holds no tensor"))
        problems += _disagreements(placement, holders, files)
        if problems:
            raise CheckpointError(root, problems)
        absent = {name: shard for name, shard in placement.items() if name not in tensors}
        if not isinstance(config, dict) or not is_composite(config):
            return cls(root, tensors, files, handles, absent)
        stored = text_names([*tensors, *absent])
        tensors = {name: tensors[of_file] for name, of_file in stored.items() if of_file in tensors}
        absent = {name: absent[of_file] for name, of_file in stored.items() if of_file in absent}
        return cls(root, tensors, files, handles, absent, stored_names=stored)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype from the header. Raises CheckpointError for an unknown name or dtype."""
        info = self.info(name)
        if info.dtype in self.block_types:
            return torch.float32
        if info.dtype not in TORCH_DTYPES:
            raise self._refuse("dtype", name, f"torch has no dtype {info.dtype}, as stored (in {info.file!r})")
        return TORCH_DTYPES[info.dtype]

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's file, dtype and shape. Raises CheckpointError for an unknown name."""
        if name not in self.tensors:
            similar = get_close_matches(name, self.tensors, n=1)
            hint = f"; the nearest name is {similar[0]!r}" if similar else ""
            raise self._refuse("missing", name, f"no such tensor in {', '.join(self.files)}{hint}")
        return self.tensors[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor, contiguous, on the CPU.

        Without `dtype`, the result is a private mapping of the file: writing to it never changes the file, and it stays
        valid after `close`. With `dtype`, it owns its memory. Raises CheckpointError for an unknown name, an unreadable
        tensor or a closed checkpoint.
        """
        self.dtype(name)
        handle = self._handle(name)
        try:
            tensor: Tensor = handle.get_tensor(name if self.stored_names is None else self.stored_names[name])
        except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise self._refuse("file", name, f"cannot be read from {self.info(name).file!r}: {error}") from error
        if tensor.data_ptr() % tensor.element_size():
            # The format does not require padded headers, so tensors may be unaligned.
            tensor = tensor.clone()
        return tensor if dtype is None else tensor.to(dtype)

    def stored(self, name: str) -> Tensor:
        """Read one tensor in the layout of the file: the result of `tensor`, or the blocks of a GGUF file as bytes."""
        in_blocks = self.info(name).dtype in self.block_types
        return self._handle(name).stored(name) if in_blocks else self.tensor(name)

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix (or those of all experts) as GGUF blocks; None if it is not stored in a type of `FORMS`."""
        info = self.tensors.get(name)
        if info is None or info.dtype not in FORMS or len(info.shape) < 2:
            return None
        blocks: Blocks = self._handle(name).blocks(name)
        return blocks

    def missing(self, name: str, reason: str) -> Problem:
        """Return the problem of a missing tensor."""
        if name in self.absent:
            reason += f"; the index places it in {self.absent[name]!r}, which does not hold it"
        return Problem("missing", repr(name), f"{reason}; download or convert the checkpoint again")

    def log_absent(self) -> None:
        """Log the entries of `absent` after a load that needed none of them."""
        if self.absent:
            first, count = next(iter(self.absent)), len(self.absent)
            message = "%s: no file holds %d tensors of %r, such as %r, and none is needed"
            logger.info(message, self.folder, count, INDEX, first)

    def close(self) -> None:
        """Close the files. Tensors already read stay valid."""
        self._handles.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, name: str) -> Any:
        """Return the open file of a tensor. Raises CheckpointError after `close`."""
        if (file := self.info(name).file) not in self._handles:
            raise self._refuse("file", name, "the checkpoint is closed")
        return self._handles[file]

    def _refuse(self, kind: str, name: str, message: str) -> CheckpointError:
        return CheckpointError.of(self.folder, kind, name, message)


def _info(handle: Any, file: str, name: str) -> TensorInfo:
    header = handle.get_slice(name)
    shape = tuple(header.get_shape())
    if math.prod(dim or 1 for dim in shape) >= 2**63:
        raise ValueError(f"tensor {name!r} has the impossible shape {list(shape)}")
    dtype = str(header.get_dtype())
    bits = _ITEM_BITS.get(dtype) or (8 if dtype.startswith("F8") else int(re.sub(r"\D", "", dtype)))
    return TensorInfo(file, dtype, shape, math.prod(shape) * bits // 8)


def _placement(root: Path, single: str) -> tuple[dict[str, str], list[str], list[Problem]]:
    """Read the index: tensor name to shard (empty for a single file), the files to open, and the problems."""
    file_names = {entry.name for entry in root.iterdir()}
    if single != SINGLE or INDEX not in file_names:
        if single not in file_names:
            raise CheckpointError.of(root, "file", single, _missing_message(file_names, single))
        return {}, [single], []
    index = read_json(root, INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError.of(root, "index", INDEX, "has no 'weight_map' object of tensor names to file names")
    shards = {repr(shard): shard for shard in weight_map.values()}.values()
    problems = [Problem("index", repr(INDEX), message) for shard in shards if (message := _shard_problem(shard))]
    if SINGLE in file_names and SINGLE not in shards:
        problems.append(
            Problem("index", repr(INDEX), f"the folder also has an unrelated {SINGLE!r}: keep one of the two")
        )
    placement = {name: str(shard) for name, shard in weight_map.items()}
    return placement, sorted(shard for shard in shards if not _shard_problem(shard)), problems


def _disagreements(
    placement: dict[str, str], holders: dict[str, list[str]], opened: Collection[str]
) -> Iterator[Problem]:
    """Yield the disagreements between the index and the opened shards, and tensors stored in several shards."""
    for name, file in placement.items():
        if file in opened and name in holders and file not in holders[name]:
            elsewhere = f"which does not hold it, but {holders[name][0]!r} does"
            yield Problem("index", repr(name), f"the index places it in {file!r}, {elsewhere}")
    for name, files in holders.items():
        if len(files) > 1:
            yield Problem("index", repr(name), f"duplicate: in {' and in '.join(map(repr, files))}")
        elif placement and name not in placement:
            yield Problem("index", repr(name), f"in {files[0]!r}, but not in {INDEX!r}")


def _shard_problem(shard: object) -> str | None:
    if not isinstance(shard, str) or not is_plain_name(shard):
        return f"names the shard {shard!r}; a shard is a plain file name in the same folder"
    if Path(shard).suffix in PICKLES:
        return f"names {shard!r}: pickles are not loaded; convert to safetensors"
    if Path(shard).suffix != ".safetensors":
        return f"names the shard {shard!r}, which does not end in .safetensors"
    return None


def _missing_message(file_names: set[str], single: str) -> str:
    message = f"neither this nor {INDEX!r} is in the folder" if single == SINGLE else "is not in the folder"
    pickles = sorted(name for name in file_names if Path(name).suffix in PICKLES)
    shards = sorted(name for name in file_names if name.endswith(".safetensors"))
    if shards:
        message += f"; a single file must have this name, shards need an index (found: {', '.join(map(repr, shards))})"
    elif pickles:
        message += f", only {', '.join(map(repr, pickles))}: pickles are not loaded; convert to safetensors"
    return message
