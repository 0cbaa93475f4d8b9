"""Reduced heads: output layers that score only some tokens of the vocabulary."""

import numpy as np
import torch
from torch import Tensor


class HeadVocabulary:
    """The tokens of a reduced head's columns, int64 [width], ascending; others of all `size` have logit -inf."""

    def __init__(self, tokens: np.ndarray, size: int, device: torch.device):
        self.tokens, self.size = tokens, size
        self._columns = np.full(size, -1)
        self._columns[tokens] = np.arange(len(tokens))
        self.index = torch.from_numpy(tokens).to(device)

    def expand(self, values: Tensor, fill: float) -> Tensor:
        """Return values of the whole vocabulary, [..., size], from those of the columns, [..., width]."""
        return values.new_full((*values.shape[:-1], self.size), fill).index_copy_(-1, self.index, values)

    def probs_of(self, probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return one token's probability per row of `probs`, [num_rows, width]."""
        columns = self._columns[tokens]
        return np.where(columns >= 0, probs[np.arange(len(probs)), columns], 0)
