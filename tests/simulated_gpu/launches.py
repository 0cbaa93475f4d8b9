"""Launches of Triton's kernels on the simulated GPU, and the signatures that they leave."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor

from tests.simulated_gpu.tensors import GpuTensor, inner_of, tensors_in

if TYPE_CHECKING:
    from tests.simulated_gpu.device import Gpu

GRID_LIMITS = (2**31 - 1, 65535, 65535)
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")


class Launches:
    """What is launched, and how.

    Args:
        gpu: whose launches.

    Attributes:
        backwards: whether the programs of a launch run in the opposite order, the last first.
        signatures: each distinct one as (module, kernel, arguments by name, options): a tensor is ("tensor", dtype,
            bytes behind a multiple of 16), anything else itself.
    """

    def __init__(self, gpu: "Gpu"):
        self._gpu, self.backwards = gpu, False
        self.signatures: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {}

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Interpreted functions launch here."""
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        original, builder = interpreter.InterpretedFunction.run, type(interpreter.interpreter_builder)
        place = builder.set_grid_idx

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launch(original, function, args, grid, kwargs)

        def turned(builder: Any, x: int, y: int, z: int) -> None:
            at = [size - 1 - i for size, i in zip(builder.grid_dim, (x, y, z), strict=True)]
            place(builder, *(at if self.backwards else (x, y, z)))

        with (
            mock.patch.object(interpreter.InterpretedFunction, "run", run),
            mock.patch.object(builder, "set_grid_idx", turned),
        ):
            yield

    def _launch(self, original: Any, function: Any, args: Any, grid: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if not isinstance(tensor, GpuTensor):
                raise ValueError(f"{function.__name__}: a pointer into {list(tensor.shape)} of the host")
        assert not callable(grid), "a grid that depends on arguments"
        if any(size > most for size, most in zip(grid, GRID_LIMITS, strict=False)):
            raise ValueError(f"{function.__name__}: a grid of {grid}; CUDA has {GRID_LIMITS}")
        self._note(function, args, kwargs)
        if not all(grid):
            return
        given, named = inner_of((args, kwargs))

        def call(*args: Any, **kwargs: Any) -> None:
            original(function, *args, grid=grid, warmup=False, **kwargs)

        if self._gpu.capturing is not None:
            self._gpu.capturing.record(call, given, named)
            return
        self._gpu.finish()
        call(*given, **named)

    def _note(self, function: Any, args: Any, kwargs: Any) -> None:
        named = dict(zip(function.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name in OPTIONS}
        named |= {name: value for name, value in kwargs.items() if name not in OPTIONS}
        described = {name: _described(value) for name, value in named.items()}
        signature = (function.fn.__module__, function.__name__, described, options)
        self.signatures.setdefault(repr(signature), signature)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        offset = value.storage_offset() * value.element_size()  # an allocation begins at a multiple of 512
        return ("tensor", str(value.dtype).removeprefix("torch."), offset % 16)
    return value
