"""What the options of an engine stand for: folders, device, dtype, implementations, memory."""

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.cache import pages_for
from treespec.config import ModelConfig, SpecConfig
from treespec.drafters.base import Drafter, check_drafter, check_names
from treespec.errors import CacheMemoryError, ConfigError, KernelError, ModelError
from treespec.models.attention import ATTENTIONS
from treespec.models.compiled import check_compiled
from treespec.startup.load_models import libraries_folder
from treespec.startup.memory import free_memory
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.cpu.lookup_cpu import lookup_library
from treespec_kernels.linear.linear import LinearImpl, onednn_available
from treespec_weights import HubError, default_folder, default_names, fetch, is_hub_id

logger = logging.getLogger("treespec")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # as in vLLM and torch
LINEARS = ("onednn", "torch", "triton")
FIXED_ROWS = 64  # rows of every pass where the linear layers are not row-invariant


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """The folder of a model: the embedded target, a folder, or a hub id's files (cached, or fetched where online)."""
    if model is None:
        return default_folder("target")
    folder = Path(os.path.expanduser(model))  # "~nobody" stays as it is
    if folder.exists() or "/" not in str(model) or not is_hub_id(str(model)):
        return folder  # a missing folder is refused by the loader, with its name
    try:
        return fetch(str(model))
    except HubError as error:
        raise ModelError(f"{str(model)!r} is no folder here, and {error}") from error


def resolve_drafts(
    model: object, drafts: Sequence[Any] | None
) -> tuple[list[tuple[str, Path | nn.Module]], list[Drafter]]:
    """Names of the SSMs and where they are, and the drafter objects, that `drafts` stands for."""
    if isinstance(drafts, str | os.PathLike):
        raise ConfigError(f"drafts={drafts!r}; valid: a list, such as [{str(drafts)!r}]")
    if drafts is not None and not isinstance(drafts, Sequence):
        raise ConfigError(f"drafts={drafts!r}; valid: None, or a list of folders, hub ids, models or Drafter objects")
    if drafts is None:
        names = [name for name in default_names() if name.startswith("ssm-")] if model is None else []
        return [(name, default_folder(name)) for name in names], []
    places: list[tuple[str, Path | nn.Module]] = []
    objects: list[Drafter] = []

    def add(name: str, place: Path | nn.Module) -> None:
        taken = sum(1 for known, _ in places if known == name or known.startswith(f"{name}#"))
        places.append((name if not taken else f"{name}#{taken + 1}", place))

    for draft in drafts:
        if isinstance(draft, str | os.PathLike):
            folder = _resolve_draft(draft)
            add(folder.resolve().name, folder)
        elif isinstance(draft, nn.Module):
            add(type(draft).__name__, draft)
        else:
            check_drafter(draft)
            objects.append(draft)
    check_names(objects, [name for name, _ in places])
    return places, objects


def _resolve_draft(draft: str | os.PathLike[str]) -> Path:
    """The folder of a draft: an embedded SSM by its name, or as `resolve_model`."""
    name = os.fspath(draft)
    if not Path(name).exists():
        if name in default_names():
            return default_folder(name)
        if re.fullmatch(r"ssm[-_ ]?\d*", name, re.IGNORECASE):
            valid = [repr(each) for each in default_names() if each.startswith("ssm-")]
            raise FileNotFoundError(
                f"no embedded draft {name!r}; valid: {', '.join(valid) or 'none, none is installed'}"
            )
    return resolve_model(draft)


def resolve_folders(model: object, drafts: Sequence[Any] | None) -> list[tuple[str, Path]]:
    """The SSMs of `resolve_drafts` that are on disk."""
    return [(name, place) for name, place in resolve_drafts(model, drafts)[0] if isinstance(place, Path)]


def resolve_device(device: str | torch.device) -> torch.device:
    try:
        chosen = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
        )
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={device!r}; valid: "auto", "cpu", "cuda", "cuda:1"') from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f'device={device!r} is not supported; valid: "auto", "cpu", "cuda"')
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device={device!r}, but torch sees no GPU here; use device="cpu" or "auto"')
    if chosen.type == "cpu":
        return chosen
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device={device!r}, but the last of the {count} that torch sees here is cuda:{count - 1}; "
            "CUDA_VISIBLE_DEVICES says which"
        )
    return torch.device("cuda", index)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Within it this thread launches kernels on `device`: otherwise each thread has a GPU of its own choice."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def resolve_dtype(dtype: str | torch.dtype, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """auto = the checkpoint's; on a CPU without bf16 instructions float32, said once."""
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype == "auto":
        chosen = stored
        if device.type == "cpu" and stored != torch.float32 and not onednn_available(stored):
            logger.warning("%s has no fast %s here; computing in float32", device, stored)
            chosen = torch.float32
    elif (name := _DTYPE_ALIASES.get(dtype, dtype)) in DTYPES:
        chosen = DTYPES[name]
    else:
        raise ConfigError(f'dtype={dtype!r}; valid: "auto", {", ".join(map(repr, DTYPES))} or a torch dtype')
    if chosen not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r}; valid: {', '.join(DTYPES)}")
    return chosen


def resolve_max_model_len(
    asked: int | None,
    target: ModelConfig | AdapterConfig,
    bytes_per_page: int,
    seqs: int,
    scratch: int,
    device: torch.device,
    held: int = 0,
) -> int:
    """None = the smaller of the config's and what half of the free memory holds for `seqs` requests.

    `held`: bytes that are to be taken for other things. Raises ConfigError where the cache does not fit into memory.
    """
    free = free_memory(device) - held
    if free <= 0:
        raise CacheMemoryError(
            f"weights and captured rounds need {held / 2**30:.1f} GiB, and {(free + held) / 2**30:.1f} GiB of {device} "
            "are free; take a smaller model, or lower max_num_seqs, max_model_len or nodes"
        )
    if asked is not None:
        if not 2 <= asked <= target.max_positions:
            raise ConfigError(f"max_model_len={asked!r}; valid: an int from 2 to the model's {target.max_positions}")
        needed = seqs * pages_for(asked + scratch) * bytes_per_page
        if needed > free:
            raise CacheMemoryError(
                f"max_num_seqs={seqs} requests of max_model_len={asked} need {needed / 2**30:.1f} GiB of cache, and "
                f"{free / 2**30:.1f} GiB are free; lower one of them"
            )
        return asked
    holds = free // 2 // bytes_per_page // seqs * PAGE_SIZE - scratch
    if holds < 2:
        raise ConfigError(f"half of the free memory holds no context for max_num_seqs={seqs}; lower max_num_seqs")
    length = min(target.max_positions, holds)
    logger.info("max_model_len=%d (the model's %d, memory for %d)", length, target.max_positions, holds)
    return length


def resolve_compile(
    compile: bool | str,
    models: Sequence[ModelConfig | Source],
    attention: str,
    linear: str,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether passes run in compiled libraries, which are built now where they are not yet.

    Raises:
        KernelError, OSError: they are asked for and cannot be, or have no place. "auto" goes without, and the log says
            why.
    """
    if compile is False or (compile == "auto" and device.type != "cpu"):
        return False
    try:
        for name, asked in (("attention", attention), ("linear", linear)):
            if asked != "auto":
                raise KernelError(f"{name}={asked!r}, but compile=True has its own; leave it at 'auto'")
        natives = []
        for model in models:
            if isinstance(model, Source):
                raise KernelError(f"compile=True is for native families; {model.name} runs through transformers' code")
            natives.append(model)
        check_compiled(natives, dtype, device, libraries_folder())
    except (KernelError, OSError) as error:
        if compile is True:
            raise
        logger.info("passes are not compiled: %s", error)
        return False
    return True


def resolve_lookup(compile: bool | str) -> ctypes.CDLL | None:
    """The library that searches texts for prompt lookup; None where it cannot be built: numpy finds the same, but
    more slowly."""
    if compile is False:
        return None
    try:
        return lookup_library(find_compiler(), libraries_folder())
    except (CompileError, OSError) as error:
        logger.info("prompt lookup searches in numpy: %s", error)
        return None


def resolve_linear(
    linear: str, attention: str, dtype: torch.dtype, device: torch.device, exact: bool, spec: SpecConfig, compile: bool
) -> tuple[LinearImpl | Literal["compiled", "triton"], int | None]:
    """The implementation of linear layers, and the fixed number of rows of every pass where exactness needs one."""
    if linear not in ("auto", *LINEARS):
        raise KernelError(f"linear={linear!r}; valid: 'auto', {', '.join(map(repr, LINEARS))}")
    if compile:
        return "compiled", None
    available = device.type == "cpu" and onednn_available(dtype)
    if linear == "onednn" and not available:
        raise KernelError(f"linear='onednn' needs a CPU with fast {dtype}, the device is {device}; use linear='auto'")
    if linear == "triton" and attention != "triton":
        raise KernelError(f"linear='triton' goes with attention='triton', not with {attention!r}")
    if linear == "triton" or (linear == "auto" and device.type == "cuda"):
        return "triton", None
    if linear in ("auto", "onednn") and available:
        return "onednn", None
    if not exact:
        return "torch", None
    rows = max(FIXED_ROWS, spec.max_nodes)
    logger.warning("%s on %s has no row-invariant linear layers: every pass has %d rows", dtype, device, rows)
    return "torch", rows


def resolve_attention(attention: str, device: torch.device) -> str:
    """The name of an implementation of tree attention."""
    if attention not in ("auto", *ATTENTIONS):
        raise KernelError(f"attention={attention!r}; valid: 'auto', {', '.join(map(repr, ATTENTIONS))}")
    return attention if attention != "auto" else "cpu-packed" if device.type == "cpu" else "triton"
