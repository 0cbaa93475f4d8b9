"""Gumbel noise that depends on a seed, a sample, a position and a token, and on nothing else.

The target's choice at a position is the token with the largest log-probability plus noise (the Gumbel-max trick), and
drafts add the same noise to their own. As the noise of a token does not depend on what was drafted, on the batch or on
padding, sampled output is that of plain decoding with the same seed. The formula is
`treespec_kernels.sampling.coupled_choice`'s, for this module and for the kernels alike.
"""

import numpy as np

from treespec_kernels.sampling.coupled_choice import gumbel_integers_of_row, gumbel_ref

_RUN = 64  # rows are computed in whole runs of so many tokens, so that none falls into a vector's tail


class Noise:
    """The noise of one sample, a row for each position, kept until the output has passed it.

    Args:
        seed: 0 to 2**64 - 1.
        sample: which of the request's samples.
        vocab_size: of the target.
    """

    def __init__(self, seed: int, sample: int, vocab_size: int):
        self.seed, self.sample, self.vocab_size = seed, sample, vocab_size
        self._rows: dict[int, np.ndarray] = {}

    def row(self, position: int) -> np.ndarray:
        """float32 [vocab_size], of the token that is chosen at `position`."""
        if position not in self._rows:
            whole_runs = -(-self.vocab_size // _RUN) * _RUN
            integers = gumbel_integers_of_row(self.seed, self.sample, position, whole_runs)
            self._rows[position] = gumbel_ref(integers)[: self.vocab_size]
        return self._rows[position]

    def forget(self, position: int) -> None:
        """Drop the rows before a position."""
        for known in [known for known in self._rows if known < position]:
            del self._rows[known]
