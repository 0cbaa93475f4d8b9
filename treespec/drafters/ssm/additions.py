"""Additions: estimated shares of accepted tokens that only a particular SSM proposes."""

from collections.abc import Sequence

import numpy as np

from treespec.tree import TokenTree

# Prior share of tokens that no other source than an additional SSM proposes, and its weight in accepted tokens.
# Without the SSMs of weight 0.22, trees of 8 and 16 nodes, including lookup, lost 2 and 3 % of their tokens.
INITIAL_SHARE, PRIOR_TOKENS = 0.12, 12.0
MEMORY = 400.0  # accepted tokens until an observation's weight decays to 1 / e
RECOVERY = 0.0015  # step towards the prior per round in which an SSM does not draft, so that it is retried


class Additions:
    """Online estimate of each SSM's `shares`: its unique accepted tokens / (all accepted tokens * its weight).

    An accepted path is cut at the first node that no other source proposed: the tokens from there on are unique.
    """

    def __init__(self, num_ssms: int) -> None:
        self._prior = np.array([[INITIAL_SHARE * PRIOR_TOKENS], [PRIOR_TOKENS]])
        self._tokens = np.repeat(self._prior, num_ssms, 1)  # float64 [2, num_ssms]: unique accepted, weighted accepted

    @property
    def shares(self) -> np.ndarray:
        """Estimates, float64 [num_ssms]: share of accepted tokens that an SSM adds, divided by its mixture weight."""
        shares: np.ndarray = self._tokens[0] / self._tokens[1]
        return shares

    def observe(self, tree: TokenTree, path: np.ndarray, names: Sequence[str], weights: np.ndarray) -> None:
        """Update from a verified tree and its accepted path; `names` and `weights` are the SSMs'."""
        drafted, accepted = weights > 0, len(path) - 1
        self._tokens[:, ~drafted] += RECOVERY * (self._prior - self._tokens[:, ~drafted])
        if accepted and drafted.sum() > 1:
            self._tokens[:, drafted] *= 1 - accepted / MEMORY
            self._tokens[1] += accepted * weights
            for depth, node in enumerate(path[1:].tolist()):
                match tree.sources_of(node):
                    case [name] if name in names:
                        self._tokens[0, names.index(name)] += accepted - depth
                        break
