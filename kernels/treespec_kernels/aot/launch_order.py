"""Checks in compiled code that no path of a kernel with programmatic dependent launch accesses memory or exits before
its wait (`launch/predecessors.py`).

The check visits every instruction that is reachable from the entry without a wait. Such an instruction may compute,
read launch parameters, read tables past L1 (`load_table`), request weights in L2 (`prefetch`, which returns no data),
and use the block's own shared memory: on sm_100 a block first allocates its tensor memory, whose address is stored in
shared memory.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from treespec_kernels.aot.assembly import Code, read_ptx, read_sass

PREFETCH = "cp.async.bulk.prefetch.L2"


class _Language(NamedTuple):
    """Opcode patterns of PTX or of machine code (SASS), matched at the start of an opcode."""

    name: str
    wait: str
    release: str
    touches: re.Pattern[str]  # accesses memory that other blocks see
    jumps: re.Pattern[str]
    returns: re.Pattern[str]  # returns from a call, or aborts the launch
    ends: re.Pattern[str]


_PTX = _Language(
    "PTX",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    re.compile(
        rf"(?!{re.escape(PREFETCH)}|ld\.global\.cg)"
        r"(?:ld\.(?!param|shared)|ldu|st\.(?!shared)|atom|red\b|cp\b|prefetch|multimem|mbarrier|wgmma|tensormap|discard"
        r"|applypriority|tcgen05\.(?!alloc|relinquish)|tex|tld4|suld|sust|sured)"
    ),
    re.compile(r"bra|call"),
    re.compile(r"trap"),
    re.compile(r"ret|exit|brx"),
)
_SASS = _Language(
    "machine code",
    "ACQBULK",
    "PREEXIT",
    re.compile(
        r"(?!LDG\.E\.[0-9A-Z.]*STRONG\.GPU)"
        r"(?:LD(?![CS])|ULD(?!C)|ST(?!S)|ATOM(?!S)|RED(?!UX)|UTM|UBLK(?!PF)|UCP|CCTL|PREFETCH|SU(?:LD|ST|RED|ATOM)|TEX|TLD|SYNCS"
        r"|[HIQ]?GMMA|UTC(?!ATOMSWS))"
    ),
    re.compile(r"BRA|CALL|BSSY|JMP"),
    re.compile(r"RET|BPT|KILL"),
    re.compile(r"EXIT|BRX|JMX"),
)


def order_fault(ptx: str, sass: str) -> str | None:
    """Return a description of the first violation of the order in a kernel, or None.

    Args:
        ptx: PTX of one kernel with programmatic dependent launch.
        sass: its machine code for sm_90 or later, as printed by cuobjdump.
    """
    return _fault(_PTX, read_ptx(ptx)) or _fault(_SASS, read_sass(sass))


def _fault(language: _Language, code: Code) -> str | None:
    instructions = code.instructions
    pending, seen, waits = [0], set(), False
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        if at == len(instructions):
            return f"the {language.name} ends without a wait"
        predicate, opcode, operands = instruction = instructions[at]
        if opcode == language.wait and not predicate:
            waits = True
            continue
        if opcode == language.release or language.touches.match(opcode) or language.ends.match(opcode):
            return f"{predicate} {opcode} is reached before the wait in the {language.name}".strip()
        if language.jumps.match(opcode):
            found = code.targets(instruction)
            if not found:
                return f"{opcode} {operands} before the wait in the {language.name} has an unknown target"
            pending += found
            if opcode in ("bra", "bra.uni", "BRA") and not predicate and "P" not in operands:
                continue
        elif language.returns.match(opcode) and not predicate:
            continue
        pending.append(at + 1)
    if not waits:
        return f"the {language.name} does not wait"
    if language.release not in {opcode for _, opcode, _ in instructions}:
        return f"the {language.name} does not launch dependents"
    return None
