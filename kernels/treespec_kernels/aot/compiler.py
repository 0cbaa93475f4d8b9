"""Ahead-of-time compilation: checks without a GPU that every kernel compiles for real targets and does not spill.

It compiles the kernels launched by the ops' cases (`launches`). TRITON_INTERPRET must not be set, because interpreted
kernels cannot be compiled. Triton caches the results, so the next run compiles only changed kernels.
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treespec_kernels.aot.code_order import check_launch_order, proxy_fences
from treespec_kernels.aot.compile_jobs import num_processes, run_in_processes
from treespec_kernels.aot.k_order import check_same_order
from treespec_kernels.aot.launches import Launch, launches_of
from treespec_kernels.launch.triton_launch import SHARED_BYTES
from treespec_kernels.ops import OPS
from treespec_kernels.ops.shapes import KernelShape


@dataclass(frozen=True)
class CompiledKernel:
    """Resource usage of a compiled kernel: registers and spills per thread, shared memory per block."""

    registers: int
    spills: int  # stack bytes per thread on CUDA, spilled vector registers on AMD
    shared_bytes: int
    products: int = 0  # number of wgmma instructions, only on sm_90
    fences: int = 0  # number of proxy fences, which order shared memory before wgmma
    prefetches: int = 0  # number of weight prefetches before the wait for the previous kernel


def compile_launch(target: str, launch: Launch) -> CompiledKernel:
    """Compile one kernel, or load it from Triton's cache, check its order, and return its resource usage."""
    compiled = launch.compile(target)
    code, shared = compiled.asm, compiled.metadata.shared
    if launch.first is not None:
        first = launch.first.compile(target)
        check_same_order(code["ptx"], launch.constants, first.asm["ptx"], launch.first.constants)
    if not target.startswith("sm_"):
        usage = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", code["amdgcn"])
        counts = {name: int(value) for name, value in usage}
        return CompiledKernel(counts["vgpr_count"], counts["vgpr_spill_count"], shared)
    is_programmatic = bool(launch.constants.get("PDL"))
    printed = cuobjdump(code["cubin"], "--dump-resource-usage", *(["--dump-sass"] if is_programmatic else []))
    if is_programmatic:
        check_launch_order(printed)
    usage = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)
    counts = {name: int(value) for name, value in usage}
    spills, prefetches = max(counts["STACK"], counts["LOCAL"]), code["ptx"].count("cp.async.bulk.prefetch.L2")
    products, fences = proxy_fences(code["ptx"]) if target == "sm_90" else (0, 0)
    return CompiledKernel(counts["REG"], spills, shared, products, fences, prefetches)


def cuobjdump(cubin: bytes, *options: str) -> str:
    """Return the output of NVIDIA's `cuobjdump` for a binary; a call takes about half a second."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def compile_report(
    targets: Sequence[str],
    shapes: Iterable[KernelShape],
    only: Iterable[str] = OPS,
    jobs: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Compile ops for models and targets, and report failures.

    Returns:
        `{"targets": {target: [row]}, "failed": [row with target and message]}`. A row has a kernel, its op's case, its
        constants and options, and the fields of `CompiledKernel`. A kernel has failed if it does not compile (and is
            then not in `targets`), spills, or exceeds the target's shared memory.
    """
    requests = [
        (target, launch, (target, repr(launch.binary), repr(launch.first and launch.first.binary)))
        for target, shape, op in itertools.product(targets, list(shapes), list(only))
        for launch in launches_of(op, shape, target)
    ]
    tasks = {key: (target, launch) for target, launch, key in requests}  # shapes share kernels
    keys = list(tasks)
    compiled: dict[Any, CompiledKernel | str] = {}

    def finished(index: int, result: CompiledKernel | str | None) -> None:
        compiled[keys[index]] = result or "the compiler process died"
        advance(len(compiled), len(tasks))

    advance(0, len(tasks))
    run_in_processes(_compile_task, list(tasks.values()), jobs or num_processes(len(tasks)), finished)
    report: dict[str, Any] = {"targets": {target: [] for target in targets}, "failed": []}
    for target, launch, key in requests:
        row = {"kernel": launch.kernel, "case": launch.case, "config": launch.constants | launch.options}
        result, message = compiled[key], None
        if isinstance(result, str):
            message = result
        else:
            row |= asdict(result)
            report["targets"][target].append(row)
            if result.shared_bytes > SHARED_BYTES[target]:
                message = f"takes {result.shared_bytes} bytes of shared memory; {target} has {SHARED_BYTES[target]}"
            elif result.spills:
                message = f"spills {result.spills}"
        if message:
            report["failed"].append({"target": target, **row, "message": message})
    return report


def _compile_task(task: tuple[str, Launch]) -> CompiledKernel | str:
    try:
        return compile_launch(*task)
    except Exception as error:  # compiler passes raise arbitrary types, and the report must list every failure
        return f"{type(error).__name__}: {error}"
