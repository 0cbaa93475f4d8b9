"""Launches of Triton's kernels on the simulated GPU, and the signatures that they leave."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from tests.simulated_gpu.tensors import GpuTensor, inner_of, tensors_in
from treespec_kernels.aot.launches import Launch

if TYPE_CHECKING:
    from tests.simulated_gpu.device import Gpu

GRID_LIMITS = (2**31 - 1, 65535, 65535)
ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw")
"""By which the interpreter's kernels touch memory; the rest of its ways go through these."""


class Launches:
    """What is launched, and how.

    Attributes:
        backwards: whether the programs of a launch run in the opposite order, the last first.
        signatures: each distinct launch, by its text.
    """

    def __init__(self, gpu: "Gpu"):
        self._gpu, self.backwards = gpu, False
        self.signatures: dict[str, Launch] = {}
        self._order = _Order()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Interpreted functions launch here."""
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        original, builder = interpreter.InterpretedFunction.run, type(interpreter.interpreter_builder)
        place, order = builder.set_grid_idx, self._order
        cuda: Any = importlib.import_module("triton.language").extra.cuda  # not what an import of its name gives

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launch(original, function, args, grid, kwargs)

        def turned(builder: Any, x: int, y: int, z: int) -> None:
            order.next_program()
            at = [size - 1 - i for size, i in zip(builder.grid_dim, (x, y, z), strict=True)]
            place(builder, *(at if self.backwards else (x, y, z)))

        accesses = {name: order.checked(getattr(builder, name)) for name in ACCESSES}
        replaced: dict[Any, dict[str, Any]] = {interpreter.InterpretedFunction: {"run": run}}
        replaced[cuda] = {"gdc_wait": order.wait, "gdc_launch_dependents": order.release}
        replaced[builder] = {"set_grid_idx": turned, "create_inline_asm": _prefetch} | accesses
        with contextlib.ExitStack() as stack:
            for owner, functions in replaced.items():
                stack.enter_context(mock.patch.multiple(owner, **functions))
            yield

    def _launch(self, original: Any, function: Any, args: Any, grid: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if not isinstance(tensor, GpuTensor):
                raise ValueError(f"{function.__name__}: a pointer into {list(tensor.shape)} of the host")
        if self._gpu.current:
            raise ValueError(f"{function.__name__}: launched on cuda:{self._gpu.current}, its tensors lie on cuda:0")
        assert not callable(grid), "a grid that depends on arguments"
        if any(size > most for size, most in zip(grid, GRID_LIMITS, strict=False)):
            raise ValueError(f"{function.__name__}: a grid of {grid}; CUDA has {GRID_LIMITS}")
        launch = Launch.of(function, args, kwargs)
        self.signatures.setdefault(repr(launch), launch)
        if not all(grid):
            return
        given, named = inner_of((args, kwargs))

        def call(*args: Any, **kwargs: Any) -> None:
            with self._order.of(function.__name__, kwargs.get("launch_pdl", False)):
                original(function, *args, grid=grid, warmup=False, **kwargs)

        if self._gpu.capturing is not None:
            self._gpu.capturing.record(call, given, named)
            return
        self._gpu.finish()
        call(*given, **named)


class _Order:
    """What programs do before they wait for the kernel before theirs, where launched programmatically."""

    def __init__(self) -> None:
        self._kernel, self._waited, self._released, self._fault = "", True, True, ""

    @contextlib.contextmanager
    def of(self, kernel: str, pdl: bool) -> Iterator[None]:
        """One launch. Its first program only begins the count."""
        self._kernel, self._waited, self._released, self._fault = kernel * pdl, True, True, ""
        try:
            yield
            self.next_program()
        except Exception as error:  # the interpreter makes its own of what its kernels raise
            if self._fault:
                raise RuntimeError(self._fault) from error
            raise
        finally:
            self._kernel, self._waited, self._released = "", True, True

    def next_program(self) -> None:
        self._require(self._waited and self._released, "a program has not waited, or has let no dependent begin")
        self._waited = self._released = not self._kernel

    def wait(self) -> None:
        self._waited = True

    def release(self) -> None:
        self._require(self._waited, "a program lets dependents begin before it has waited")
        self._released = True

    def checked(self, access: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            self._require(self._waited, f"{access.__name__} before the wait")
            return access(*args, **kwargs)

        return checked

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._fault = f"{self._kernel} is launched programmatically: {otherwise}"
            raise RuntimeError(self._fault)


def _prefetch(builder: Any, asm: str, constraints: str, values: list[Any], kind: Any, pure: bool, pack: int) -> Any:
    """A request of memory in L2, which returns nothing; the kernels have no other inline assembly."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    addresses, sizes = (np.asarray(value.data).astype(np.int64) for value in values)
    if (
        not asm.startswith("cp.async.bulk.prefetch.L2")
        or (addresses % 16).any()
        or (sizes % 16).any()
        or sizes.min() < 1
    ):
        raise RuntimeError(f"{asm}: {addresses} bytes {sizes}; both must be multiples of 16")
    nothing = interpreter.TensorHandle(np.zeros(addresses.shape, dtype=np.int32), interpreter.tl.int32)
    return SimpleNamespace(get_result=lambda index: nothing)
