"""Verification rules: decide which drafted tokens the target accepts.

Terms: *accepted* tokens are drafted nodes that the target confirms. A *recovered* token is sampled from the target's
residual distribution after all drafts at a node were rejected. A *bonus* token is the target's choice after an accepted
leaf. Every rule emits the accepted tokens followed by one recovered or bonus token, so every target pass emits at least
one token. The code calls this last token `bonus` in both cases.

**Lemma.** Let r be the target's distribution p at a node. Process the draws there in draw order, each a token x from a
distribution q that may depend on all earlier draws. Accept x with probability min(1, r[x] / q[x]); otherwise continue
with r = norm(max(r - q, 0)). After the last draw, sample the token from r. The resulting token follows p for any draws:
a draw emits y with probability min(r, q)[y], and its rejection leaves r[y] - min(r, q)[y], which sums to the
probability of rejection. Induction over draws, then over depth.

**Rules**, all lossless:

- *naive*: sample the target's token and descend while a child has it: the lemma with one-hot q. It needs no q and is
  valid for any tree, including pruned and reordered ones. At temperature 0 it is `TokenTree.follow`.
- *rejection*: the lemma itself. One draw per node gives speculative sampling; several sources give SpecInfer's
  multi-step speculative sampling (arXiv 2305.09781); q over the tokens not yet drawn gives Sequoia (2402.12374) and
  recursive rejection sampling (RSD, 2402.14160); a one-hot q is a deterministic proposal.
- *traversal* (2505.12398): decides nodes bottom-up, so that a likely continuation can rescue an unlikely node. A node
  entered with acceptance a first tries the subtrees of its draws, a child's with acceptance min(1, a p[x] / q[x]). Each
  failure leaves R = max(a p - q, 0) with sum S, and the node continues with p = R / S and a = S / (S + 1 - a); finally
  the node itself is accepted with probability a. On a chain this is block verification (2403.10444).

**Requirements of rejection and traversal**, all necessary:

1. q is the distribution that the token was actually sampled from: same logits, dtype, temperature and excluded tokens.
2. Draws are tried in draw order.
3. No node is removed and no rule selected based on the drawn tokens. *Whether* another draw is made may depend on
   earlier draws, never on later ones.
4. A token drawn twice is one node with two draws, and both count.

Deterministic children may depend on earlier draws and follow the random ones. On a chain, averaged over drafting,
traversal accepts the most tokens and naive the fewest. Exact enumeration found the same order for trees, except if a
deterministic child, or the node of the next draw, depends on earlier draws.

`verify_tree` is the readable reference; `verify_drawn` is the engine's implementation, which reads whole rows only if
necessary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from treespec.config.configs import RANDOM_DRAWS
from treespec.errors import reject_unknown
from treespec.tree import TokenTree
from treespec.verification.oracle import Oracle, RandomOracle
from treespec.verification.reference import verify_tree

__all__ = ["Oracle", "RandomOracle", "verify_drawn", "verify_tree"]

_MAX_SCALE = 1e30  # larger scales overflow float32 (0 * inf = NaN); the acceptance is then below 1e-30
TargetProbs = Callable[[int], np.ndarray | None]


def verify_drawn(rule: str, tree: TokenTree, target: TargetProbs, oracle: Oracle) -> tuple[np.ndarray, int]:
    """Verify a tree by "rejection" or "traversal": return the accepted path, int64, root first, and the token after it.

    A draw's distribution is its row of `draft_probs`, renormalised without the tokens of `draw_excluded`; a row of -1,
    or `draw_rows` None, means one-hot. `target` returns the target's distribution after a node, float32 or float64
    [vocab]. It is called only for nodes whose distribution is needed, in any order; its result is not modified. If it
    returns None (never for the root), the output ends: if accepted, the node's token is the last one.
    """
    reject_unknown("verification rule", [rule], RANDOM_DRAWS)
    draws = draws_below(tree)
    return _rejection(draws, target, oracle) if rule == "rejection" else _traversal(draws, target, oracle)


@dataclass(eq=False)
class Draw:
    """A proposal: its node, its token and the distribution it was sampled from (row None means one-hot)."""

    child: int
    token: int
    row: np.ndarray | None
    excluded: list[int]

    @cached_property
    def row_mass(self) -> float:
        """Sum of the row without the excluded tokens, summed directly, because 1 - (their sum) suffers cancellation."""
        if self.row is None or not self.excluded:
            return 1.0
        edges = [-1, *sorted(self.excluded), len(self.row)]
        return sum(float(np.add.reduce(self.row[a + 1 : b])) for a, b in pairwise(edges))

    @property
    def prob(self) -> float:
        q = 1.0 if self.row is None else float(self.row[self.token]) / self.row_mass
        assert q > 0, f"token {self.token} was drawn where its probability is {q}"
        return q


def draws_below(tree: TokenTree) -> list[list[Draw]]:
    """Return the draws at each node, in draw order."""
    tokens, parents, children = tree.tokens.tolist(), tree.parents.tolist(), tree.draw_nodes.tolist()
    draws: list[list[Draw]] = [[] for _ in tokens]
    rows = [-1] * len(children) if tree.draw_rows is None else tree.draw_rows.tolist()
    excluded = tree.draw_excluded or [()] * len(children)
    for child, row, out in zip(children, rows, excluded, strict=True):
        probs = tree.draft_probs[row] if row >= 0 else None
        draws[parents[child]].append(Draw(child, tokens[child], probs, list(set(out))))
    return draws


class Residual:
    """Unnormalised residual distribution at a node, float [vocab], and the probability that the node is accepted.

    Accepting a draw takes only scalar operations, no pass over the vocabulary. The target's row is never modified.
    """

    def __init__(self, probs: np.ndarray, accept: float = 1.0):
        self.probs, self.accept = probs, accept
        self.mass = self._summed = 1.0  # current sum, and the last sum computed over the whole row
        self._borrowed = True  # `probs` is the caller's array

    def chance(self, draw: Draw) -> float:
        """Return the probability of accepting the draw or a node below it; 0 if the target's probability is 0."""
        return min(1.0, self.accept * float(self.probs[draw.token]) / self.mass / draw.prob)

    def reject(self, draw: Draw) -> bool:
        """Subtract the draw's distribution; return False if an accepted node has no mass left.

        Only rounding causes this. Then r = q up to rounding, and the caller accepts the draw (at r = q its
        acceptance probability is 1) or, if the token's probability is 0, ignores it.
        """
        probs, mass = self.without(draw.token) if draw.row is None else self._minus(draw, draw.row)
        if not mass > 0 and self.accept == 1:
            return False
        remaining = self.accept * mass / self.mass
        self.probs, self.mass, self._borrowed = probs, mass, False
        self.accept = remaining / (remaining + (1.0 - self.accept))  # 1 stays exactly 1
        return True

    def _minus(self, draw: Draw, row: np.ndarray) -> tuple[np.ndarray, float]:
        """Return max(a p - q, 0) in the scale of p, and its sum, in three or four passes (only q is scaled)."""
        scale = min(self.mass / (self.accept * draw.row_mass), _MAX_SCALE)
        subtracted = np.multiply(row, scale, dtype=self.probs.dtype)
        if draw.excluded:
            subtracted[draw.excluded] = 0.0
        np.minimum(self.probs, subtracted, out=subtracted)  # `np.maximum(difference, 0)` would be three times slower
        difference = np.subtract(self.probs, subtracted, out=subtracted)
        difference[draw.token] = 0.0  # 0 up to rounding
        self._summed = float(np.add.reduce(difference))
        return difference, self._summed

    def without(self, token: int) -> tuple[np.ndarray, float]:
        """Return the distribution with one token's probability set to 0, and its sum."""
        probs = self.probs.copy() if self._borrowed else self.probs
        mass = self.mass - float(probs[token])
        probs[token] = 0.0
        if mass < self._summed / 2:  # the subtraction loses precision: recompute the sum
            mass = self._summed = float(np.add.reduce(probs))
        return probs, mass


def _rejection(draws: Sequence[Sequence[Draw]], target: TargetProbs, oracle: Oracle) -> tuple[np.ndarray, int]:
    path, token = [0], None
    while True:
        probs = target(path[-1])
        if probs is None:
            assert token is not None, "the root always has a distribution"
            return np.array(path[:-1], dtype=np.int64), token
        residual = Residual(probs)
        for draw in draws[path[-1]]:
            chance = residual.chance(draw)
            accepted = chance > 0 and oracle.flip(chance)
            if accepted or (not residual.reject(draw) and chance > 0):
                path.append(draw.child)
                token = draw.token
                break
        else:  # all children were rejected and have no residual mass
            return np.array(path, dtype=np.int64), oracle.choose(residual.probs)


def _traversal(draws: Sequence[Sequence[Draw]], target: TargetProbs, oracle: Oracle) -> tuple[np.ndarray, int]:
    def visit(node: int, accept: float, token: int | None = None) -> tuple[list[int], int] | None:
        """With probability `accept`, return the path from its deepest node up to `node` and the token after it."""
        if not draws[node] and not oracle.flip(accept):  # a leaf's distribution is needed only if the leaf is accepted
            return None
        probs = target(node)
        if probs is None:
            assert token is not None, "the root always has a distribution"
            return ([], token) if not draws[node] or oracle.flip(accept) else None
        if not draws[node]:
            return [node], oracle.choose(probs)
        residual = Residual(probs, accept)
        for draw in draws[node]:
            chance = residual.chance(draw)
            result = visit(draw.child, chance, draw.token) if chance > 0 else None
            if result is None and not residual.reject(draw) and chance > 0:
                result = visit(draw.child, 1.0, draw.token)
            if result is not None:
                result[0].append(node)
                return result
            if residual.accept == 0:
                return None
        return ([node], oracle.choose(residual.probs)) if oracle.flip(residual.accept) else None

    result = visit(0, 1.0)
    assert result is not None, "the root is accepted with probability 1"
    return np.array(result[0][::-1], dtype=np.int64), result[1]
