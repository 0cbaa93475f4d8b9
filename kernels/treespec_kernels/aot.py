"""Ahead-of-time compilation: proves without a GPU that every kernel compiles for a real target and does not spill.

`python -m treespec_kernels.aot --target sm_80 --target sm_90` compiles the shipped configurations and prints JSON.
The process must run without TRITON_INTERPRET: an interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import coupled_choice, kv_commit
from .tree_attention import TreeAttentionConfig
from .triton_launch import block_of_head_dim, require_triton

# Bytes of shared memory that one block may take.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

PAGE_SIZE = 64
VOCAB = 128256
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class KernelShape:
    """The part of a model that a kernel is compiled for."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class CompiledKernel:
    """What one compiled kernel takes of the target, per thread and per block."""

    kernel: str
    config: dict[str, Any]
    registers: int
    spills: int  # bytes of stack per thread on CUDA, spilled vector registers on AMD
    shared_bytes: int


def default_shapes() -> tuple[KernelShape, ...]:
    """Every dtype at head_dim 64 (as in a 1B Llama) and 128 (as in an 8B one)."""
    return tuple(
        KernelShape(dtype, head_dim, num_heads, num_kv_heads)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for head_dim, num_heads, num_kv_heads in ((64, 32, 8), (128, 32, 8))
    )


def compile_shape(target: str, shape: KernelShape, config: TreeAttentionConfig | None = None) -> list[CompiledKernel]:
    """Compiles every kernel for one model shape. `config` None takes the shipped default.

    Raises:
        ValueError: an unknown target, no triton, or a process with TRITON_INTERPRET.
    """
    require_triton("aot")
    from . import coupled_choice_kernels, kv_commit_kernels, tree_attention_kernels

    config = config or TreeAttentionConfig.default(shape.dtype, shape.head_dim)
    block_d, element = block_of_head_dim(shape.head_dim), _TYPES[shape.dtype]
    described = {"dtype": element, "head_dim": shape.head_dim, "group": shape.num_heads // shape.num_kv_heads}
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    attend_constants = {
        "NUM_HEADS": shape.num_heads,
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "PAGE_SIZE": PAGE_SIZE,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "FIXED_ORDER_DOT": False,
    }
    combine_constants = {"NUM_HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "BLOCK_D": block_d}
    move_constants = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "PAGE_SIZE": PAGE_SIZE,
        "BLOCK_J": kv_commit.BLOCK_J,
        "BLOCK_D": block_d,
    }
    partials = dict.fromkeys(("partial_acc", "partial_max", "partial_sum"), "*fp32")
    tensors = dict.fromkeys(("q", "k_cache", "v_cache", "out"), f"*{element}") | partials
    integer = {"kv_cache": "*i32" if element == "fp32" else "*i16"}
    choice = dict.fromkeys(("seeds", "samples", "positions", "tokens"), "*i64") | {
        "scores": f"*{element}",
        "temperatures": "*fp32",
        "best_values": "*fp32",
        "finite": "*i1",
    }
    return [
        _compile(
            target,
            tree_attention_kernels.attend_items,
            tensors | {"scale_log2": "fp32"},
            attend_constants,
            launch,
            described | asdict(config),
        ),
        _compile(
            target,
            tree_attention_kernels.combine_segments,
            tensors,
            combine_constants,
            {"num_warps": 1, "enable_fp_fusion": False},
            described,
        ),
        _compile(
            target,
            kv_commit_kernels.move_path,
            integer,
            move_constants,
            {"num_warps": kv_commit.NUM_WARPS, "enable_fp_fusion": False},
            described,
        ),
        _compile(
            target,
            coupled_choice_kernels.choose_in_blocks,
            choice,
            {"BLOCK_V": coupled_choice.BLOCK_V},
            {"num_warps": coupled_choice.NUM_WARPS, "enable_fp_fusion": False},
            described,
        ),
        _compile(
            target,
            coupled_choice_kernels.choose_of_blocks,
            choice,
            {"NUM_BLOCKS": -(-VOCAB // coupled_choice.BLOCK_V), "BLOCK_B": coupled_choice.block_of_blocks(VOCAB)},
            {"num_warps": 1, "enable_fp_fusion": False},
            described,
        ),
    ]


def _compile(
    target: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, int | bool],
    options: dict[str, Any],
    config: dict[str, Any],
) -> CompiledKernel:
    """Arguments that `types` does not name: strides are integers, everything else points to int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(kernel, triton.JITFunction):
        raise ValueError("aot: TRITON_INTERPRET is set and an interpreted kernel cannot be compiled; unset it")
    if target not in SHARED_BYTES:
        raise ValueError(f"aot: target {target!r} is not known; use one of {', '.join(SHARED_BYTES)}")
    is_cuda = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_cuda else GPUTarget("hip", target, 64)

    signature, attributes = {}, {}
    unspecialised = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        is_integer = name.startswith("stride_") or name in ("max_path", "vocab")
        signature[name] = types.get(name, "i32" if is_integer else "*i32")
        if name not in unspecialised and signature[name] != "fp32":
            attributes[(index,)] = [["tt.divisibility", 16]]  # as the launcher sees aligned tensors and head sizes
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=gpu, options=options)
    registers, spills = _cuda_usage(compiled.asm["cubin"]) if is_cuda else _amd_usage(compiled.asm["amdgcn"])
    return CompiledKernel(kernel.__name__, config, registers, spills, compiled.metadata.shared)


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    return usage["REG"], max(usage["STACK"], usage["LOCAL"])


def _amd_usage(assembly: str) -> tuple[int, int]:
    usage = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly)}
    return usage["vgpr_count"], usage["vgpr_spill_count"]


def compile_report(targets: Iterable[str], shapes: Iterable[KernelShape]) -> dict[str, Any]:
    """`{"targets": {target: [CompiledKernel as a dict]}, "failed": [...]}`. A spill or too much shared memory fails."""
    report: dict[str, Any] = {"targets": {}, "failed": []}
    shapes = tuple(shapes)
    for target in targets:
        rows = [row for shape in shapes for row in compile_shape(target, shape)]
        report["targets"][target] = [asdict(row) for row in rows]
        for row in rows:
            if row.spills or row.shared_bytes > SHARED_BYTES[target]:
                report["failed"].append({"target": target, **asdict(row)})
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m treespec_kernels.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(SHARED_BYTES), required=True)
    report = compile_report(parser.parse_args().target, default_shapes())
    print(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
