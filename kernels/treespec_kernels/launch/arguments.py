"""Checking of an op's tensors: one table of shapes, layouts and dtypes per op."""

from collections.abc import Mapping
from functools import lru_cache

import torch

Argument = tuple[torch.Tensor | None, str, "torch.dtype | tuple[torch.dtype, ...]"]


def check_arguments(fixed: Mapping[str, int] | None = None, /, **arguments: Argument) -> dict[str, int]:
    """Check shapes, dtypes and devices, and return the sizes by name. Values are never read, so there is no sync.

    Args:
        fixed: sizes known in advance, by name.
        arguments: by name, a tensor (None if absent), its shape and its valid dtypes. A shape consists of numbers,
            names, which stand for one size in all shapes, and "_" for any size. A name with "+" must not be 0. A first
            name in parentheses may be absent: "(groups) rows in+". The last dimension must be contiguous, and the whole
            tensor if its shape is in brackets: "[rows hidden]".

    Raises:
        ValueError: a tensor does not fit, or is on another device than the first.
    """
    sizes = dict(fixed or {})
    first, device = "", None
    for name, (tensor, shape, dtypes) in arguments.items():
        if tensor is None:
            continue
        optional, tokens = _parsed(shape)
        size = tensor.shape
        dims = tokens[1:] if optional and len(size) == len(tokens) - 1 else tokens
        fits = len(size) == len(dims)
        for (token, number, is_positive), n in zip(dims, size, strict=False) if fits else ():
            expected = sizes.setdefault(token, n) if number is None and token != "_" else number
            fits = fits and (expected is None or n == expected) and (n > 0 or not is_positive)
        if not fits:
            raise ValueError(f"{name} has shape {list(size)}; expected {_described(dims, sizes)}")
        valid = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in valid:
            raise ValueError(f"{name} has dtype {tensor.dtype}; convert it to {' or '.join(map(str, valid))}")
        if device is None:
            first, device = name, tensor.device
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and {first} on {device}; move it there")
        if not tensor.is_contiguous() and (shape[0] == "[" or (size[-1] > 1 and tensor.stride(-1) != 1)):
            raise ValueError(f"{name} has strides {list(tensor.stride())} for shape {list(size)}; make it contiguous")
    return sizes


@lru_cache(maxsize=256)
def _parsed(shape: str) -> tuple[bool, list[tuple[str, int | None, bool]]]:
    words = shape.strip("[]").split()
    tokens = [word.strip("()+") for word in words]
    numbers = [int(token) if token.isdigit() else None for token in tokens]
    positive = ["+" in word for word in words]
    return "(" in shape, list(zip(tokens, numbers, positive, strict=True))


def _described(tokens: list[tuple[str, int | None, bool]], sizes: dict[str, int]) -> str:
    shown = [token if token not in sizes else f"{token} {sizes[token]}" for token, _, _ in tokens]
    needed = [token for token, _, is_positive in tokens if is_positive]
    return f"[{', '.join(shown)}]" + (f", {' and '.join(needed)} 1 or more" if needed else "")
