"""Coupled choice: a sample per row with Gumbel noise that depends only on seed, sample, position and token.

The chosen token v has the largest score(v) / temperature + g(v), which `row_topk` finds. A draft and its target, or a
tree and plain decoding, thus draw the same noise g and choose the same token if their scores are equal. The noise is
computed from a 32-bit integer x of Philox4x64-10 (Salmon et al., SC11): key (seed, sample), counter
(1 + v // 8, 0, position, 0), output word v // 2 % 4, its low half for even v and its high half for odd v. In float32:
w = (x + 1/2) * 2^-32, clamped to at most 1 - 2^-24, and g = -log(-log1p(-w)). Without the 1/2, g would be infinite for
x = 0, and without the clamp for the largest x: about once in 8,000 tokens of a vocabulary of 4,096.

The integers are identical in all implementations. Logarithms may differ in their last bits, so two implementations may
choose differently when the two best values are that close. Within one implementation choices are reproducible: a
token's value does not depend on the batch, the row or the vocabulary, and a maximum does not depend on order.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.launch.arguments import Argument


class RowNoise(NamedTuple):
    """Temperatures, and the keys of the noise."""

    temperatures: Tensor  # [rows] float32, >= 0. At 0, a token's value is its score without noise
    seeds: Tensor  # [rows] int64, the bits of an unsigned 64-bit seed
    samples: Tensor  # [rows] int64, sample index of the prompt
    positions: Tensor  # [rows] int64, position of the chosen token in the sequence

    @property
    def arguments(self) -> dict[str, Argument]:
        """The tensors as arguments of `check_arguments`."""
        dtypes = (torch.float32, *[torch.int64] * 3)
        return {name: (key, "rows", dtype) for (name, key), dtype in zip(self._asdict().items(), dtypes, strict=True)}


def gumbel_integers_of_row(seed: int, sample: int, position: int, vocab: int) -> np.ndarray:
    """Return the integers x of one row, [vocab] uint32. A token's integer does not depend on the vocabulary's size."""
    key = np.array([seed, sample], dtype=np.uint64)
    counter = np.array([0, 0, position, 0], dtype=np.uint64)  # numpy increments it before the first block
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


def coupled_values_ref(scores: Tensor, noise: RowNoise) -> Tensor:
    """Return float32(scores) / temperature + g, [rows, vocab] float32 on the CPU; NaN becomes +inf."""
    seeds, samples, positions = (tensor.cpu().numpy() for tensor in noise[1:])
    gumbel = torch.from_numpy(gumbel_ref(gumbel_integers_ref(seeds, samples, positions, scores.shape[1])))
    plain, temperature = scores.float().cpu(), noise.temperatures.cpu()[:, None]
    values = torch.where(temperature == 0, plain, plain / temperature + gumbel)
    return values.masked_fill(values.isnan(), float("inf"))
