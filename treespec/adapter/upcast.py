"""Dispatch mode that runs model code in a wider floating dtype than its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
CHUNK = 1 << 22  # weight elements upcast at once, to bound memory


class UpcastMode(TorchDispatchMode):
    """Dispatch mode that upcasts computations in narrower dtypes to `dtype`, in this thread only.

    Operations receive upcast copies of their operands, and dtype arguments are replaced. A bfloat16 model thus runs
    with float32 or float64 rounding, without a wider copy of the model and without changes visible to other threads.
    """

    def __init__(self, dtype: torch.dtype, chunk: int = CHUNK):
        super().__init__()
        self.dtype, self._chunk, self._paused = dtype, chunk, False
        self._narrow = {torch.bfloat16, torch.float16} | ({torch.float32} if dtype == torch.float64 else set())

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is _aten.view.dtype:
            raise NotImplementedError(f"{func} reinterprets bits and cannot be upcast")
        if func is _aten.embedding.default:  # a gather does not round, and the table may be large
            return self._wide(func(*args, **kwargs))
        if func is _aten.linear.default and args[1].numel() > self._chunk and args[1].dtype in self._narrow:
            return self._linear(*args, **kwargs)
        if func._schema.is_mutable:
            self._check_written(func, args, kwargs)
        # Views of weights stay narrow until they are used in a computation; `to` is a view too.
        convert = self._wide_dtype if func.is_view and func.overloadpacket is not _aten.to else self._wide
        return func(*tree_map(convert, args), **tree_map(convert, kwargs))

    def _wide_dtype(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in self._narrow else value

    def _wide(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.dtype in self._narrow else value
        return self._wide_dtype(value)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, rows = self._wide(x), max(self._chunk // weight.shape[1], 1)
        out = x.new_empty(*x.shape[:-1], len(weight))
        for first in range(0, len(weight), rows):
            out[..., first : first + rows] = x @ self._wide(weight[first : first + rows]).t()
        return out if bias is None else out + self._wide(bias)

    def _check_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reject in-place writes to a narrow tensor, which would go to its upcast copy and be lost."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and value.dtype in self._narrow:
                raise NotImplementedError(f"{func} writes to a {value.dtype} tensor in place")
        if any(isinstance(value, Tensor) and value.dtype in self._narrow for value in kwargs.values()):
            raise NotImplementedError(f"{func} writes to a tensor of another dtype")
