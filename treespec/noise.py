"""Gumbel noise that depends on a seed, a sample, a position and a token, and on nothing else.

The target's choice at a position is the token with the largest log-probability plus noise (the Gumbel-max trick), and
drafts add the same noise to their own. As the noise of a token does not depend on what was drafted, on the batch or on
padding, sampled output is that of plain decoding with the same seed.
"""

import numpy as np

_LAST = np.float32(1 - 2**-24)  # the largest float32 below 1; a rounded 1 would make the noise infinite
_RUN = 64  # rows are computed in whole runs of so many tokens, so that none falls into a vector's tail


def integers(seed: int, sample: int, position: int, vocab_size: int) -> np.ndarray:
    """uint32 [vocab_size] of Philox4x64-10 (Salmon et al., SC 2011), uniform.

    The key is (seed, sample). Token v has the counter (1 + v // 8, 0, position, 0), word v // 2 % 4 of it, and there
    the low half where v is even, the high one where it is odd.

    Args:
        seed: 0 to 2**64 - 1.
        sample: which of a request's samples, from 0 on.
        position: of the token that is chosen, among prompt and output, from 0 on.
        vocab_size: how many tokens. A larger one leaves the integers of the others as they are.
    """
    key, counter = np.array([seed, sample], np.uint64), np.array([0, 0, position, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(_whole_runs(vocab_size) // 2)
    return words.astype("<u8", copy=False).view("<u4")[:vocab_size]


def _whole_runs(vocab_size: int) -> int:
    return -(-vocab_size // _RUN) * _RUN


def gumbel(uniform: np.ndarray) -> np.ndarray:
    """float32 noise of the same shape, -log(-log(1 - w)) for w = (x + 1/2) / 2**32 of integers x."""
    w = uniform.astype(np.float32)
    w += np.float32(0.5)
    w *= np.float32(2**-32)
    np.minimum(w, _LAST, out=w)
    np.negative(w, out=w)
    np.log1p(w, out=w)
    np.negative(w, out=w)
    np.log(w, out=w)
    return np.negative(w, out=w)


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
            row = gumbel(integers(self.seed, self.sample, position, _whole_runs(self.vocab_size)))
            self._rows[position] = row[: self.vocab_size]
        return self._rows[position]

    def forget(self, position: int) -> None:
        """Drop the rows before a position."""
        for known in [known for known in self._rows if known < position]:
            del self._rows[known]
