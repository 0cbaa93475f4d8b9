"""Checks of instruction order in PTX and machine code (SASS), on every path through a kernel.

Launches: no path of a kernel with programmatic dependent launch accesses memory or exits before its wait
(`launch/predecessors.py`). Before the wait, an instruction may compute, read launch parameters, prefetch weights to L2
(which returns no data), and use the block's own shared memory: on sm_100 a block first allocates its tensor memory, and
stores the address in shared memory.

Fences: wgmma reads shared memory through the async proxy. Ordinary stores and `cp.async` write it through the generic
proxy, so on every path from the completion of such a write to a wgmma there must be a `fence.proxy.async`. A missing
one does not fail: a product occasionally reads old operands (triton #9610).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# SASS
_WAIT, _RELEASE = "ACQBULK", "PREEXIT"
_TOUCHES = re.compile(  # accesses memory that is visible to other blocks
    r"LD(?![CS])|ULD(?!C)|ST(?!S)|ATOM(?!S)|RED(?!UX)|UTM|UBLK(?!PF)|UCP|CCTL|PREFETCH|SU(?:LD|ST|RED|ATOM)|TEX|TLD|SYNCS"
    r"|[HIQ]?GMMA|UTC(?!ATOMSWS)"
)
_EXITS = re.compile(r"EXIT|BRX|JMX")

# PTX
_FENCE = "fence.proxy.async"
_PRODUCT = "wgmma.mma_async"
_WRITES = re.compile(r"st\.shared|stmatrix|cp\.async\.wait")  # a copy is complete after its wait

# Both PTX and SASS
_JUMPS = re.compile(r"bra|call|BRA|CALL|BSSY|JMP")
_LEAVES = re.compile(r"ret|exit|trap|EXIT|BRX|JMX|RET|BPT|KILL")  # exits from the kernel, a function, or the launch


class OrderError(RuntimeError):
    """Raised if a kernel may access memory too early, or if its tiles may compute different bits for a row."""


class AssemblyInstruction(NamedTuple):
    """One instruction; `predicate` is empty or like "@!%p1"."""

    predicate: str
    opcode: str
    operands: str


class Code(NamedTuple):
    """Instructions of a kernel, and the instruction index of each label (PTX) or address (SASS)."""

    instructions: list[AssemblyInstruction]
    places: dict[str, int]


def read_ptx(text: str) -> Code:
    """Read the first kernel of a PTX text."""
    body = re.sub(r"//[^\n]*", "", text[text.index(".entry") :])
    return _read(
        re.finditer(
            r"(?:^|;)\s*(?:(?P<place>\$\w+):|(?P<predicate>@!?%\w+)?\s*(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*)(?=;))",
            body[body.index("\n{") :],
            flags=re.MULTILINE,
        )
    )


def read_sass(text: str) -> Code:
    """Read a kernel as printed by cuobjdump.

    Addresses have no leading zeros, because a jump to 0090 names 0x90.
    """
    return _read(
        re.finditer(
            r"/\*0*(?P<place>[0-9a-f]+)\*/\s+\{?\s*(?P<predicate>@!?U?P\w+)?\s*(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);",
            text,
        )
    )


def _read(lines: Iterator[re.Match[str]]) -> Code:
    code = Code([], {})
    for line in lines:
        if line["place"]:
            code.places[line["place"]] = code.places[f"0x{line['place']}"] = len(code.instructions)
        if line["opcode"]:
            code.instructions.append(AssemblyInstruction(line["predicate"] or "", line["opcode"], line["operands"]))
    return code


def following(code: Code, place: int) -> list[int]:
    """Return the indices of possible next instructions. Raises OrderError for a jump out of the kernel."""
    predicate, opcode, operands = code.instructions[place]
    if _JUMPS.match(opcode):
        targets = [code.places[word] for word in re.findall(r"[\w$]+", operands) if word in code.places]
        if not targets:
            raise OrderError(f"{opcode} {operands} has an unknown target")
        is_certain = opcode in ("bra", "bra.uni", "BRA") and not predicate and "P" not in operands
        return targets if is_certain else [*targets, place + 1]
    return [] if _LEAVES.match(opcode) and not predicate else [place + 1]


def check_launch_order(sass: str) -> None:
    """Check the machine code of one kernel with programmatic dependent launch, for sm_90 or later.

    Raises OrderError if a path accesses memory or exits before the wait, or if there is no wait.
    """
    code = read_sass(sass)
    pending, seen, waits = [0], set[int](), False
    while pending:
        place = pending.pop()
        if place in seen:
            continue
        seen.add(place)
        predicate, opcode, _ = code.instructions[place]
        if opcode == _WAIT and not predicate:
            waits = True
            continue
        if opcode == _RELEASE or _TOUCHES.match(opcode) or _EXITS.match(opcode):
            raise OrderError(f"{predicate} {opcode} is reached before the wait".strip())
        pending += following(code, place)
    if not waits:
        raise OrderError("the kernel does not wait")
    if all(instruction.opcode != _RELEASE for instruction in code.instructions):
        raise OrderError("the kernel does not launch dependents")


def proxy_fences(ptx: str) -> tuple[int, int]:
    """Return the numbers of wgmma instructions and of proxy fences in one kernel for sm_90.

    Raises OrderError if a path reaches a wgmma without a fence after a write.
    """
    code = read_ptx(ptx)
    opcodes = [instruction.opcode for instruction in code.instructions]
    seen: set[tuple[int, bool]] = set()
    pending = [(0, False)]  # instruction, and whether a write since the last fence may be visible to it
    while pending:
        place, written = pending.pop()
        if (place, written) in seen or place == len(opcodes):
            continue
        seen.add((place, written))
        opcode = opcodes[place]
        if opcode.startswith(_PRODUCT) and written:
            raise OrderError(f"{opcode} reads shared memory without a preceding fence.proxy.async")
        if opcode.startswith(_FENCE) and not code.instructions[place].predicate:
            written = False
        written = written or _WRITES.match(opcode) is not None
        pending += [(other, written) for other in following(code, place)]
    return sum(op.startswith(_PRODUCT) for op in opcodes), sum(op.startswith(_FENCE) for op in opcodes)
