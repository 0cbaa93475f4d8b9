"""Resolve the device and the dtype of an engine."""

import logging

import torch

from treespec.errors import ConfigError
from treespec_kernels.linear.linear import onednn_available

logger = logging.getLogger("treespec")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # as in vLLM and torch


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device with its index. "auto" is this thread's current GPU, or the CPU. Raises ConfigError."""
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
            "CUDA_VISIBLE_DEVICES selects them"
        )
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype, stored: torch.dtype) -> torch.dtype:
    """Return the dtype of passes; "auto" is the stored one. Raises ConfigError."""
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype == "auto":
        chosen = stored
    elif (name := _DTYPE_ALIASES.get(dtype, dtype)) in DTYPES:
        chosen = DTYPES[name]
    else:
        raise ConfigError(f'dtype={dtype!r}; valid: "auto", {", ".join(map(repr, DTYPES))} or a torch dtype')
    if chosen not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r}; valid: {', '.join(DTYPES)}")
    return chosen


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's passes in a dtype are slower than in float32: bfloat16 and float16 on some CPUs."""
    return device.type == "cpu" and dtype != torch.float32 and not onednn_available(dtype)
