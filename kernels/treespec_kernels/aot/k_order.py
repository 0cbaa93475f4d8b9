"""K order of a compiled matrix product: the matrix instructions that compute a row's sum, in program order.

Two tiles of one kernel compute the same bits for a row if each of their warp groups computes 64 rows by the same
instructions over the same features in the same order, and if the surrounding arithmetic is the same. Both are read from
the PTX of sm_90: `wgmma` takes its operands from shared memory through descriptors, and the features that it reads
follow from constants added to the block's descriptor. Instructions of other targets are not decoded.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from treespec_kernels.aot.code_order import OrderError


class MatrixStep(NamedTuple):
    """A matrix instruction: its opcode, and the first row and feature it reads in each operand's block."""

    opcode: str
    x: tuple[int, int]
    weight: tuple[int, int]


_WGMMA = re.compile(r"(wgmma\.mma_async\S*) \{[^}]*\}, (%\w+), (%\w+), (%p\d+), ([^;]*);")
_MOVED = re.compile(r"(?:mov|cvt|add|or)\.(?:\w+\.)?\w+\s+(%\w+), (%?-?\w+)(?:, (-?\w+))?;")
# Excludes exact conversions to f32, since a thread may convert a bias for one column or for many.
_FLOAT = re.compile(
    r"\b(?:add|sub|mul|fma|div|rcp|ex2|lg2|tanh|sqrt|rsqrt|max|min|neg|abs|cvt(?!\.f32\.))\.[\w.:]*(?:f32|f16)\S*"
)
_OFFSET = (1 << 14) - 1  # bits of a descriptor's start address, in units of 16 bytes


def k_order(ptx: str, constants: Mapping[str, Any]) -> list[list[MatrixStep]]:
    """Return the matrix instructions of every block product in a kernel, in program order."""
    products: dict[tuple[str, str], list[MatrixStep]] = {}
    values: dict[str, tuple[str, int]] = {}  # by register: the register it was computed from, and the added constant
    always = set()  # predicates that are always true
    for line in ptx.splitlines():
        if match := re.match(r"\s*mov\.pred\s+(%p\d+), -1;", line):
            always.add(match[1])
        elif match := _WGMMA.search(line):
            opcode, x, weight, accumulates, scales = match.groups()
            if accumulates not in always:
                raise OrderError(f"{opcode} accumulates only if {accumulates} is set")
            (x, x_offset), (weight, weight_offset) = values.get(x, (x, 0)), values.get(weight, (weight, 0))
            step = MatrixStep(
                f"{opcode} {scales}",
                _coordinates(x_offset, constants["BLOCK_M"], constants["BLOCK_K"]),
                _coordinates(weight_offset, constants["BLOCK_N"], constants["BLOCK_K"]),
            )
            products.setdefault((x, weight), []).append(step)
        elif match := _MOVED.search(line):
            register, source, added = match[1], match[2], match[3] or "0"
            origin, offset = values.get(source, (source, 0))
            is_constant = added.lstrip("-").isdigit()  # a sum of two registers starts a new origin
            values[register] = (origin, (offset + int(added)) & _OFFSET) if is_constant else (f"{source}+{added}", 0)
    if not products:
        raise OrderError("the kernel has no wgmma with traceable operands")
    return list(products.values())


def _coordinates(offset: int, rows: int, block_k: int) -> tuple[int, int]:
    """Return the row and the feature at an offset in a block of `rows` rows in shared memory.

    Rows of at most 128 bytes follow each other; wider blocks are stored as several blocks of 128 bytes.
    """
    units = min(block_k * 2, 128) // 16  # units of 8 features
    block, remainder = divmod(offset, rows * units)
    return remainder // units, (block * units + remainder % units) * 8


def float_operations(ptx: str) -> Counter[str]:
    """Count a thread's floating-point operations that may round, by opcode, without matrix instructions."""
    return Counter(_FLOAT.findall(ptx))


def check_same_order(ptx: str, constants: Mapping[str, Any], first: str, first_constants: Mapping[str, Any]) -> None:
    """Raise OrderError unless a tile computes its rows like the kernel's `first` tile."""
    order, expected = k_order(ptx, constants), k_order(first, first_constants)
    name, other = (f"{c['BLOCK_M']} x {c['BLOCK_N']}" for c in (constants, first_constants))
    if order != expected:
        raise OrderError(f"a tile of {name} multiplies in the order {order}, a tile of {other} in {expected}")
    operations, first_operations = float_operations(ptx), float_operations(first)
    if operations != first_operations:
        differing = {
            op: (operations[op], first_operations[op])
            for op in sorted(operations | first_operations)
            if operations[op] != first_operations[op]
        }
        raise OrderError(f"tiles of {name} and {other} compute different numbers of operations per thread: {differing}")
