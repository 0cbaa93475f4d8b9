"""Launches of kernels: recorded without a GPU, and compiled with the specialisation of Triton's launcher."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch

from treespec_kernels.launch.triton_launch import SHARED_BYTES, has_pdl, is_interpreted, require_triton
from treespec_kernels.ops import OPS, cases_of
from treespec_kernels.ops.op import Case
from treespec_kernels.ops.shapes import AOT_FORMS, KernelShape, Setting

PDL = "programmatic_launch"
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")
_NODES = 64  # nodes of the recorded passes


@dataclass(frozen=True)
class Pointer:
    """A tensor from the launcher's view: its dtype, and its offset in bytes from a multiple of 16."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return 512 + self.offset


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    module: str  # module of the `triton.jit` function
    kernel: str
    arguments: dict[str, Any]  # tensors are `Pointer`s
    options: dict[str, Any]  # num_warps, num_stages, enable_fp_fusion, launch_pdl
    case: str = ""  # case of the op that made the launch
    # Launch of the kernel's first tile, if this launch has a larger tile that must compute the same bits
    first: "Launch | None" = None

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Describe a call of a `triton.jit` function, interpreted or not."""
        named = dict(zip(function.arg_names, args, strict=False)) | kwargs
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        arguments = {name: _described(value) for name, value in named.items()}
        return cls(function.fn.__module__, function.fn.__name__, arguments, options)

    @property
    def function(self) -> Any:
        return getattr(importlib.import_module(self.module), self.kernel)

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr arguments (capital letters), and absent tensors and numbers (None)."""
        return {name: value for name, value in self.arguments.items() if name.isupper() or value is None}

    @property
    def binary(self) -> Self:
        """The launch with numbers replaced by representatives of their specialisation: 1, multiples of 16, others."""
        loose = {parameter.name for parameter in self.function.params if parameter.do_not_specialize}

        def standing_for(name: str, value: Any) -> Any:
            if name.isupper() or isinstance(value, bool) or not isinstance(value, int | float):
                return replace(value, offset=0) if isinstance(value, Pointer) and name in loose else value
            if isinstance(value, float):
                return 0.5
            wide = 1 << 40 if abs(value) >> 31 else 0
            return wide + (3 if name in loose else 1 if value == 1 and not wide else 16 if value % 16 == 0 else 3)

        arguments = {name: standing_for(name, value) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments, case="", first=None)

    def compile(self, target: str) -> Any:
        """Compile the kernel, or load it from Triton's cache, and return Triton's `CompiledKernel`."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        number = list(SHARED_BYTES).index(target)
        gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
        absent = SimpleNamespace(
            get_current_target=lambda: gpu,
            get_current_device=lambda: 1000 + number,  # Triton caches binders by device
            get_current_stream=lambda device: 0,
        )
        driver.set_active(absent)
        try:
            return self.function.warmup(**self.arguments, **self.options, grid=(1,))
        finally:
            driver.set_active(None)  # restores the default driver


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        offset = value.storage_offset() * value.element_size()  # allocations start at a multiple of 512
        return Pointer(value.dtype, int(offset) % 16)
    return getattr(value, "value", value)  # unwraps a constexpr


def launches_of(op: str, shape: KernelShape, target: str) -> list[Launch]:
    """Return the distinct launches of an op for a model's shape, in the target's default configurations.

    `PDL` stands for the launches of all ops with programmatic dependent launch.
    """
    require_triton("aot")
    if is_interpreted():
        raise ValueError("aot: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    pdl = op == PDL
    launches: dict[str, Launch] = {}
    for name in (OPS if has_pdl(target) else ()) if pdl else [op]:
        is_open = name == "quantized_row_linear" and shape.quantized is None and not pdl
        for form in AOT_FORMS if is_open else (shape.quantized,):
            setting = Setting(replace(shape, quantized=form), nodes=_NODES, requests=2, compiled_for=target)
            for case in cases_of(name, setting):
                if not pdl or "pdl" in inspect.signature(case.entry.run).parameters:
                    for launch in launches_of_case(case, case.default, **({"pdl": True} if pdl else {})):
                        launches.setdefault(repr(launch.binary), launch)
                case.release()
    return list(launches.values())


def launches_of_case(case: Case, config: Any, **options: Any) -> Iterator[Launch]:
    """Yield the launches of a case on "meta" with a configuration, once for each of its tiles."""
    tiles = [config.with_tile(tile) for tile in config.tiles] if getattr(config, "larger", ()) else [config]
    firsts: list[Launch] = []
    for tile in tiles:
        tile_launches = recorded(partial(case.run, tile, **options))
        for launch, first in zip(tile_launches, firsts or tile_launches, strict=True):
            is_larger = launch.constants.get("BLOCK_M") != first.constants.get("BLOCK_M")
            yield replace(launch, case=f"{case.label}; {case.load}", first=first if is_larger else None)
        firsts = firsts or tile_launches


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """Return the launches of a call over tensors on "meta", without running them."""
    import triton

    launches: list[Launch] = []
    run = triton.JITFunction.run

    def record(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch.of(function, args, kwargs))

    triton.JITFunction.run = record
    try:
        call()
    finally:
        triton.JITFunction.run = run
    return launches
