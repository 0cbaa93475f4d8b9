"""Ahead-of-time compilation: checks without a GPU that every kernel compiles for real targets and does not spill.

`python -m treespec_kernels.aot.compiler --target sm_80 --target sm_90` compiles the shipped configurations and prints
JSON. `aot/specs` lists the kernels of each op. TRITON_INTERPRET must not be set, because interpreted kernels cannot be
compiled. Results are cached (`binary_cache`), so the next run compiles only kernels that changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from treespec_kernels.aot.binary_cache import ResultCache, cache_folder, result_key
from treespec_kernels.aot.compile_jobs import num_processes, run_in_processes
from treespec_kernels.aot.k_order import check_same_order
from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.aot.launch_order import PREFETCH, order_fault
from treespec_kernels.aot.proxy_fences import proxy_fences
from treespec_kernels.launch.triton_launch import SHARED_BYTES, require_triton
from treespec_kernels.ops import kernel_modules

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CompiledKernel:
    """Resource usage of a compiled kernel: registers and spills per thread, shared memory per block."""

    kernel: str
    config: dict[str, Any]
    registers: int
    spills: int  # bytes of stack per thread on CUDA, spilled vector registers on AMD
    shared_bytes: int
    products: int = 0  # wgmma instructions, which only sm_90 has
    fences: int = 0  # proxy fences, which order shared memory before them
    prefetches: int = 0  # requests of weights before the wait for the previous kernel


class OrderError(RuntimeError):
    """Raised if a kernel with programmatic dependent launch accesses memory or exits before its wait, or if a product
    reads shared memory without a proxy fence."""


class Plan(NamedTuple):
    """Number of kernels of a run, of those with cached results, and of processes that compile the others."""

    total: int
    known: int
    processes: int


class _Task(NamedTuple):
    """Picklable identity of a spec; the spec itself holds a kernel, which cannot be pickled."""

    target: str
    op: str
    shape: KernelShape
    index: int


def ops() -> tuple[str, ...]:
    """Return the ops that have Triton kernels."""
    return tuple(kernel_modules())


def default_shapes(dtypes: Iterable[torch.dtype] = DTYPES) -> tuple[KernelShape, ...]:
    """Return the shapes of the bundled default target, Llama 1B and Llama 8B, in every dtype."""
    return tuple(
        KernelShape(dtype, *sizes)
        for dtype in dtypes
        for sizes in (
            # head_dim, heads, KV heads, hidden, intermediate, vocabulary
            (64, 4, 2, 256, 704, 4096),
            (64, 32, 8, 2048, 8192, 128256),
            (128, 32, 8, 4096, 14336, 128256),
        )
    )


def family_shapes(dtypes: Iterable[torch.dtype] = DTYPES) -> tuple[KernelShape, ...]:
    """Return shapes of the other families: Gemma 2 9B, Gemma 3 1B, GPT-NeoX 20B, Pythia 2.8B and OPT 6.7B."""
    gemma: dict[str, Any] = {"norm": "rms_plus_one", "post_norms": True, "activation": "gelu_tanh"}
    layer: dict[str, Any] = {"norm": "layer", "gated": False}
    sizes: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
        # head_dim, heads, KV heads, hidden, intermediate, vocabulary
        ((256, 16, 8, 3584, 14336, 256000), gemma | {"capped": True}),
        ((256, 4, 1, 1152, 6912, 262144), gemma | {"qk_norm": True}),
        ((96, 64, 64, 6144, 24576, 50432), layer | {"activation": "gelu"}),
        ((80, 32, 32, 2560, 10240, 50304), layer | {"activation": "gelu_tanh"}),
        ((128, 32, 32, 4096, 16384, 50272), layer | {"activation": "relu", "rotary": False}),
    )
    return tuple(KernelShape(dtype, *numbers, **kinds) for dtype in dtypes for numbers, kinds in sizes)


def specs_of(op: str, shape: KernelShape, target: str | None = None) -> list[KernelSpec]:
    """Return the specs of `op` for a model's shape and a target.

    `target` None gives configurations that fit sm_80 and sm_90.

    Raises:
        ValueError: the op has no kernels, or triton is not installed.
    """
    require_triton("aot")
    if op not in ops():
        raise ValueError(f"aot: op {op!r} has no kernels; use one of {', '.join(ops())}")
    from treespec_kernels.aot.specs import SPECS

    return SPECS[op](shape, target)


def compiled_code(target: str, spec: KernelSpec) -> Any:
    """Compile one kernel, or load it from Triton's cache, and return Triton's `CompiledKernel`.

    Raises:
        ValueError: the target is unknown, or TRITON_INTERPRET is set. Triton's own errors pass through.
    """
    import triton

    _check_target(target)
    _check_compiled(spec)
    return triton.compile(_source_of(spec), target=_gpu_of(target), options=spec.options)


def compile_spec(target: str, spec: KernelSpec) -> CompiledKernel:
    """Compile one kernel, or load it from Triton's cache, check its order, and return its resource usage.

    Raises:
        ValueError: as of `compiled_code`.
        OrderError: the kernel uses PDL, and accesses memory or exits before its wait; or a fence is missing.
        OrderFault: the spec is of a larger tile, which may give a row other bits than the first one.
    """
    compiled = compiled_code(target, spec)
    if spec.first is not None:
        first = compiled_code(target, spec.first)
        check_same_order(compiled.asm["ptx"], spec.constants, first.asm["ptx"], spec.first.constants)
    if spec.constants.get("PDL"):
        fault = order_fault(compiled.asm["ptx"], cuobjdump(compiled.asm["cubin"], "--dump-sass"))
        if fault:
            raise OrderError(fault)
    shared = compiled.metadata.shared
    if not target.startswith("sm_"):
        return CompiledKernel(spec.kernel.__name__, spec.config, *_amd_usage(compiled.asm["amdgcn"]), shared)
    products, fences, fault = proxy_fences(compiled.asm["ptx"])
    if fault:
        raise OrderError(fault)
    registers, spills = _cuda_usage(compiled.asm["cubin"])
    prefetches = compiled.asm["ptx"].count(PREFETCH)
    return CompiledKernel(spec.kernel.__name__, spec.config, registers, spills, shared, products, fences, prefetches)


def _gpu_of(target: str) -> Any:
    """Return Triton's `GPUTarget` of a target name."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)


def _source_of(spec: KernelSpec) -> Any:
    """Return Triton's `ASTSource` of a spec."""
    from triton.compiler import ASTSource

    kernel, signature, attributes = spec.kernel, {}, {}
    unspecialised = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    for index, name in enumerate(kernel.arg_names):
        if name in spec.constants:
            signature[name] = "constexpr"
            continue
        is_integer = name.startswith(("stride_", "num_"))
        signature[name] = spec.types.get(name, "i32" if is_integer else "*i32")
        if name not in unspecialised and not signature[name].startswith("fp"):
            # The launcher specialises on aligned tensors and on model sizes, which are multiples of 16.
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=spec.constants, attrs=attributes)


def _check_target(target: str) -> None:
    if target not in SHARED_BYTES:
        raise ValueError(f"aot: target {target!r} is not known; use one of {', '.join(SHARED_BYTES)}")


def _check_compiled(spec: KernelSpec) -> None:
    import triton

    if not isinstance(spec.kernel, triton.JITFunction):
        raise ValueError("aot: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    dump = cuobjdump(cubin, "--dump-resource-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    return usage["REG"], max(usage["STACK"], usage["LOCAL"])


def cuobjdump(cubin: bytes, what: str) -> str:
    """Return the output of NVIDIA's `cuobjdump` for a binary with the option `what`."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def _amd_usage(assembly: str) -> tuple[int, int]:
    usage = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly)}
    return usage["vgpr_count"], usage["vgpr_spill_count"]


def compile_report(
    targets: Iterable[str],
    shapes: Iterable[KernelShape],
    only: Sequence[str] | None = None,
    jobs: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    begin: Callable[[Plan], None] = lambda plan: None,
    cache: ResultCache | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Compile ops for models and targets, and report failures.

    Args:
        targets: names in `SHARED_BYTES`.
        shapes: models to compile for.
        only: the ops to compile; None for all.
        jobs: number of processes; None for `num_processes`.
        advance: called with the number of finished kernels and the total.
        begin: called once with the plan.
        cache: loads earlier results and stores new ones.
        fresh: whether to bypass Triton's own cache.

    Returns:
        `{"targets": {target: [CompiledKernel as a dict]}, "failed": [{target, kernel, config, message}]}`. A kernel has
        failed if it does not compile (and is then not in `targets`), spills, or exceeds the target's shared memory.

    Raises:
        ValueError: a target or op is unknown, triton is not installed, or TRITON_INTERPRET is set.
    """
    targets, shapes = tuple(targets), tuple(shapes)
    for target in targets:
        _check_target(target)
    require_triton("aot")
    from triton.compiler import make_backend

    distinct: dict[str, _Task] = {}  # by key: shapes share kernels that do not depend on all of their sizes
    asked: list[tuple[str, KernelSpec, str]] = []
    for target in targets:
        for shape, op in itertools.product(shapes, only or ops()):
            for index, spec in enumerate(specs_of(op, shape, target)):
                _check_compiled(spec)
                key = result_key(_source_of(spec), make_backend(_gpu_of(target)), spec.options)
                distinct.setdefault(key, _Task(target, op, shape, index))
                asked.append((target, spec, key))
    compiled = _compile_all(distinct, jobs, advance, begin, cache, fresh)
    report: dict[str, Any] = {"targets": {target: [] for target in targets}, "failed": []}
    for target, spec, key in asked:
        named = {"kernel": spec.kernel.__name__, "config": spec.config}
        result = compiled[key]
        if isinstance(result, str):
            report["failed"].append({"target": target, **named, "message": result})
            continue
        row = asdict(result) | named
        report["targets"][target].append(row)
        message = f"spills {row['spills']}" if row["spills"] else None
        if row["shared_bytes"] > SHARED_BYTES[target]:
            message = f"takes {row['shared_bytes']} bytes of shared memory; {target} has {SHARED_BYTES[target]}"
        if message:
            report["failed"].append({"target": target, **row, "message": message})
    return report


def _compile_all(
    tasks: dict[str, _Task],
    jobs: int | None,
    advance: Callable[[int, int], None],
    begin: Callable[[Plan], None],
    cache: ResultCache | None,
    fresh: bool,
) -> dict[str, CompiledKernel | str]:
    """Return the compiled kernel of each key, or an error message."""
    results: dict[str, CompiledKernel | str] = {}
    for key in tasks if cache is not None else ():
        if (known := _stored(cache, key)) is not None:
            results[key] = known
    left = [key for key in tasks if key not in results]
    processes = num_processes(len(left)) if jobs is None else jobs
    begin(Plan(len(tasks), len(results), processes))

    def finished(place: int, result: CompiledKernel | str | None) -> None:
        key = left[place]
        results[key] = "the compiler process died" if result is None else result
        if cache is not None and isinstance(result, CompiledKernel):
            cache.store(key, asdict(result))
        advance(len(results), len(tasks))

    run_in_processes(_compile_task, [tasks[key] for key in left], processes, finished, fresh)
    return results


def _stored(cache: ResultCache, key: str) -> CompiledKernel | None:
    """Return a cached result, or None if it is missing or unreadable."""
    try:
        return CompiledKernel(**(cache.load(key) or {}))
    except TypeError:
        return None


def _compile_task(task: _Task) -> CompiledKernel | str:
    try:
        return compile_spec(task.target, specs_of(task.op, task.shape, task.target)[task.index])
    except Exception as error:  # compiler passes raise arbitrary types, and the report must list every failure
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m treespec_kernels.aot.compiler", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(SHARED_BYTES), required=True)
    parser.add_argument("--op", action="append", choices=ops(), help="may be repeated; default: all")
    parser.add_argument("--jobs", type=int, help="processes; default: one per core")
    parser.add_argument("--fresh", action="store_true", help="ignore cached results")
    given = parser.parse_args()
    shapes = (*default_shapes(), *family_shapes())
    cache = ResultCache(cache_folder(), reads=not given.fresh)
    report = compile_report(given.target, shapes, given.op, given.jobs, cache=cache, fresh=given.fresh)
    print(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
