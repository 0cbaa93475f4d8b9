"""The noise as Triton computes it: integers bit by bit, logarithms within a bound."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.interpreted.common import DEVICE
from treespec_kernels.sampling.coupled_choice import gumbel_integers_ref
from treespec_kernels.sampling.coupled_values import gumbel, gumbel_integers

BLOCK = 256


@triton.jit
def write_integers(out, seeds, samples, positions, vocab, BLOCK: tl.constexpr):
    row, i_block = tl.program_id(0), tl.program_id(1)
    o_philox = i_block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    x = gumbel_integers(o_philox, tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))
    o_v = i_block * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * vocab + o_v, x.to(tl.int32, bitcast=True), mask=o_v < vocab)


@triton.jit
def write_noise(out, integers, BLOCK: tl.constexpr):
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o_v, gumbel(tl.load(integers + o_v).to(tl.uint32, bitcast=True)))


@pytest.mark.parametrize("vocab", [7, 300])
def test_integers(vocab: int) -> None:
    edges = [0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
    rows = [(a, b, c) for i, a in enumerate(edges) for b, c in [(edges[i - 1], edges[i - 2]), (i, 131071 + i)]]
    keys = np.array(rows, dtype=np.int64).T.copy()
    out = torch.full((len(rows), vocab), -1, dtype=torch.int32, device=DEVICE)
    grid = (len(rows), -(-vocab // BLOCK))
    write_integers[grid](out, *(torch.from_numpy(key).to(DEVICE) for key in keys), vocab, BLOCK=BLOCK)
    assert np.array_equal(out.cpu().numpy().view(np.uint32), gumbel_integers_ref(*keys, vocab))


def test_noise() -> None:
    generator = np.random.default_rng(0)
    edges = [0, 1, 2, 127, 128, 129, 2**7, 2**24, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    drawn = generator.integers(0, 2**32, BLOCK * 16 - len(edges)) >> np.arange(BLOCK * 16 - len(edges)) % 32
    x = np.concatenate([edges, drawn]).astype(np.uint32)
    out = torch.full((len(x),), float("nan"), device=DEVICE)
    launch = {"BLOCK": BLOCK, "enable_fp_fusion": False}
    write_noise[(len(x) // BLOCK,)](out, torch.from_numpy(x.view(np.int32)).to(DEVICE), **launch)
    w = np.minimum((x.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    expected = -np.log(-np.log1p(-w.astype(np.float64)))
    error = np.abs(out.cpu().numpy() - expected) / np.maximum(1, np.abs(expected))
    assert error.max() <= 5e-7, f"worst at integer {x[error.argmax()]}"
