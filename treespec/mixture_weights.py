"""Per-request mixture weights of the SSMs.

Every SSM is scored on all verified tokens, including the prompt, whether or not its proposals were accepted (full
information: HedgeSpec, arXiv 2510.20064). The weights are Bayesian mixture weights with exponential decay of older
tokens, because the best SSM may change within a text. They change the drafts, never the output.
"""

import copy
from collections.abc import Sequence

import numpy as np

WINDOW = 64  # number of most recent verified tokens considered
DECAY = 0.96  # decay of a token's weight per later token
_AGES = np.arange(WINDOW)
_DECAYS = DECAY**_AGES
MIN_COMPARED = 8  # minimum number of tokens for comparing two SSMs
MIN_LOGPROB = -6.0  # scores are clipped to this minimum, so that a single outlier does not dominate
MIN_WEIGHT = 0.02  # minimum mixture weight, so that an SSM recovers quickly once its predictions improve


class MixtureWeights:
    """Log-probability scores of the SSMs on one request's verified tokens."""

    def __init__(self, num_ssms: int) -> None:
        self.known = np.zeros(num_ssms, dtype=np.int64)  # 1 + position of the last scored token
        self._begin = np.zeros(num_ssms, dtype=np.int64)  # start of the gapless range of scored positions
        self._scores = np.zeros((num_ssms, 2 * WINDOW))  # ring buffers, indexed by position modulo their width

    def copy(self) -> "MixtureWeights":
        return copy.deepcopy(self)

    def observe(self, ssm: int, first: int, probs: np.ndarray) -> None:
        """Score an SSM by its probabilities of verified tokens, float [num_tokens], from position `first` on.

        Scored tokens keep their scores. If `first` leaves a gap, earlier scores are discarded.
        """
        width, num_scored = self._scores.shape[1], int(self.known[ssm])
        skipped = max(num_scored - first, len(probs) - width, 0)
        first, probs = first + skipped, probs[skipped:]
        if not len(probs):
            return
        end = first + len(probs)
        self._begin[ssm] = max(first if first > num_scored else self._begin[ssm], end - width)
        logprobs = np.log(np.fmax(probs, 1e-9))  # fmax also replaces NaN
        start = first % width
        fits = start + len(probs) <= width
        slots = slice(start, start + len(probs)) if fits else np.arange(first, end) % width
        self._scores[ssm, slots] = np.maximum(logprobs, MIN_LOGPROB)
        self.known[ssm] = end

    def advantage(self, ssm: int, other: int) -> float | None:
        """Return a lower bound on an SSM's advantage over another one, in nats per token.

        The bound is one standard error below the mean; None if too few tokens are scored.
        """
        scores, other_scores = self._recent([ssm, other])
        if len(scores) < MIN_COMPARED:
            return None
        gains = scores - other_scores
        return float(gains.mean() - gains.std() / np.sqrt(len(gains)))

    def weights(self, ssms: Sequence[int]) -> np.ndarray:
        """Return mixture weights, float64 [len(ssms)], sum 1, from the latest positions scored for all of them."""
        if len(ssms) == 1:
            return np.ones(1)
        recent = self._recent(ssms)
        if not recent.shape[1]:
            return np.full(len(ssms), 1 / len(ssms))
        scores = recent @ _DECAYS[: recent.shape[1]]
        weights = np.exp(scores - scores.max())
        return MIN_WEIGHT + (1 - len(ssms) * MIN_WEIGHT) * weights / weights.sum()

    def _recent(self, ssms: Sequence[int]) -> np.ndarray:
        """Return the scores at the latest positions with scores of all these SSMs, float64 [len(ssms), count]."""
        end = int(self.known[ssms].min())
        count = max(min(end - int(self._begin[ssms].max()), WINDOW), 0)
        return self._scores[ssms].take((end - 1 - _AGES[:count]) % self._scores.shape[1], axis=1)
