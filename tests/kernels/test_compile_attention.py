"""Attention in the compiled library: a row's bits depend neither on where its keys lie nor on the rows beside it."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.libraries import PAIRS, decoder_library, instruction_sets
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.compiled_plan import plan_compiled
from treespec_kernels.cpu.decoder_cpu import Architecture, CompiledLayerWeights, CompiledModel

pytestmark = needs_compiler
HIDDEN, VOCAB = 32, 61
LENGTH = 3 * PAGE_SIZE
PAGES = np.array([5, 1, 3, 4])  # in the order of positions
POISON = VOCAB  # a token of NaN
ONES = torch.ones(HIDDEN)
NORM = ONES, None


class Case(NamedTuple):
    head_dim: int
    kv_heads: int
    group: int
    dtype: torch.dtype
    window: int | None = None
    cap: float | None = None
    instructions: str | None = None


CASES = [
    Case(16, 2, 3, torch.bfloat16),
    Case(16, 2, 2, torch.bfloat16, window=1),
    Case(16, 2, 3, torch.float32, window=64),
    Case(64, 1, 8, torch.bfloat16, window=5, cap=2.0),
    Case(64, 2, 1, torch.bfloat16, window=70),
    Case(80, 2, 3, torch.float32),
    Case(80, 1, 2, torch.float32, window=129, cap=0.5),
    Case(144, 1, 3, torch.bfloat16),
]
SETS = [Case(16, 2, 3, torch.bfloat16, 41, 2.0, name) for name in instruction_sets()]


def each(cases: list[Case]) -> pytest.MarkDecorator:
    """Other libraries than the test models' take seconds to compile."""
    marked = [pytest.param(case, marks=[pytest.mark.slow] * (case.head_dim > 16 or case in SETS)) for case in cases]
    return pytest.mark.parametrize(
        "case", marked, ids=["-".join(map(str, case)).replace("torch.", "") for case in cases]
    )


def random_weights(case: Case, layers: int) -> tuple[Tensor, list[CompiledLayerWeights], Tensor]:
    """Embedding, layers and head, without an MLP, so that most of the result is attention's."""
    generator = torch.Generator().manual_seed(7)
    heads, dim = case.kv_heads * case.group, case.head_dim

    def random(*size: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * gain * size[-1] ** -0.5).to(case.dtype)

    embed = random(VOCAB + 1, HIDDEN, gain=HIDDEN**0.5)
    embed[POISON] = torch.nan
    down, parts = torch.zeros(HIDDEN, HIDDEN, dtype=case.dtype), []
    for _ in range(layers):
        qkv = random((heads + 2 * case.kv_heads) * dim, HIDDEN, gain=1.5)
        o, gate_up = random(HIDDEN, heads * dim, gain=3.0), random(2 * HIDDEN, HIDDEN)
        matrices = (qkv, None, o, None, gate_up, None, down, None)  # each with its bias
        parts.append(CompiledLayerWeights(ONES, ONES, None, *matrices, (0, 0), case.window))
    return embed, parts, random(VOCAB, HIDDEN)


def make_model(case: Case, threads: int = 1, layers: int = 2) -> CompiledModel:
    library = decoder_library(case.instructions, case.dtype, case.head_dim)
    embed, parts, head = random_weights(case, layers)
    heads, scale = case.kv_heads * case.group, case.head_dim**-0.5
    architecture = Architecture(heads, case.kv_heads, 1e-6, scale, score_cap=case.cap)
    return CompiledModel(library, case.dtype, architecture, embed, None, parts, NORM, head, threads)


def new_pool(case: Case, layers: int = 2, pages: int = 8) -> Tensor:
    return torch.zeros(layers, 2, pages, case.kv_heads, PAGE_SIZE, case.head_dim, dtype=case.dtype)


def run(model: CompiledModel, case: Case, pool: Tensor, tokens: Any, *requests: RequestRows) -> Tensor:
    """Hidden states, [num_rows, HIDDEN]. Keys turn by an angle that goes by dimension and position."""
    length = max(int(rows.positions.max()) for rows in requests) + 1
    angle = torch.arange(length)[:, None] * 0.7 ** torch.arange(case.head_dim // 2)
    rotation = torch.stack(
        (torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)), 1
    ).contiguous()
    return model.forward(torch.as_tensor(tokens, dtype=torch.int64), plan_compiled(requests), rotation, pool)


class Plain(NamedTuple):
    """Decoded token by token."""

    tokens: np.ndarray
    hidden: Tensor
    pool: Tensor


@functools.cache
def plain_run(case: Case, other: bool = False) -> Plain:
    """Of one of two sequences, whose first page is the same."""
    model, pool = make_model(case), new_pool(case)
    tokens = np.random.default_rng(3).integers(VOCAB, size=LENGTH)
    tokens[PAGE_SIZE:] = np.roll(tokens[PAGE_SIZE:], 7 * other)
    rows = [run(model, case, pool, [token], RequestRows.chain(i, 1, PAGES)) for i, token in enumerate(tokens)]
    hidden = torch.cat(rows)
    assert hidden.isfinite().all()
    return Plain(tokens, hidden, pool)


@pytest.mark.slow
def test_passes_have_the_same_bits_in_every_instruction_set() -> None:
    others = [case for case in SETS if case.instructions != PAIRS]
    first = plain_run(others[0])
    for case in others[1:]:
        plain = plain_run(case)
        assert torch.equal(plain.hidden, first.hidden) and torch.equal(plain.pool, first.pool), case.instructions
    assert len(others) >= 2


@each(CASES + SETS)
def test_trees_behind_every_context(case: Case) -> None:
    """Nodes beside the path are NaN, and so is what earlier trees left behind."""
    model, plain = make_model(case), plain_run(case)
    pool = plain.pool.clone()
    parents, path = [-1, 0, 0, 1, 2, 4, 4, 6], [0, 2, 4, 6, 7]
    borders = [page * PAGE_SIZE + i for page in (2, 1, 0) for i in (2, 1, 0, -1, -2, -5) if page or i >= 0]
    for context_len in reversed(range(2 * PAGE_SIZE + 3)) if case.head_dim == 16 and case not in SETS else borders:
        tokens = np.full(len(parents), POISON)
        tokens[path] = plain.tokens[context_len : context_len + len(path)]
        hidden = run(model, case, pool, tokens, RequestRows.tree(context_len, np.array(parents), PAGES))
        assert torch.equal(hidden[path], plain.hidden[context_len : context_len + len(path)]), context_len
        assert hidden[[1, 3, 5]].isnan().all()


@each(CASES)
def test_chunks_of_any_size(case: Case) -> None:
    """And the keys and values that they leave are the same bits too."""
    plain = plain_run(case)
    for threads, chunk in ((1, 40), (3, 7), (2, LENGTH), (3, LENGTH)):
        model, pool = make_model(case, threads), new_pool(case)
        for start in range(0, LENGTH, chunk):
            part = plain.tokens[start : start + chunk]
            hidden = run(model, case, pool, part, RequestRows.chain(start, len(part), PAGES))
            assert torch.equal(hidden, plain.hidden[start : start + chunk]), (threads, chunk, start)
        assert torch.equal(pool, plain.pool)


@each(CASES)
def test_requests_beside_each_other(case: Case) -> None:
    """Of other lengths in other pages, some of which they share; chains and trees in one block of rows."""
    plain, other = plain_run(case), plain_run(case, True)
    pool = plain.pool.clone()
    own = np.array([PAGES[0], 6, 7, 2])  # the first page is shared
    pool[:, :, own[1:]] = other.pool[:, :, PAGES[1:]]
    parents, path = [-1, 0, 0, 2, 1], [0, 2, 3]
    for long, short in ((133, 64), (150, 97), (129, 65), (128, 127)):
        tokens = np.full(len(parents), POISON)
        tokens[path] = plain.tokens[long : long + len(path)]
        tree = RequestRows.tree(long, np.array(parents), PAGES)
        requests = [RequestRows.chain(short, 6, own), tree, RequestRows.chain(short + 6, 1, own)]
        ids = np.concatenate((other.tokens[short : short + 6], tokens, other.tokens[short + 6 : short + 7]))
        hidden = run(make_model(case), case, pool.clone(), ids, *requests)
        assert torch.equal(hidden[[*range(6), 11]], other.hidden[short : short + 7])
        assert torch.equal(hidden[6:11][path], plain.hidden[long : long + len(path)])


@each(CASES)
def test_paths_longer_than_a_page(case: Case) -> None:
    """140 nodes in two branches: more slots than are brought together at once, for one row and for 16."""
    plain, parents = plain_run(case), [max(node - 2, -1 if node == 0 else 0) for node in range(140)]
    path = [0, *range(2, 140, 2)]
    for context_len in (37, 64):
        tokens = np.full(len(parents), 5)
        tokens[path] = plain.tokens[context_len : context_len + len(path)]
        pool = torch.cat((plain.pool, plain.pool), 2)
        rows = RequestRows.tree(context_len, np.array(parents), np.array([*PAGES[:-1], 9, 10]))
        for threads in (1, 2):
            hidden = run(make_model(case, threads), case, pool, tokens, rows)
            assert torch.equal(hidden[path], plain.hidden[context_len : context_len + len(path)])


@each(CASES + SETS)
def test_threads_that_share_the_heads_of_long_contexts(case: Case) -> None:
    """Their bits are those of one thread: for one row, a tree, and requests beside each other."""
    rng, parents, runs = np.random.default_rng(5), np.array([-1, 0, 0, 1, 2, 4, 4, 6]), []
    pages, tokens = rng.permutation(20)[:12], rng.integers(VOCAB, size=16)
    pool = torch.randn(new_pool(case, pages=20).shape, generator=torch.Generator().manual_seed(5)).to(case.dtype)
    for threads in (1, 3):
        model = make_model(case, threads)
        trees = [RequestRows.tree(context_len, parents, pages) for context_len in (509, 575, 640)]
        passes = [[RequestRows.chain(650, 1, pages)], *([tree] for tree in trees)]
        passes.append([trees[0], RequestRows.chain(630, 3, pages), RequestRows.chain(70, 2, pages)])
        for requests in passes:
            num_rows = sum(rows.num_rows for rows in requests)
            runs.append(run(model, case, pool.clone(), tokens[:num_rows], *requests))
    assert all(torch.equal(alone, shared) for alone, shared in zip(runs[:5], runs[5:], strict=True))
    assert all(hidden.isfinite().all() for hidden in runs)
