"""The noise as Triton computes it from integers: logarithms within a bound."""

import numpy as np
import torch
import triton
import triton.language as tl

from tests.interpreted.common import DEVICE
from treespec_kernels.sampling.coupled_values import gumbel

BLOCK = 256


@triton.jit
def write_noise(out, integers, BLOCK: tl.constexpr):
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o_v, gumbel(tl.load(integers + o_v).to(tl.uint32, bitcast=True)))


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
