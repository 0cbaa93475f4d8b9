"""The simulated GPU: torch.cuda's functions, torch's operations and Triton's launches, in place of the real ones."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.simulated_gpu.captures import Captures, CudaGraph, Stream
from tests.simulated_gpu.graphs import Graph, Pool
from tests.simulated_gpu.launches import Launches
from tests.simulated_gpu.tensors import (
    DEVICE,
    GpuTensor,
    aten,
    check_devices,
    inner_of,
    is_view,
    tensors_in,
    waits,
    written,
)

MEMORY = 4 << 30


class Gpu:
    """A GPU of one stream.

    It refuses, as CUDA does, operations over tensors of both devices, replays that use freed memory, and in a capture
    whatever makes the host wait, copies of pageable memory, and by default memory that other threads take.

    Memory of a graph pool is spoilt when any of its graphs runs; copies of pinned memory, and replays, happen only when
    something waits for them. What torch leaves behind of a capture that fails, it leaves behind as well.

    Attributes:
        waits: the reasons why the host waited for a value, with the line that asked for it.
        launches: of Triton's kernels.
        replays: how many graphs were replayed.
        captures: streams, and the capture that goes on.
        current: the number of the GPU that kernels are launched on; this one is 0, another one is only a number.
        free: bytes of its memory that count as free.
        properties: of the device, as torch has them.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.replays = self.current = 0
        self.free = MEMORY
        sizes = {"total_memory": MEMORY, "multi_processor_count": 132, "L2_cache_size": 50 << 20}
        self.properties = SimpleNamespace(name="Simulated GPU", major=9, minor=0, **sizes)
        self.launches = Launches(self)
        self.captures = Captures(self)
        self._late: list[Callable[[], None]] = []
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self.mode = _Mode(self)

    @property
    def capturing(self) -> Graph | None:
        """The graph that this thread captures."""
        return self.captures.graph

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """torch.cuda.device."""
        before, self.current = self.current, _indexed(device).index
        try:
            yield
        finally:
            self.current = before

    def put(self, inner: Tensor) -> GpuTensor:
        """A tensor of the CPU as one of the GPU, of the same memory."""
        return GpuTensor(inner, self.dispatch)

    def finish(self) -> None:
        """Do what is still to be done."""
        late, self._late = self._late, []
        with _disable_current_modes():  # it is given tensors of the host alone
            for call in late:
                call()

    def later(self, call: Callable[[], None]) -> None:
        self._late.append(call)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of torch's operations."""
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self.mode:
                return func.decompose(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # one kind of tensors, wherever they meet again
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        # Numbers beside a GPU's tensors C++ itself puts where it takes those to be.
        wants_gpu = device is not None and _is_gpu(device)
        tensors = tensors_in((args, kwargs))
        on_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        if not (wants_gpu or on_gpu):
            return self._on_host(func, args, kwargs)
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            return self._copy(func, args, kwargs)
        reason = waits(func, args, kwargs)
        if reason is not None:
            self._wait(reason)
        check_devices(func, tensors)
        if wants_gpu:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        return self._run(func, args, kwargs)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket is aten.is_pinned:
            return self.is_pinned(args[0])
        pins = kwargs.pop("pin_memory", False) or func.overloadpacket is aten._pin_memory
        made = args[0].clone() if func.overloadpacket is aten._pin_memory else func(*args, **kwargs)
        if pins:
            self._pinned[made.untyped_storage().data_ptr()] = made.untyped_storage()
        return made

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copies within the GPU, to it and from it."""
        if func.overloadpacket is aten.copy_:
            target, source = args[:2]
            to_gpu, late = isinstance(target, GpuTensor), (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            host = source if to_gpu else target
        else:
            host = source = args[0]
            device = kwargs.pop("device", None)
            to_gpu, late = _is_gpu(device or source.device), kwargs.get("non_blocking", False)
            kwargs.pop("pin_memory", None)
        if to_gpu and isinstance(source, GpuTensor):
            return self._run(func, args, kwargs)
        fills = source.dim() == 0 and to_gpu  # a number: an argument of a kernel
        if func.overloadpacket is aten.copy_ and (fills or source.numel() == 0):
            return self._run(func, args, kwargs, leaves=not to_gpu)
        pinned = self.is_pinned(host)
        if not (pinned and late and func.overloadpacket is aten.copy_):
            if not to_gpu:
                self._wait(f"{func} to the host")
            elif self.capturing is not None:
                raise self.captures.forbid(f"{func} of pageable memory cannot be captured")
            return self._run(func, args, kwargs, leaves=not to_gpu)
        if self.capturing is not None:
            return self._run(func, args, kwargs)
        inner = inner_of(args)
        self.later(lambda: func(*inner, **kwargs))
        return args[0]

    def _wait(self, reason: str) -> None:
        if self.capturing is not None:
            raise self.captures.forbid(f"{reason}: the host cannot wait while a graph is captured")
        self.waits.append(f"{reason} at {_caller()}")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: bool = False) -> Any:
        """`leaves`: whether the result is the host's."""
        inner_args, inner_kwargs = inner_of((args, kwargs))
        changed = written(func, args, kwargs)
        if not changed and not is_view(func):
            self.captures.check_memory()
        if self.capturing is not None and not is_view(func):
            results = self._record(self.capturing, func, inner_args, inner_kwargs, bool(changed))
        else:
            self.finish()
            results = func(*inner_args, **inner_kwargs)
        if leaves:
            return args[0] if changed else results
        known = {id(inner_of(tensor)): tensor for tensor in changed}
        if changed and self.capturing is not None:
            return changed[0] if len(changed) == 1 else tuple(changed)
        return tree_map_only(
            Tensor, lambda result: known[id(result)] if id(result) in known else self.put(result), results
        )

    def _record(self, graph: Graph, func: Any, args: Any, kwargs: Any, writes: bool) -> Any:
        if writes:
            graph.record(func, args, kwargs)
            return None
        shapes = func(*_meta(args), **(_meta(kwargs) | ({} if tensors_in((args, kwargs)) else {"device": "meta"})))
        results = tree_map_only(Tensor, graph.allocate, shapes)
        graph.record(func, args, kwargs, tuple(tensors_in(results)))
        return results


class _Mode(TorchDispatchMode):
    """Sends every operation to the GPU, which decides whether it is the GPU's."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.dispatch(func, args, kwargs or {})


class _Generator(torch.Generator):
    """Of random numbers on any device."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu"):
        self._device = _indexed(device) if torch.device(device).type == "cuda" else torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


class _Event:
    def __init__(self, gpu: Gpu, **options: bool):
        self._gpu = gpu

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        self._gpu.finish()

    def elapsed_time(self, end: "_Event") -> float:
        return 1.0


def _bound(kind: type[Any], gpu: Gpu) -> type[Any]:
    """A class whose objects belong to `gpu`; modules that are imported meanwhile name it in annotations."""
    return type(kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, gpu)})


@contextlib.contextmanager
def simulated_gpu() -> Iterator[Gpu]:
    """A process with a GPU, in Triton's interpreter. Engines of it must not outlive the context."""
    gpu = Gpu()
    torch._C._ensureCUDADeviceGuardSet()
    properties = gpu.properties
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: gpu.current,
        "device": gpu.device,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (gpu.free, MEMORY),
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "empty_cache": gpu.captures.check_cache,
        "synchronize": lambda device=None: gpu.finish(),
        "Event": _bound(_Event, gpu),
        "Stream": _bound(Stream, gpu),
        "current_stream": gpu.captures.current_stream,
        "set_stream": gpu.captures.set_stream,
        "stream": gpu.captures.on,
        "CUDAGraph": _bound(CudaGraph, gpu),
        "graph_pool_handle": Pool,
        "graph": gpu.captures.capture,
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }
    allocator = {"_cuda_endAllocateToPool": gpu.captures.end_allocation, "_cuda_releasePool": lambda device, pool: None}
    factories = {name: _through_host(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    with contextlib.ExitStack() as stack:
        for owner, functions in (
            (torch.cuda, replaced),
            (torch._C, allocator),
            (torch, {"Generator": _Generator} | factories),
            (Tensor, {"to": _with_index(Tensor.to)}),
        ):
            stack.enter_context(mock.patch.multiple(owner, **functions))
        stack.enter_context(gpu.launches.patched())
        stack.enter_context(gpu.mode)
        yield gpu
        gpu.finish()


def _through_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory that copies the host's values: C++ would look for the device itself."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        tensor = make(data, **options)
        return tensor if device is None else tensor.to(device)

    return made


def _with_index(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.to`, which asks C++ for the number of a device that has none."""

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tree_map_only((str, torch.device), _indexed, (args, kwargs))
        return to(tensor, *args, **kwargs)

    return moved


def _indexed(device: Any) -> Any:
    return DEVICE if torch.device(device) == torch.device("cuda") else device


def _is_gpu(device: Any) -> bool:
    """Where C++ itself names a tensor's device, a GPU's is meta."""
    return torch.device(device).type in ("cuda", "meta")


def _meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), values)


def _caller() -> str:
    """The innermost line of the product that led here."""
    frames = [frame for frame in traceback.extract_stack() if "/tests/" not in frame.filename]
    ours = [frame for frame in frames if "/treespec" in frame.filename]
    return f"{ours[-1].filename.rsplit('/', 2)[-1]}:{ours[-1].lineno}" if ours else "a test"
