"""Per-request mixture weights of the SSMs.

Every SSM is scored on the verified tokens, whether or not its guesses were taken (full information: HedgeSpec,
arXiv 2510.20064), on the prompt too. The weights are those of Bayes for a mixture whose best component changes now and
then: recent tokens count, older ones fade. They shape what is drafted, never what is emitted.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WINDOW = 64  # verified tokens that count at most
FADING = 0.96  # of a token's weight with each token after it
WORST = -6.0  # log-probability below which a miss counts no worse: one odd token must not decide
LEAST = 0.02  # weight that every SSM keeps, so that it comes back as soon as the text is its own again


@dataclass
class Trust:
    """Log-probability scores of one request's SSMs on its verified tokens.

    Args:
        num_ssms: how many there are.
    """

    num_ssms: int
    known: np.ndarray = field(init=False)  # int64 [num_ssms]: position behind the last token that was scored

    def __post_init__(self) -> None:
        self.known = np.zeros(self.num_ssms, dtype=np.int64)
        self._begin = np.zeros(self.num_ssms, dtype=np.int64)  # of the positions scored without a gap
        self._scores = np.zeros((self.num_ssms, 2 * WINDOW))  # by position modulo its width

    def copy(self) -> "Trust":
        """A copy with its own scores."""
        return copy.deepcopy(self)

    def observe(self, ssm: int, first: int, probs: np.ndarray) -> None:
        """Add an SSM's probabilities of the verified tokens at positions `first`, `first` + 1, ...; float [num tokens].

        Positions follow those observed before; a token that was scored already keeps its score, and a gap makes the
        scores before it forgotten.
        """
        width, known = self._scores.shape[1], int(self.known[ssm])
        skipped = max(known - first, len(probs) - width, 0)
        first, probs = first + skipped, probs[skipped:]
        if not len(probs):
            return
        end = first + len(probs)
        self._begin[ssm] = max(first if first > known else self._begin[ssm], end - width)
        self._scores[ssm, np.arange(first, end) % width] = np.maximum(np.log(np.fmax(probs, 1e-9)), WORST)  # NaN: 0
        self.known[ssm] = end

    def weights(self, ssms: Sequence[int]) -> np.ndarray:
        """float64 [len(ssms)], sum 1: by the scores of the latest positions that all of these SSMs have read."""
        if len(ssms) == 1:
            return np.ones(1)
        end = int(self.known[ssms].min())
        ages = np.arange(min(end - int(self._begin[ssms].max()), WINDOW))
        if len(ages) <= 0:
            return np.full(len(ssms), 1 / len(ssms))
        recent = self._scores[np.array(ssms)[:, None], (end - 1 - ages) % self._scores.shape[1]]
        seen = recent @ FADING**ages
        weights = np.exp(seen - seen.max())
        return LEAST + (1 - len(ssms) * LEAST) * weights / weights.sum()
