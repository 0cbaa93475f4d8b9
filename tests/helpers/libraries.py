"""Compiled libraries, which all tests share: each is built once, by whichever process needs it first."""

import ctypes
import functools
from pathlib import Path

import torch

from treespec.startup.load import libraries_folder
from treespec_kernels.cpu.cpu_library import INSTRUCTION_SETS, CompileError, find_compiler, instruction_flags
from treespec_kernels.cpu.decoder_library import build

LIBRARIES = libraries_folder()
PAIRS = "avx512-bf16"  # the instruction set whose bf16 products have other bits than those of the others


def compiler_of(instructions: str) -> tuple[str, ...]:
    """The command for an instruction set, with -O1: half the time to compile, and the same bits.

    Raises CompileError if the machine lacks the instructions.
    """
    command = find_compiler()[:1]
    return *command, *instruction_flags(command, instructions), "-O1"


@functools.cache
def instruction_sets() -> list[str]:
    """The instruction sets that the machine has; none without a compiler."""

    def has(name: str) -> bool:
        try:
            return bool(compiler_of(name))
        except CompileError:
            return False

    return [name for name in INSTRUCTION_SETS if has(name)]


def decoder_library(
    instructions: str | None = None, dtype: torch.dtype = torch.bfloat16, head_dim: int = 16
) -> ctypes.CDLL:
    """The passes of a model for an instruction set; by default those that engines use."""
    return build(find_compiler() if instructions is None else compiler_of(instructions), head_dim, dtype, LIBRARIES)


def share_libraries(cache_folder: Path) -> Path:
    """Let a cache folder of a test's own hold the shared libraries; returns it."""
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    cache_folder.mkdir(parents=True, exist_ok=True)
    (cache_folder / "compiled").symlink_to(LIBRARIES, target_is_directory=True)
    return cache_folder
