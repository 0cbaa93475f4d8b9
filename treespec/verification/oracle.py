"""Where verification gets its chance from: one protocol, so that a test can replay every branch instead of drawing."""

from typing import Protocol

import numpy as np

_BLOCK = 512  # of 131,072 float32 weights: 25 us for the sums of blocks this wide, 1,200 us for one running sum


class Oracle(Protocol):
    """All the randomness that a verification rule may use."""

    def choose(self, weights: np.ndarray) -> int:
        """An index, with probability proportional to its weight."""

    def flip(self, p: float) -> bool:
        """True with probability `p`."""


class RandomOracle:
    """Chance from a numpy Generator, one uniform in [0, 1) for each question.

    Args:
        generator: seeded by the caller, who may go on using it.
    """

    def __init__(self, generator: np.random.Generator):
        self._uniform = generator.random

    def flip(self, p: float) -> bool:
        """u < p: always at p = 1, never at p = 0."""
        return self._uniform() < p

    def choose(self, weights: np.ndarray) -> int:
        """The inverse of the distribution function: first over the sums of blocks, then inside one block.

        Args:
            weights: float32 or float64 [vocab], none negative, not all 0; they need not sum to 1. An index of weight 0
                never comes up.
        """
        whole = len(weights) // _BLOCK * _BLOCK
        sums = np.append(np.add.reduce(weights[:whole].reshape(-1, _BLOCK), axis=1), np.add.reduce(weights[whole:]))
        bounds = np.cumsum(sums, dtype=np.float64)
        assert 0 < bounds[-1] < np.inf, f"weights must be finite with a positive sum, not {bounds[-1]}"
        mark = self._uniform() * bounds[-1]
        # The first bound above the mark belongs to a block that adds something, so to one that holds a weight. A mark
        # can be rounded up to the last bound; the first block that reaches it is the last that adds something.
        block = int(min(np.searchsorted(bounds, mark, side="right"), np.searchsorted(bounds, bounds[-1])))
        inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
        running = np.cumsum(inside, dtype=np.float64)
        mark -= bounds[block - 1] if block else 0.0
        # The block's sum and its running sum may round differently, so the mark may lie beyond the end here too.
        return block * _BLOCK + int(
            min(np.searchsorted(running, mark, side="right"), np.searchsorted(running, running[-1]))
        )
