"""What `predecessors` promises, proved of compiled code: on no path is memory touched, or an end reached, before the
wait.

Every instruction that the entry leads to without a wait is looked at. It may compute, read the launch's parameters, and
use the block's own shared memory: on sm_100 the tensor memory of a block is allocated first, and shared memory is where
its address is put.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class _Instruction(NamedTuple):
    predicate: str
    opcode: str
    operands: str


class _Language(NamedTuple):
    """Opcodes of one form of code, as patterns of their beginnings."""

    name: str
    wait: str
    release: str
    touches: re.Pattern[str]  # memory that other blocks see
    jumps: re.Pattern[str]
    returns: re.Pattern[str]  # to behind a call, or by an error that ends the launch
    ends: re.Pattern[str]


_PTX = _Language(
    "PTX",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    re.compile(
        r"ld\.(?!param|shared)|ldu|st\.(?!shared)|atom|red\b|cp\b|prefetch|multimem|mbarrier|wgmma|tensormap|discard"
        r"|applypriority|tcgen05\.(?!alloc|relinquish)|tex|tld4|suld|sust|sured"
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
        r"LD(?![CS])|ULD(?!C)|ST(?!S)|ATOM(?!S)|RED(?!UX)|UTM|UBLK|UCP|CCTL|PREFETCH|SU(?:LD|ST|RED|ATOM)|TEX|TLD|SYNCS"
        r"|[HIQ]?GMMA|UTC(?!ATOMSWS)"
    ),
    re.compile(r"BRA|CALL|BSSY|JMP"),
    re.compile(r"RET|BPT|KILL"),
    re.compile(r"EXIT|BRX|JMX"),
)


def order_fault(ptx: str, sass: str) -> str | None:
    """What a program may do before it waits for the kernel before it; None where that is nothing.

    Args:
        ptx: of one kernel, which is launched programmatically.
        sass: its machine code for sm_90 or newer, as cuobjdump prints it.
    """
    return _fault(_PTX, *_read_ptx(ptx)) or _fault(_SASS, *_read_sass(sass))


def _fault(language: _Language, instructions: list[_Instruction], places: dict[str, int]) -> str | None:
    pending, seen, waits = [0], set(), False
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        if at == len(instructions):
            return f"the {language.name} ends without a wait"
        predicate, opcode, operands = instructions[at]
        if opcode == language.wait and not predicate:
            waits = True
            continue
        if opcode == language.release or language.touches.match(opcode) or language.ends.match(opcode):
            return f"{predicate} {opcode} is reached before the wait in the {language.name}".strip()
        if language.jumps.match(opcode):
            found = [places[word] for word in re.findall(r"[\w$]+", operands) if word in places]
            if not found:
                return f"{opcode} {operands} before the wait in the {language.name} leads nobody knows where"
            pending += found
            if opcode in ("bra", "bra.uni", "BRA") and not predicate and "P" not in operands:
                continue
        elif language.returns.match(opcode) and not predicate:
            continue
        pending.append(at + 1)
    if not waits:
        return f"the {language.name} does not wait"
    if language.release not in {opcode for _, opcode, _ in instructions}:
        return f"the {language.name} lets no dependent begin"
    return None


def _read_ptx(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions of a kernel, and where its labels stand among them."""
    body = re.sub(r"//[^\n]*", "", text[text.index(".entry") :])
    return _read(
        re.finditer(
            r"^\s*(?:(?P<place>\$\w+):|(?P<predicate>@!?%\w+)?\s*(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*);)",
            body[body.index("\n{") :],
            flags=re.MULTILINE,
        )
    )


def _read_sass(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The same; a place is an address. Leading zeros are dropped: jumps name 0x90, the instruction says 0090."""
    return _read(
        re.finditer(
            r"/\*0*(?P<place>[0-9a-f]+)\*/\s+\{?\s*(?P<predicate>@!?U?P\w+)?\s*(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);",
            text,
        )
    )


def _read(lines: Iterator[re.Match[str]]) -> tuple[list[_Instruction], dict[str, int]]:
    instructions: list[_Instruction] = []
    places: dict[str, int] = {}
    for line in lines:
        if line["place"]:
            places[line["place"]] = places[f"0x{line['place']}"] = len(instructions)
        if line["opcode"]:
            instructions.append(_Instruction(line["predicate"] or "", line["opcode"], line["operands"]))
    return instructions, places
