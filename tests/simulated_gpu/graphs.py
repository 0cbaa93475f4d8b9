"""CUDA graphs of the simulated GPU: what is captured does not run, and a replay knows nothing but what was captured."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.simulated_gpu.tensors import tensors_in


class _Held(NamedTuple):
    """A tensor that a graph reads or writes by address, without keeping it alive."""

    storage: StorageWeakRef
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Held":
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def tensor(self) -> Tensor:
        if self.storage.expired():
            raise RuntimeError(f"a replayed graph uses freed memory of {list(self.size)} {self.dtype}")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Pool:
    """Memory that graphs share. What lies in it is lost as soon as any of them runs again."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def spoil(self) -> None:
        for graph in self.graphs:
            for tensor in graph.inside:
                spoil(tensor)


class Graph:
    """A captured graph."""

    def __init__(self, pool: Pool):
        self.pool, self.calls, self.inside = pool, [], []  # type: tuple[Pool, list[Callable[[], None]], list[Tensor]]
        pool.graphs.append(self)

    def allocate(self, like: Tensor) -> Tensor:
        """Memory of the graph's pool, of the shape of `like`."""
        tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        spoil(tensor)
        self.inside.append(tensor)
        return tensor

    def record(self, call: Callable[..., Any], args: Any, kwargs: Any, results: tuple[Tensor, ...] = ()) -> None:
        """Note a call for replays; what it returns is copied into `results`."""
        held, structure = tree_flatten(self._held((args, kwargs)), is_leaf=_is_held)

        def replay() -> None:
            values = [value.tensor() if isinstance(value, _Held) else value for value in held]
            args, kwargs = tree_unflatten(values, structure)
            returned = call(*args, **kwargs)
            if results:
                for result, value in zip(results, tensors_in(returned), strict=True):
                    result.copy_(value)

        self.calls.append(replay)

    def replay(self) -> None:
        self.pool.spoil()
        for call in self.calls:
            call()

    def _held(self, values: Any) -> Any:
        own = {tensor.untyped_storage().data_ptr() for tensor in self.inside}

        def held(tensor: Tensor) -> Tensor | _Held:
            return tensor if tensor.untyped_storage().data_ptr() in own else _Held.of(tensor)

        return tree_map_only(Tensor, held, values)


def _is_held(value: Any) -> bool:
    return isinstance(value, _Held)


def spoil(tensor: Tensor) -> None:
    """Fill memory with what would be noticed."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
