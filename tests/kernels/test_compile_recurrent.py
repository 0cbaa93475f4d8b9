"""Compiled recurrent layers: the bits of a row depend on no tree, chunk, thread or instruction set."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.libraries import PAIRS, decoder_library, instruction_sets
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.compiled_plan import plan_compiled
from treespec_kernels.cpu.decoder_cpu import Architecture, CompiledLayerWeights, CompiledModel
from treespec_kernels.recurrent.request_state import RecurrentState, StateRows, StateShape

pytestmark = needs_compiler
HIDDEN, VOCAB, HEADS, KEYS, KEY_DIM, VALUE_DIM = 64, 64, 24, 4, 32, 80
LENGTH, PARENTS = 23, [-1, 0, 0, 1, 1, 3, 0, 5, 7, 2]
PATHS = ([0, 1, 3, 5, 7, 8], [0, 2, 9], [0, 1, 4], [0, 6])
SETS = [pytest.param(name, marks=pytest.mark.slow) for name in instruction_sets() if name != PAIRS]
TOKENS = torch.randint(VOCAB, (LENGTH + len(PARENTS),), generator=torch.Generator().manual_seed(1))


class Kind(NamedTuple):
    """Sizes of a recurrent layer."""

    kernel: int
    channels: int
    heads: int
    inner: int  # inputs of its output projection
    projections: int
    rates: int = 0


KINDS = {
    "delta": Kind(4, 2 * KEYS * KEY_DIM + HEADS * VALUE_DIM, HEADS, HEADS * VALUE_DIM, HEADS * (VALUE_DIM + 2), 2),
    "mamba2": Kind(4, 2 * KEYS * KEY_DIM + HEADS * VALUE_DIM, HEADS, HEADS * VALUE_DIM, HEADS * (VALUE_DIM + 1), 1),
    "conv": Kind(3, HIDDEN, 0, HIDDEN, 2 * HIDDEN),
}


def make_model(kind: str, instructions: str | None, threads: int = 1) -> CompiledModel:
    """Two recurrent layers around one with attention, whose outputs have a gate."""
    of, generator = KINDS[kind], torch.Generator().manual_seed(7)

    def random(*size: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * gain * size[-1] ** -0.5).bfloat16()

    def layer(names: tuple[str, str], out: int, inner: int, **parts: Tensor) -> CompiledLayerWeights:
        matrices = dict(zip(names, (random(out, HIDDEN, gain=1.5), random(HIDDEN, inner, gain=2.0)), strict=True))
        mlp = random(2 * HIDDEN, HIDDEN), None, random(HIDDEN, HIDDEN), None
        weights = CompiledLayerWeights(ones, ones, None, None, None, None, None, *mlp, (0, 0), None, **parts)
        return weights._replace(**matrices)

    def recurrent() -> CompiledLayerWeights:
        parts = {"conv": torch.randn(of.kernel, of.channels, generator=generator)}
        if of.heads:
            parts |= {"dt_bias": torch.randn(HEADS, generator=generator), "rate": -torch.rand(HEADS)}
            parts |= {"gain": torch.randn(VALUE_DIM if of.rates == 2 else of.inner, generator=generator)}
        if of.rates == 1:
            parts |= {"skip": torch.randn(HEADS, generator=generator)}
            parts |= {"conv_bias": torch.randn(of.channels, generator=generator)}
        return layer(("mix", "mix_out"), of.channels + of.projections, of.inner, **parts)

    ones = torch.ones(HIDDEN)
    torch.manual_seed(3)
    layers = [recurrent(), layer(("qkv", "o"), 6 * 16, 32), recurrent()]
    sizes = of.kernel, of.channels, KEYS, of.heads, KEY_DIM if of.heads else 0, VALUE_DIM if of.heads else 0
    fields = "kernel", "channels", "key_heads", "state_heads", "key_dim", "value_dim"
    own = {"output_gate": True, "rates": of.rates, "mixer_eps": 1e-6}
    architecture = Architecture(2, 1, 1e-6, 0.25, **own, **dict(zip(fields, sizes, strict=True)))
    library = decoder_library(instructions)
    embed = random(VOCAB, HIDDEN, gain=8.0)
    return CompiledModel(library, torch.bfloat16, architecture, embed, None, layers, (ones, None), embed, threads)


def new_state(kind: str) -> RecurrentState:
    of = KINDS[kind]
    matrix = (of.heads, KEY_DIM, VALUE_DIM) if of.heads else (0, 0, 0)
    [state] = StateShape(2, matrix, of.kernel - 1, of.channels + of.rates * of.heads, 16, torch.bfloat16).allocate(1)
    return state


def run(model: CompiledModel, pool: Tensor, tokens: Tensor, rows: RequestRows) -> Tensor:
    rotation = torch.stack((torch.ones(64, 16), torch.zeros(64, 16)), 1).contiguous()
    plan = plan_compiled([rows], recurrent=True)
    hidden = model.forward(tokens.contiguous(), plan, rotation, pool)
    assert plan.states is not None
    plan.states.finish()
    return hidden


def outputs(model: CompiledModel, kind: str, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of a prompt in chunks, and of a tree after it; and the state after the tree's first path."""
    pages, pool = np.array([1]), torch.zeros(1, 2, 2, 1, PAGE_SIZE, 16, dtype=torch.bfloat16)
    state, found = new_state(kind), list[Tensor]()
    for start in range(0, LENGTH, chunk):
        part = TOKENS[start : min(start + chunk, LENGTH)]
        commits = StateRows(state, len(part))
        found.append(run(model, pool, part, RequestRows.chain(start, len(part), pages, state=commits)))
    kept, before = state.clone(), pool.clone()
    tree = run(model, pool, TOKENS[LENGTH:], RequestRows.tree(LENGTH, np.array(PARENTS), pages, state=StateRows(state)))
    for path in PATHS:  # each decoded alone
        alone = kept.clone()
        plain = before.clone()
        for depth, node in enumerate(path):
            rows = RequestRows.chain(LENGTH + depth, 1, pages, state=StateRows(alone))
            assert torch.equal(run(model, plain, TOKENS[LENGTH + node, None], rows)[0], tree[node]), (path, node)
    state.commit(np.array(PATHS[0]))
    end = RequestRows.chain(LENGTH + len(PATHS[0]), 1, pages, state=StateRows(state))
    run(model, pool, TOKENS[:1], end)
    return torch.cat(found), tree, state.matrices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instructions", [None, *SETS])
def test_bits_of_chunks_trees_threads_and_instruction_sets(kind: str, instructions: str | None) -> None:
    first = outputs(make_model(kind, instructions and instruction_sets()[0]), kind, 1)
    assert first[0].isfinite().all() and first[1].float().std() > 0.1
    for threads, chunk in ((1, 9), (2, LENGTH)):
        again = outputs(make_model(kind, instructions, threads), kind, chunk)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), (threads, chunk)
