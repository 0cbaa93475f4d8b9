"""Launches of kernels: recorded without a GPU, and compiled for a target as Triton's launcher specialises them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from treespec_kernels.launch.triton_launch import SHARED_BYTES, has_pdl, is_interpreted, require_triton
from treespec_kernels.ops import OPS, cases_of
from treespec_kernels.ops.op import Case
from treespec_kernels.ops.shapes import AOT_FORMS, KernelShape, Setting
from treespec_kernels.tuning.tuned import label_of

PDL = "programmatic_launch"
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")
_NODES = 64  # of the recorded passes


@dataclass(frozen=True)
class Pointer:
    """A tensor as the launcher sees it: its dtype ("bfloat16"), and its distance in bytes from a multiple of 16."""

    dtype_name: str
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return 512 + self.offset


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Args:
        module, kernel: module and name of the `triton.jit` function.
        arguments: arguments by name; tensors are `Pointer`s.
        options: num_warps, num_stages, enable_fp_fusion, launch_pdl.
        case: the op's case that made the launch.
        first: the launch of the kernel's first tile, if this one has a larger tile that must give a row the same bits.
    """

    module: str
    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    case: str = ""
    first: Launch | None = None

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
        """Describe a call of a `triton.jit` function, interpreted or not."""
        named = dict(zip(function.arg_names, args, strict=False)) | kwargs
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        return cls(
            function.fn.__module__,
            function.fn.__name__,
            {name: _described(value) for name, value in named.items()},
            options,
        )

    @property
    def function(self) -> Any:
        return getattr(importlib.import_module(self.module), self.kernel)

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr arguments, which have capital letters."""
        return {name: value for name, value in self.arguments.items() if name.isupper()}

    @property
    def binary(self) -> Launch:
        """The launch with numbers that stand for all those that Triton compiles alike: 1, multiples of 16, others."""
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
        """Compile the kernel, or load it from Triton's cache, and return Triton's `CompiledKernel`.

        Raises:
            ValueError: the target is unknown. Triton's own errors pass through.
        """
        check_target(target)
        with _target(target):
            return self.function.warmup(**self.arguments, **self.options, grid=(1,))


def check_target(target: str) -> None:
    """Raise ValueError for an unknown target."""
    if target not in SHARED_BYTES:
        raise ValueError(f"aot: target {target!r} is not known; use one of {', '.join(SHARED_BYTES)}")


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        offset = value.storage_offset() * value.element_size()  # an allocation begins at a multiple of 512
        return Pointer(str(value.dtype).removeprefix("torch."), offset % 16)
    return getattr(value, "value", value)  # of a constexpr


class _Driver:
    """Driver of an absent GPU. Triton keeps binders by device, so every target has its own."""

    def __init__(self, target: str):
        self._target = target

    def get_current_target(self) -> Any:
        return gpu_target(self._target)

    def get_current_device(self) -> int:
        return 1000 + list(SHARED_BYTES).index(self._target)

    def get_current_stream(self, device: int) -> int:
        return 0


def gpu_target(target: str) -> Any:
    """Return Triton's `GPUTarget` of a target name."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)


@contextlib.contextmanager
def _target(target: str) -> Iterator[None]:
    from triton.runtime import driver

    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver.set_active(None)  # the default one


# --- launches of the ops


def ops() -> tuple[str, ...]:
    """Return the ops whose launches are compiled. `PDL` stands for all launches with programmatic dependent launch."""
    return tuple(sorted(OPS))


def launches_of(op: str, shape: KernelShape, target: str) -> list[Launch]:
    """Return the distinct launches of an op for a model's shape, in the target's default configurations.

    Raises:
        ValueError: the op has no kernels, or triton is not installed or interprets its kernels.
    """
    require_triton("aot")
    if op not in OPS:
        raise ValueError(f"aot: op {op!r} has no kernels; use one of {', '.join(ops())}")
    if is_interpreted():
        raise ValueError("aot: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    pdl = op == PDL
    names = [name for name in ops() if _takes_pdl(OPS[name].run) and has_pdl(target)] if pdl else [op]
    launches: dict[str, Launch] = {}
    for name in names:
        is_open = name == "quantized_row_linear" and shape.quantized is None and not pdl
        for form in AOT_FORMS if is_open else (shape.quantized,):
            own = replace(shape, quantized=form)
            setting = Setting(own, torch.device("meta"), nodes=_NODES, requests=2, compiled_for=target)
            for case in cases_of(name, setting):
                if pdl and not _takes_pdl(case.entry.run):
                    continue
                for launch in _launches_of(case, pdl):
                    launches.setdefault(repr(launch.binary), launch)
                case.release()
    return list(launches.values())


def _takes_pdl(run: Callable[..., Any]) -> bool:
    return "pdl" in inspect.signature(run).parameters


def _launches_of(case: Case, pdl: bool) -> Iterator[Launch]:
    """Yield a case's launches, with every tile of its default configuration."""
    config = case.default
    options = {"pdl": True} if pdl else {}
    tiles = [config.with_tile(tile) for tile in config.tiles] if getattr(config, "larger", ()) else [config]
    firsts: list[Launch] = []
    for index, own in enumerate(tiles):
        made = recorded(lambda own=own: case.run(own, **options))  # type: ignore[misc]
        for place, launch in enumerate(made):
            is_larger = index and launch.constants.get("BLOCK_M") != firsts[place].constants.get("BLOCK_M")
            yield replace(
                launch,
                case=f"{label_of(case.op, case.key)}; {case.load}",
                first=firsts[place] if is_larger else None,
            )
        firsts = firsts or made


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """Return the launches of a call over tensors on "meta", in place of running them."""
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
