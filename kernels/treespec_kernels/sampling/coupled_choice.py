"""Coupled choice: samples every row's token with Gumbel noise that depends only on seed, sample, position and token.

A draft and its target, or a tree and plain decoding, thus draw the same noise and choose the same token if their scores
are equal. The noise of token v is computed from a 32-bit integer x of Philox4x64-10 (Salmon et al., SC11): key
(seed, sample), counter (1 + v // 8, 0, position, 0), output word v // 2 % 4, its low half for even v and its high half
for odd v. In float32: w = (x + 1/2) * 2^-32, clamped to at most 1 - 2^-24, and g = -log(-log1p(-w)). Without the 1/2, g
would be infinite for x = 0, and without the clamp for the largest x: about once in 8,000 tokens of a vocabulary of
4,096.

The integers are identical in all implementations. Logarithms may differ in their last bits, so two implementations may
choose differently when the two best values are that close. Within one implementation choices are reproducible: a
token's value does not depend on the batch, the row or the vocabulary, and a maximum does not depend on order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import block_of, load_kernels

BLOCK_V = 1024  # tokens per program: one Philox block of 8 per thread, 126 programs for one row of 128 k
NUM_WARPS = 4


class CoupledChoice(NamedTuple):
    """Chosen token of each row.

    Attributes:
        tokens: [rows] int64.
        finite: [rows] bool, whether the chosen token's value is finite and no value is NaN.
    """

    tokens: Tensor
    finite: Tensor


def gumbel_integers_of_row(seed: int, sample: int, position: int, vocab: int) -> np.ndarray:
    """Return the integers x of one row, [vocab] uint32. A token's integer does not depend on the vocabulary's size.

    Args:
        seed, sample, position: integers from 0 to 2**64 - 1.
        vocab: the number of tokens.
    """
    key = np.array([seed, sample], dtype=np.uint64)
    counter = np.array([0, 0, position, 0], dtype=np.uint64)  # numpy increments it before its first block
    words = np.random.Philox(key=key, counter=counter).random_raw(-(-vocab // 8) * 4)
    return words.astype("<u8", copy=False).view("<u4")[:vocab].astype(np.uint32, copy=False)


def gumbel_integers_ref(seeds: np.ndarray, samples: np.ndarray, positions: np.ndarray, vocab: int) -> np.ndarray:
    """Return the integers x, [rows, vocab] uint32, of three [rows] int64 or uint64 arrays, reinterpreted as uint64."""
    integers = np.empty((len(seeds), vocab), dtype=np.uint32)
    numbers = (array.astype(np.uint64).tolist() for array in (seeds, samples, positions))
    for row, (seed, sample, position) in enumerate(zip(*numbers, strict=True)):
        integers[row] = gumbel_integers_of_row(seed, sample, position, vocab)
    return integers


def gumbel_ref(integers: np.ndarray) -> np.ndarray:
    """Return g of uint32 integers of any shape, computed in float32; between -2.82 and 22.88."""
    w = integers.astype(np.float32)
    w += np.float32(0.5)  # in place, because a row of 128 k is half a megabyte and is computed for every token
    w *= np.float32(2**-32)
    np.minimum(w, np.float32(1 - 2**-24), out=w)
    np.negative(w, out=w)
    np.log1p(w, out=w)
    np.negative(w, out=w)
    np.log(w, out=w)
    return np.negative(w, out=w)


def coupled_values_ref(
    scores: Tensor, temperatures: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor
) -> Tensor:
    """Return the values that `coupled_choice_ref` maximises, [rows, vocab] float32 on the CPU; NaN becomes +inf."""
    keys = (tensor.cpu().numpy() for tensor in (seeds, samples, positions))
    noise = torch.from_numpy(gumbel_ref(gumbel_integers_ref(*keys, scores.shape[1])))
    plain, temperature = scores.float().cpu(), temperatures.cpu()[:, None]
    values = torch.where(temperature == 0, plain, plain / temperature + noise)
    return values.masked_fill(values.isnan(), float("inf"))


def coupled_choice_ref(
    scores: Tensor, temperatures: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor
) -> CoupledChoice:
    """Return the argmax over v of float32(scores[v]) / temperature + g[v], the lowest v on ties (reference).

    Computed with numpy and eager torch.

    Args:
        scores: [rows, vocab] float32, bfloat16 or float16: logits, or log-probabilities up to a constant. A token with
            score -inf is masked; if all are, token 0 is chosen.
        temperatures: [rows] float32, >= 0. At 0 the value is the score without noise.
        seeds: [rows] int64, the bits of an unsigned 64-bit seed.
        samples: [rows] int64, index of the sample of a prompt.
        positions: [rows] int64, position of the chosen token in the sequence.

    Returns:
        CoupledChoice. A NaN counts as +inf: it is chosen, unless a lower token is +inf, and `finite` is False.
    """
    check_coupled_choice(scores, temperatures, seeds, samples, positions)
    values = coupled_values_ref(scores, temperatures, seeds, samples, positions)
    tokens = values.argmax(dim=1, keepdim=True)
    finite = values.gather(1, tokens).isfinite()
    return CoupledChoice(tokens[:, 0].to(scores.device), finite[:, 0].to(scores.device))


def coupled_choice_triton(
    scores: Tensor, temperatures: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor
) -> CoupledChoice:
    """Compute `coupled_choice_ref` on a GPU, in two launches and without a host sync."""
    check_coupled_choice(scores, temperatures, seeds, samples, positions)
    # All arithmetic is in float32; the interpreter also widens bfloat16 correctly.
    kernels = load_kernels("sampling.coupled_choice", temperatures)
    rows, vocab = scores.shape
    num_blocks = -(-vocab // BLOCK_V)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    finite = torch.empty(rows, dtype=torch.bool, device=scores.device)
    best_values = torch.empty(rows, num_blocks, dtype=torch.float32, device=scores.device)
    best_tokens = torch.empty(rows, num_blocks, dtype=torch.int32, device=scores.device)
    kernels.choose_in_blocks[(rows, num_blocks)](
        scores,
        temperatures,
        seeds,
        samples,
        positions,
        best_values,
        best_tokens,
        vocab,
        scores.stride(0),
        BLOCK_V=BLOCK_V,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    kernels.choose_of_blocks[(rows,)](
        best_values,
        best_tokens,
        tokens,
        finite,
        NUM_BLOCKS=num_blocks,
        BLOCK_B=block_of(num_blocks),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return CoupledChoice(tokens, finite)


def check_coupled_choice(scores: Tensor, temperatures: Tensor | None, *keys: Tensor | None) -> None:
    """Check the arguments of `coupled_choice_ref`; those of the noise may be absent."""
    named = zip(("seeds", "samples", "positions"), keys, strict=True)
    check_arguments(
        scores=(scores, "rows vocab+", FLOAT_TYPES),
        temperatures=(temperatures, "rows", torch.float32),
        **{name: (key, "rows", torch.int64) for name, key in named},
    )
