"""Experts in the compiled library: a row's bits depend neither on the rows beside it nor on the instruction set."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_files import block_weight
from tests.helpers.libraries import PAIRS, decoder_library, instruction_sets
from tests.helpers.quantized_checkpoints import needs_compiler, random_weight
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.compiled_experts import SCORINGS, CompiledExperts, MlpWeights
from treespec_kernels.cpu.compiled_plan import plan_compiled
from treespec_kernels.cpu.decoder_cpu import Architecture, CompiledLayerWeights, CompiledModel
from treespec_kernels.cpu.decoder_library import Weight

pytestmark = needs_compiler
HIDDEN, INNER, EXPERTS, VOCAB, ROWS = 64, 96, 5, 61, 150
POISON = VOCAB  # a token of NaN
ONES = torch.ones(HIDDEN)
FORMS = ("dense", "int8", "int4", "Q8_0", "MXFP4", "Q4_1")


def matrix(form: str, outputs: int, inputs: int, seed: int) -> Weight:
    if form in ("int8", "int4"):
        return random_weight(outputs, inputs, int(form[3:]), inputs // 32, torch.int8 if seed % 2 else None)
    if form != "dense":
        return block_weight(form, outputs, inputs)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16()


def make_model(form: str, instructions: str | None = None, integer: bool = False) -> CompiledModel:
    """One layer, whose experts differ by their gates if not by their matrices."""
    generator = torch.Generator().manual_seed(5)

    def random(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).bfloat16()

    embed = random(VOCAB + 1, HIDDEN) * 8
    embed[POISON] = torch.nan
    scoring = SCORINGS[FORMS.index(form) % 3]
    experts = [
        MlpWeights(
            [matrix(form, INNER, HIDDEN, 3 * e), matrix("dense" if form == "Q4_1" else form, INNER, HIDDEN, 3 * e + 1)],
            random(2 * INNER).float() * 4,
            matrix(form, HIDDEN, INNER, 3 * e + 2),
            None,
        )
        for e in range(EXPERTS)
    ]
    routed = CompiledExperts(
        random(EXPERTS, HIDDEN), None, random(EXPERTS).float(), random(1, HIDDEN), experts, 2, scoring, True, 1.5, 1, 1
    )
    shared = (random(2 * INNER, HIDDEN), None, random(HIDDEN, INNER), None)
    layer = CompiledLayerWeights(
        ONES, ONES, None, random(48, HIDDEN), None, random(HIDDEN, 16), None, *shared, (0, 0), None, experts=routed
    )
    library, architecture = decoder_library(instructions), Architecture(1, 1, 1e-6, 0.25, num_ropes=0)
    return CompiledModel(
        library, torch.bfloat16, architecture, embed, None, [layer], (ONES, None), random(VOCAB, HIDDEN), 2, integer
    )


def run(model: CompiledModel, tokens: Sequence[int], first: Sequence[int]) -> Tensor:
    """Hidden states of a prompt in passes of the rows from one of `first` to the next, [num_rows, HIDDEN]."""
    pool, rotation = torch.zeros(1, 2, 5, 1, PAGE_SIZE, 16, dtype=torch.bfloat16), torch.empty(0, 0, 16)
    outputs = []
    for start, stop in pairwise((*first, len(tokens))):
        plan = plan_compiled([RequestRows.chain(start, stop - start, np.array([1, 3, 2]))])
        outputs.append(model.forward(torch.tensor(tokens[start:stop]), plan, rotation, pool))
    return torch.cat(outputs)


def tokens_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(VOCAB, size=ROWS).tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("integer", [False, True])
def test_bits_depend_on_no_other_rows(form: str, integer: bool) -> None:
    model, tokens = make_model(form, integer=integer), tokens_of(1)
    alone = run(model, tokens, range(ROWS))
    assert alone.isfinite().all()
    for first in ((0,), (0, 70, 71, 73, 78), range(0, ROWS, 33)):
        assert torch.equal(run(model, tokens, first), alone), first
    poisoned = [*tokens[:-1], POISON]
    assert torch.equal(run(model, poisoned, (0,))[:-1], alone[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_have_the_same_bits(form: str) -> None:
    sets = [name for name in instruction_sets() if name != PAIRS]
    first, *others = (run(make_model(form, name), tokens_of(2), (0, 40, 41, 60)) for name in sets)
    assert others and all(torch.equal(other, first) for other in others)
