"""Evidence ratios: combine the SSMs' probabilities with the proposals of other sources.

A *seed* is a node proposed by lookup, suffix, grammar or a cross-tokenizer draft. If the SSMs' mixture gives a token
the probability m and a seed with the same token has its own probability q, the combined odds are the odds of m times
the seed's *evidence ratio*, a likelihood ratio:

    log ratio = bias + slope * logit(q)

Bias and slope are the parameters of a logistic regression with offset logit(m), updated online with every verified
seed. They change the drafts, never the output.
"""

import math

import numpy as np

from treespec.tree import TokenTree

# Tuned for acceptance with the embedded SSMs and lookup; the maximum-likelihood values are 1.0 and 0.635.
BIAS, SLOPE = 0.6, 0.64
PRIOR_COUNT = 500.0  # weight of the initial values, in observed seeds
MEMORY = 4000.0  # time constant of the exponential decay, in observed seeds
MIN_PROB, MAX_PROB = 1e-4, 0.999  # a seed's probability is clipped to this range
_SLOPE_RANGE = 0.0, 2.0  # no negative slopes: the ratio must not fall as a seed's probability rises
_BIAS_RANGE = -4.0, 6.0


class SeedEvidence:
    """Online estimate of the seeds' evidence ratios, shared by all requests of an engine."""

    def __init__(self, bias: float = BIAS, slope: float = SLOPE) -> None:
        self.bias, self.slope = bias, slope
        # Diagonal of the Fisher information, assuming p (1 - p) = 1/6 and logit(q) ** 2 = 4.
        self._information = [PRIOR_COUNT / 6, 4 * PRIOR_COUNT / 6]

    def ratios(self, probs: np.ndarray) -> np.ndarray:
        """Return evidence ratios for the seeds' probabilities; float32, positive and finite."""
        clipped = np.minimum(np.maximum(probs.astype(np.float64), MIN_PROB), MAX_PROB)  # 5 us faster than `np.clip`
        return np.exp(self.bias + self.slope * np.log(clipped / (1 - clipped))).astype(np.float32)

    def observe(self, tree: TokenTree, seed_tree: TokenTree, path: np.ndarray, bonus: int) -> None:
        """Update from a verified tree grown over `seed_tree`, its accepted path and the bonus token."""
        above, values = 0, tree.values.tolist()  # above: the seed at the path's node
        value_of = dict(zip(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), values, strict=True))
        seeds = [*zip(seed_tree.parents.tolist(), seed_tree.tokens.tolist(), seed_tree.probs.tolist(), strict=True)]
        for node, token in zip(path.tolist(), [*tree.tokens[path[1:]].tolist(), bonus], strict=True):
            value, accepted = values[node], None
            for seed, (parent, seed_token, prob) in enumerate(seeds):
                if parent != above:
                    continue
                if correct := seed_token == token:
                    accepted = seed
                # Without an SSM's estimate, the node keeps the seed's own probability and says nothing about the ratio.
                matching = value_of.get((node, seed_token))
                merged = prob if matching is None or value <= 0 else min(matching / value, 1.0)
                if abs(merged - prob) > 1e-6 * prob:
                    self._update(prob, merged, correct)
            if accepted is None:
                return
            above = accepted

    def _update(self, prob: float, merged: float, correct: bool) -> None:
        """Take one Newton step with the diagonal of the Fisher information.

        `prob` is the seed's own probability, `merged` its probability in the tree.
        """
        prob = min(max(prob, MIN_PROB), MAX_PROB)
        logit, variance, error = math.log(prob / (1 - prob)), merged * (1 - merged), correct - merged
        bias_information, slope_information = (information * (1 - 1 / MEMORY) for information in self._information)
        self._information = [bias_information + variance, slope_information + variance * logit**2]
        bias_information, slope_information = (max(information, 1.0) for information in self._information)
        self.bias = min(max(self.bias + error / bias_information, _BIAS_RANGE[0]), _BIAS_RANGE[1])
        self.slope = min(max(self.slope + error * logit / slope_information, _SLOPE_RANGE[0]), _SLOPE_RANGE[1])
