"""Source of randomness for verification; a protocol, so that tests can enumerate all outcomes."""

from typing import Protocol

import numpy as np

_BLOCK = 512  # at 131,072 float32 weights, block sums take 25 us and one cumulative sum 1,200 us


class Oracle(Protocol):
    """Source of randomness for a verification rule."""

    def choose(self, weights: np.ndarray) -> int:
        """Sample an index with probability proportional to its weight."""

    def flip(self, p: float) -> bool:
        """Return True with probability `p`."""


class RandomOracle:
    """Oracle over a numpy Generator, shared with the caller; each call consumes one uniform number in [0, 1)."""

    def __init__(self, generator: np.random.Generator):
        self._uniform = generator.random

    def flip(self, p: float) -> bool:
        """Return u < p for a uniform u: always True for p = 1, never for p = 0."""
        return self._uniform() < p

    def choose(self, weights: np.ndarray) -> int:
        """Sample an index by inverse CDF, first over block sums, then within one block.

        Weights, float32 or float64 [vocab], are non-negative and not all 0; indices with weight 0 are never returned.
        """
        full = len(weights) // _BLOCK * _BLOCK
        sums = np.append(np.add.reduce(weights[:full].reshape(-1, _BLOCK), axis=1), np.add.reduce(weights[full:]))
        bounds = np.cumsum(sums, dtype=np.float64)
        assert 0 < bounds[-1] < np.inf, f"weights must be finite with a positive sum, not {bounds[-1]}"
        mark = self._uniform() * bounds[-1]
        # The first bound above the mark belongs to a block with positive weight. Rounding may raise the mark to the
        # last bound; the first block that reaches this bound is the last one with positive weight.
        block = int(min(np.searchsorted(bounds, mark, side="right"), np.searchsorted(bounds, bounds[-1])))
        block_weights = weights[block * _BLOCK : (block + 1) * _BLOCK]
        running = np.cumsum(block_weights, dtype=np.float64)
        mark -= bounds[block - 1] if block else 0.0
        # The block's sum and its cumulative sum may round differently, so the mark may exceed the last bound here too.
        return block * _BLOCK + int(
            min(np.searchsorted(running, mark, side="right"), np.searchsorted(running, running[-1]))
        )
