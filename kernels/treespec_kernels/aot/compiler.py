"""Ahead-of-time compilation: checks without a GPU that every kernel compiles for real targets and does not spill.

`python -m treespec_kernels.aot.compiler --target sm_80 --target sm_90` compiles the shipped configurations and prints
JSON. The kernels are those that the cases of the ops launch (`launches`). TRITON_INTERPRET must not be set, because
interpreted kernels cannot be compiled. Results are cached (`binary_cache`), so the next run compiles only kernels that
changed.
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

from treespec_kernels.aot.binary_cache import ResultCache, cache_folder, result_key
from treespec_kernels.aot.compile_jobs import num_processes, run_in_processes
from treespec_kernels.aot.k_order import check_same_order
from treespec_kernels.aot.launch_order import PREFETCH, order_fault
from treespec_kernels.aot.launches import Launch, check_target, launches_of, ops
from treespec_kernels.aot.proxy_fences import proxy_fences
from treespec_kernels.launch.triton_launch import SHARED_BYTES, require_triton
from treespec_kernels.ops.shapes import KernelShape, default_shapes, family_shapes


@dataclass(frozen=True)
class CompiledKernel:
    """Resource usage of a compiled kernel: registers and spills per thread, shared memory per block."""

    registers: int
    spills: int  # bytes of stack per thread on CUDA, spilled vector registers on AMD
    shared_bytes: int
    products: int = 0  # wgmma instructions, which only sm_90 has
    fences: int = 0  # proxy fences, which order shared memory before them
    prefetches: int = 0  # requests of weights before the wait for the previous kernel


class OrderError(RuntimeError):
    """Raised if a kernel with programmatic dependent launch accesses memory or exits before its wait, or if a product
    reads shared memory without a proxy fence."""


class _Task(NamedTuple):
    target: str
    launch: Launch


class Plan(NamedTuple):
    """Number of kernels of a run, of those with cached results, and of processes that compile the others."""

    total: int
    known: int
    processes: int


def compile_launch(target: str, launch: Launch) -> CompiledKernel:
    """Compile one kernel, or load it from Triton's cache, check its order, and return its resource usage.

    Raises:
        ValueError: as of `Launch.compile`.
        OrderError: the kernel uses PDL, and accesses memory or exits before its wait; or a fence is missing.
        OrderFault: the launch is of a larger tile, which may give a row other bits than the first one.
    """
    compiled = launch.compile(target)
    if launch.first is not None:
        first = launch.first.compile(target)
        check_same_order(compiled.asm["ptx"], launch.constants, first.asm["ptx"], launch.first.constants)
    if launch.constants.get("PDL"):
        fault = order_fault(compiled.asm["ptx"], cuobjdump(compiled.asm["cubin"], "--dump-sass"))
        if fault:
            raise OrderError(fault)
    shared = compiled.metadata.shared
    if not target.startswith("sm_"):
        return CompiledKernel(*_amd_usage(compiled.asm["amdgcn"]), shared)
    products, fences, fault = proxy_fences(compiled.asm["ptx"])
    if fault:
        raise OrderError(fault)
    prefetches = compiled.asm["ptx"].count(PREFETCH)
    return CompiledKernel(*_cuda_usage(compiled.asm["cubin"]), shared, products, fences, prefetches)


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
        `{"targets": {target: [row]}, "failed": [row with target and message]}`. A row has a kernel, its op's case, its
        constants and options, and the fields of `CompiledKernel`. A kernel has failed if it does not compile (and
        is then not in `targets`), spills, or exceeds the target's shared memory.

    Raises:
        ValueError: a target or op is unknown, triton is not installed, or TRITON_INTERPRET is set.
    """
    targets, shapes = tuple(targets), tuple(shapes)
    for target in targets:
        check_target(target)
    require_triton("aot")
    distinct: dict[str, _Task] = {}  # by key: shapes share kernels that do not depend on all of their sizes
    asked: list[tuple[str, Launch, str]] = []
    for target, shape, op in itertools.product(targets, shapes, only or ops()):
        for launch in launches_of(op, shape, target):
            key = result_key(launch, target)
            distinct.setdefault(key, _Task(target, launch))
            asked.append((target, launch, key))
    compiled = _compile_all(distinct, jobs, advance, begin, cache, fresh)
    report: dict[str, Any] = {"targets": {target: [] for target in targets}, "failed": []}
    for target, launch, key in asked:
        named = {"kernel": launch.kernel, "case": launch.case, "config": launch.constants | launch.options}
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
        return compile_launch(*task)
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
