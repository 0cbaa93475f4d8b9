"""Checks in PTX that every wgmma of operands in shared memory follows a proxy fence.

wgmma reads shared memory through the async proxy. Ordinary stores and `cp.async` write it through the generic proxy, so
on every path from the completion of such a write to a wgmma there must be a `fence.proxy.async`. A missing one does not
fail: a product occasionally reads old operands (triton #9610).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from treespec_kernels.aot.assembly import read_ptx

_FENCE = "fence.proxy.async"
_PRODUCT = "wgmma.mma_async"
_WRITES = re.compile(r"st\.shared|stmatrix|cp\.async\.wait")  # a copy is complete when it has been waited for


class Fences(NamedTuple):
    """Proxy fences of a kernel.

    Attributes:
        products: number of wgmma instructions.
        fences: number of proxy fences.
        fault: description of a wgmma that a path reaches without a fence; None if there is none.
    """

    products: int
    fences: int
    fault: str | None


def proxy_fences(ptx: str) -> Fences:
    """Count and check the proxy fences of one kernel for sm_90."""
    code = read_ptx(ptx)
    opcodes = [instruction.opcode for instruction in code.instructions]
    products = sum(opcode.startswith(_PRODUCT) for opcode in opcodes)
    fences = sum(opcode.startswith(_FENCE) for opcode in opcodes)
    seen: set[tuple[int, bool]] = set()
    pending = [(0, False)]  # instruction, and whether a write since the last fence may be visible to it
    while pending:
        at, written = pending.pop()
        if (at, written) in seen or at == len(opcodes):
            continue
        seen.add((at, written))
        predicate, opcode, _ = instruction = code.instructions[at]
        if opcode.startswith(_PRODUCT) and written:
            return Fences(products, fences, f"{opcode} reads shared memory that no fence.proxy.async orders")
        if opcode.startswith(_FENCE) and not predicate:
            written = False
        elif _WRITES.match(opcode):
            written = True
        if opcode.startswith("bra"):
            pending += [(target, written) for target in code.targets(instruction)]
            if not predicate:
                continue
        elif opcode in ("ret", "exit", "trap") and not predicate:
            continue
        pending.append((at + 1, written))
    return Fences(products, fences, None)
