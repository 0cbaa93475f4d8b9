"""How often a program of combine_segments waits for memory, read from its machine code."""

import itertools
import re

import pytest

from tests.helpers.child import uninterpreted_document
from treespec_kernels.aot.code_order import read_sass

pytestmark = pytest.mark.slow

COMPILED = """
import json, torch
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes

def sass_of(target, launch):
    return aot.cuobjdump(launch.compile(target).asm["cubin"], "--dump-sass")

if __name__ == "__main__":
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    shapes = [*default_shapes([bf16])[1:], *default_shapes([fp32])[:1], *family_shapes([fp16])[::2]]
    print(json.dumps([
        [f"{target}, heads of {shape.head_dim} {shape.dtype}", sass_of(target, launch)]
        for target in ("sm_80", "sm_90")
        for shape in shapes
        for launch in aot.launches_of("tree_attention", shape, target)
        if launch.function.fn.__name__.startswith("combine")
    ]))
"""


def waits_of(sass: str) -> list[int]:
    """Of each basic block that loads: how often a program waits there for what it loaded, with loads still to come. At
    the end of a block it waits once more, for all that is left."""
    instructions, places = read_sass(sass)
    jumps = [index for index, (_, opcode, _) in enumerate(instructions) if opcode in ("BRA", "EXIT")]
    targets = {places[instructions[index].operands.split()[-1]] for index in jumps if instructions[index].operands}
    borders = sorted({0, *targets, *(index + 1 for index in jumps), len(instructions)})
    found = []
    for start, end in itertools.pairwise(borders):
        waits, waits_before_a_load, asked_for, loads = 0, 0, set[int](), False
        for _, opcode, operands in instructions[start:end]:
            written, read = _registers(opcode, operands)
            if asked_for & read:
                waits, asked_for = waits + 1, set()
            if opcode.startswith("LDG"):
                loads, waits_before_a_load = True, waits
                asked_for |= written
        found += [waits_before_a_load] * loads
    return found


def _registers(opcode: str, operands: str) -> tuple[set[int], set[int]]:
    """Those that an instruction writes and reads."""
    words = re.findall(r"\[[^\]]*\]|[^,\[\]\s]+", operands)
    if opcode.startswith("SHFL"):
        words = words[1:]  # a predicate
    first = "" if opcode.startswith(("ST", "BRA")) else words[:1]
    width = next((size for bits, size in ((".256", 8), (".128", 4), (".64", 2)) if bits in opcode), 1)
    written = {int(n) + k for word in first for n in re.findall(r"\bR(\d+)", word) for k in range(width)}
    read = set()
    for number, pair in re.findall(r"\bR(\d+)(\.64)?", " ".join(words[len(first) :])):
        read |= {int(number), int(number) + bool(pair)}
    return written, read


def test_a_chunk_of_segments_is_one_wait() -> None:
    """The first block waits for the two numbers of the row, together, before it can ask for a chunk."""
    pytest.importorskip("triton")
    found = uninterpreted_document(COMPILED)
    assert len({name for name, _ in found}) == len(found) == 12
    for name, sass in found:
        assert waits_of(sass) == [1, 0], name
