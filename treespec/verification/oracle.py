"""Source of randomness for verification, behind a protocol so that tests can enumerate every outcome."""

from typing import Protocol

import numpy as np

_BLOCK = 512  # of 131,072 float32 weights: 25 us for the sums of blocks this wide, 1,200 us for one running sum


class Oracle(Protocol):
    """The randomness of a verification rule."""

    def choose(self, weights: np.ndarray) -> int:
        """Sample an index with probability proportional to its weight."""

    def flip(self, p: float) -> bool:
        """Return True with probability `p`."""


class RandomOracle:
    """Oracle over a numpy Generator; each call consumes one uniform in [0, 1).

    Args:
        generator: seeded by the caller, who may keep using it.
    """

    def __init__(self, generator: np.random.Generator):
        self._uniform = generator.random

    def flip(self, p: float) -> bool:
        """u < p: always at p = 1, never at p = 0."""
        return self._uniform() < p

    def choose(self, weights: np.ndarray) -> int:
        """Inverse-CDF sampling, first over block sums, then inside one block.

        Args:
            weights: float32 or float64 [vocab], non-negative, not all 0; they need not sum to 1. An index of weight 0
                is never returned.
        """
        whole = len(weights) // _BLOCK * _BLOCK
        sums = np.append(np.add.reduce(weights[:whole].reshape(-1, _BLOCK), axis=1), np.add.reduce(weights[whole:]))
        bounds = np.cumsum(sums, dtype=np.float64)
        assert 0 < bounds[-1] < np.inf, f"weights must be finite with a positive sum, not {bounds[-1]}"
        mark = self._uniform() * bounds[-1]
        # The first bound above the mark belongs to a block of positive weight. Rounding can lift the mark to the last
        # bound; the first block that reaches that bound is the last one of positive weight.
        block = int(min(np.searchsorted(bounds, mark, side="right"), np.searchsorted(bounds, bounds[-1])))
        inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
        running = np.cumsum(inside, dtype=np.float64)
        mark -= bounds[block - 1] if block else 0.0
        # The block's sum and its running sum may round differently, so the mark may exceed the end here too.
        return block * _BLOCK + int(
            min(np.searchsorted(running, mark, side="right"), np.searchsorted(running, running[-1]))
        )
