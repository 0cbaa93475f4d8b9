"""Tensors that say they are on a GPU, and what torch's operations mean for it."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.equal,
    aten.unique_consecutive,
    aten.is_nonzero,
    aten.bincount,
}
"""The host waits for their values, or for a size that depends on values."""


DEVICE = torch.device("cuda", 0)


class GpuTensor(Tensor):
    """A tensor on "cuda:0" whose values lie in `inner`, on the CPU. To torch's C++ it is a meta tensor."""

    inner: Tensor
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, dispatch: Callable[..., Any]) -> "GpuTensor":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )

    def __init__(self, inner: Tensor, dispatch: Callable[..., Any]):
        assert not isinstance(inner, GpuTensor)
        self.inner, self._dispatch = inner, dispatch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, GpuTensor))
        return next(tensors)._dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_values(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_with_values(index), value)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __repr__(self, **kwargs: Any) -> str:
        return f"GpuTensor({self.inner})"


def _with_values(index: Any) -> Any:
    """An index whose lists are the host's tensors: C++ would make them where it takes the indexed one to be."""
    if isinstance(index, tuple):
        return tuple(_with_values(part) for part in index)
    return torch.as_tensor(index) if isinstance(index, list | np.ndarray) else index


def inner_of(value: Any) -> Any:
    """`value` with the CPU's tensors in place of a GPU's."""
    return tree_map_only(GpuTensor, lambda tensor: tensor.inner, value)


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes, in the order in which it returns them."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def is_view(func: Any) -> bool:
    """Whether what an operation returns shares the memory of what it was given."""
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the host has to wait for the GPU in an operation; None where it does not."""
    packet, name = func.overloadpacket, str(func)
    if packet in WAITING:
        return name
    if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
        return f"{name} without output_size"
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        indices = [index for index in args[1] if index is not None]
        fills = packet is not aten.index and args[2].numel() == 1  # becomes masked_fill
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not fills:
            return f"{name} by a mask"
        if any(not isinstance(index, GpuTensor) for index in indices):
            return f"{name} by indices of the host"
    return None


def check_devices(func: Any, tensors: Iterable[Tensor]) -> None:
    """Refuse what mixes devices, as CUDA does: of the host's tensors only numbers go with a GPU's."""
    strangers = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
    assert not any(tensor.is_meta for tensor in strangers), f"{func}: C++ has made a tensor without values"
    strangers = [tensor for tensor in strangers if tensor.dim() > 0]
    if strangers and func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        raise RuntimeError(
            f"{func}: expected all tensors on cuda:0, but found one of {list(strangers[0].shape)} on cpu"
        )
