"""Gumbel noise as a function of seed, sample, position and token.

The target samples the token with the largest log-probability plus noise (Gumbel-max trick). Drafts add the same noise
to their log-probabilities. The noise does not depend on drafts, batch or padding, so sampled output equals plain
decoding with the same seed. Host and kernels share the formula in `treespec_kernels.sampling.coupled_choice`.
"""

import numpy as np

from treespec_kernels.sampling.coupled_choice import gumbel_integers_of_row, gumbel_ref

_RUN = 64  # rows are padded to multiples of this, so that no token falls into a SIMD tail
# The noise is at least -2.82, and w < exp(-g) for `gumbel_ref`'s g and w, so only tokens with w < exp(2.82) * exp(score
# - best score) can be chosen. The factor leaves room for rounding.
_MARGIN = np.float32(1.05 * np.exp(2.82))
_LARGE = 2.0**17  # sums of larger scores may round by more than that


class Noise:
    """Noise of one sample, with one cached row per position."""

    def __init__(self, seed: int, sample: int, vocab_size: int):
        self.seed, self.sample, self.vocab_size = seed, sample, vocab_size
        self._rows: dict[int, np.ndarray] = {}

    def choose(self, scores: np.ndarray, position: int) -> tuple[int, float]:
        """Return the token of the largest score plus noise (first on ties), and this sum; scores: float32 [vocab].

        Computes logarithms only for tokens that can be chosen; the result is the same as when adding `row`.
        """
        max_score = scores.max()
        if not abs(max_score) < _LARGE:  # or NaN
            values = scores + self.row(position)
            token = int(values.argmax())
            return token, float(values[token])
        integers = gumbel_integers_of_row(self.seed, self.sample, position, self.vocab_size)
        bounds = np.exp(scores - max_score)
        bounds *= _MARGIN * np.float32(2**32)
        tokens = np.flatnonzero(integers.astype(np.float32) < bounds)
        noise = gumbel_ref(np.resize(integers[tokens], -(-len(tokens) // _RUN) * _RUN))
        values = scores[tokens] + noise[: len(tokens)]
        best = int(values.argmax())
        return int(tokens[best]), float(values[best])

    def row(self, position: int) -> np.ndarray:
        """Return the noise for sampling the token at `position`, float32 [vocab_size]."""
        if position not in self._rows:
            whole_runs = -(-self.vocab_size // _RUN) * _RUN
            integers = gumbel_integers_of_row(self.seed, self.sample, position, whole_runs)
            self._rows[position] = gumbel_ref(integers)[: self.vocab_size]
        return self._rows[position]

    def forget(self, position: int) -> None:
        """Drop the rows before a position."""
        for old_position in [old_position for old_position in self._rows if old_position < position]:
            del self._rows[old_position]
