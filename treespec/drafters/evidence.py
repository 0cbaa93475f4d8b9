"""Evidence ratios: how far proposals of lookup and other sources change the SSMs' odds, learned from verified tokens.

Where SSMs give a token the probability m and a seed (a node that lookup, suffix, grammar or a foreign draft proposes)
has its own probability q, the odds of the token are those of m times the seed's *evidence ratio*, a likelihood ratio:

    log ratio = bias + slope * logit(q)

Bias and slope are a logistic regression with the offset logit(m), updated online with every verified guess. They shape
what is drafted, never what is emitted.
"""

import math
from typing import Protocol

import numpy as np

from treespec.tree import TokenTree

BIAS, SLOPE = 0.6, 0.64  # by acceptance of the embedded SSMs and lookup; the likelihood alone says 1.0 and 0.635
PRIOR_GUESSES = 500.0  # that the shipped values count for
MEMORY = 4000.0  # guesses after which older ones fade
_LEAST_SEED, _MOST_SEED = 1e-4, 0.999
_SLOPES = 0.0, 2.0  # range of the slope: a surer seed never tells less
_BIASES = -4.0, 6.0


class GrownTree(Protocol):
    """What is read of a verified tree; arrays as of a `TokenTree`."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def parents(self) -> np.ndarray: ...

    @property
    def values(self) -> np.ndarray: ...


class SeedEvidence:
    """Evidence ratios of seeds. An engine has one for all its requests."""

    def __init__(self, bias: float = BIAS, slope: float = SLOPE) -> None:
        self.bias, self.slope = bias, slope
        # Diagonal of the Fisher information: p (1 - p) of about 1/6, and logit(q) ** 2 of about 4.
        self._information = [PRIOR_GUESSES / 6, 4 * PRIOR_GUESSES / 6]

    def ratios(self, probs: np.ndarray) -> np.ndarray:
        """Evidence ratios by the seeds' own probabilities; float32, positive and finite."""
        own = np.clip(np.asarray(probs, dtype=np.float64), _LEAST_SEED, _MOST_SEED)
        return np.exp(self.bias + self.slope * np.log(own / (1 - own))).astype(np.float32)

    def observe(self, tree: GrownTree, seed: TokenTree, path: np.ndarray, bonus: int) -> None:
        """Learn from one verified tree.

        Args:
            tree: as verified.
            seed: the tree of sources without a pass that it was grown over.
            path: accepted nodes of `tree`, the root first.
            bonus: the target's token after the last one.
        """
        place, chosen = 0, [*tree.tokens[path[1:]].tolist(), bonus]
        for node, token in zip(path.tolist(), chosen, strict=True):
            below, following = np.flatnonzero(tree.parents == node), -1
            value = float(tree.values[node])
            for child in np.flatnonzero(seed.parents == place).tolist():
                named = below[tree.tokens[below] == seed.tokens[child]]
                held = int(seed.tokens[child]) == token
                if held:
                    following = child
                own = float(seed.probs[child])
                # Where no SSM spoke, the probability is the seed's own, and says nothing about the ratio.
                merged = min(float(tree.values[named[0]]) / value, 1.0) if len(named) and value > 0 else own
                if abs(merged - own) > 1e-6 * own:
                    self._learn(own, merged, held)
            if following < 0:
                return
            place = following

    def _learn(self, own: float, merged: float, held: bool) -> None:
        """One step of Newton's method on the diagonal."""
        own = min(max(own, _LEAST_SEED), _MOST_SEED)
        logit, variance, missed = math.log(own / (1 - own)), merged * (1 - merged), held - merged
        of_bias, of_slope = (information * (1 - 1 / MEMORY) for information in self._information)
        self._information = [of_bias + variance, of_slope + variance * logit**2]
        of_bias, of_slope = (max(information, 1.0) for information in self._information)
        self.bias = min(max(self.bias + missed / of_bias, _BIASES[0]), _BIASES[1])
        self.slope = min(max(self.slope + missed * logit / of_slope, _SLOPES[0]), _SLOPES[1])
