"""Reads PTX and machine code (SASS) of a kernel into instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction; `predicate` is empty or like "@!%p1"."""

    predicate: str
    opcode: str
    operands: str


class Code(NamedTuple):
    """Instructions of a kernel, and the instruction index of each label (PTX) or address (SASS)."""

    instructions: list[Instruction]
    places: dict[str, int]

    def targets(self, instruction: Instruction) -> list[int]:
        """Return the indices of the instructions whose label or address is an operand."""
        words = re.findall(r"[\w$]+", instruction.operands)
        return [self.places[word] for word in words if word in self.places]


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
            code.instructions.append(Instruction(line["predicate"] or "", line["opcode"], line["operands"]))
    return code
