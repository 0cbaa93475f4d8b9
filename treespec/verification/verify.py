"""Verification rules: which drafted tokens are the target's own.

Vocabulary of the results. *Accepted* tokens are drafted nodes that stand for what the target would have produced. A
*recovered* token is drawn from what is left of the target's distribution after drafts were rejected, and takes their
place. A *bonus* token is the target's own choice after the last accepted node, where nothing was drafted, at no further
cost. Every rule emits the accepted tokens and then one of the other two, so every target pass emits at least one token.
Code calls that last token `bonus` in either case.

**The lemma.** Let r be the target's distribution p at a node. Take the draws there in the order in which they were
drawn, each a token x from a distribution q that may depend on all draws before it. Accept x with probability min(1,
r[x] / q[x]); otherwise go on with r = norm(max(r - q, 0)). After the last draw the token comes from r. Whatever the
draws, the token that results follows p: a draw delivers y with probability min(r, q)[y], and by rejecting leaves r[y] -
min(r, q)[y] for later, which sums to the probability of being rejected. Induction over draws, then over depth.

**The rules**, each lossless:

- *naive*: the target's token is drawn first; the walk goes on while a child carries it. The lemma with one-hot q. Needs
  no q, and holds for any tree, also one that was pruned or ordered by value. At temperature 0 it is `verify_greedy`.
- *rejection*: the lemma as it stands. With one draw for each node it is speculative sampling; with several sources
  SpecInfer's multi-step sampling (arXiv 2305.09781), with q over the tokens not drawn yet Sequoia (2402.12374) and
  recursive rejection sampling (RSD, 2402.14160), with one-hot q a child chosen without chance.
- *traversal* (2505.12398): nodes are not decided on the way down but from the leaves up, so a likely continuation can
  save an unlikely node. A node entered with acceptance a has its draws' subtrees tried first, a child's with
  min(1, a p[x] / q[x]). Every failure leaves R = max(a p - q, 0) with sum S, and the node goes on with p = R / S and
  a = S / (S + 1 - a); at last it is accepted itself with probability a. On a chain this is block verification
  (2403.10444).

**What rejection and traversal demand of a tree**, each point necessary:

1. q is the distribution that the token was really drawn from: same logits, dtype, temperature, and tokens left out.
2. Draws are tried in the order in which they were drawn.
3. No node is removed, and no rule chosen, by looking at what was drawn. *Whether* another draw is made may depend on
   the draws before it, never on later ones.
4. A token that was drawn twice is one node with two draws, and both count.

Children chosen without chance may depend on the draws before them; they belong after the random ones. On a chain
traversal accepts the most and naive the least, in the mean over drafting. Exact enumeration found the same for trees,
but not where a child without chance, or where the next draw is made, depends on what was drawn.

`verify_tree` is the readable reference, for any caller; `verify_drawn_one` is the engine's version, which reads whole
rows only where it must, and `verify_drawn` the same for several requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treespec.config import RANDOM_DRAWS
from treespec.errors import reject_unknown
from treespec.tree import TokenTree
from treespec.verification.oracle import Oracle, RandomOracle
from treespec.verification.reference import verify_tree

__all__ = ["Oracle", "RandomOracle", "Verified", "verify_drawn", "verify_drawn_one", "verify_greedy", "verify_tree"]

_MAX_SCALE = 1e30  # beyond, in float32, 0 times it is NaN; a node's acceptance is then below 1e-30 of what it was
TargetProbs = Callable[[int], np.ndarray | None]


class Verified(NamedTuple):
    """What one target pass decided for one request.

    `path`: int64 [1 + accepted], node indices from the root. `bonus`: the token after it.
    """

    path: np.ndarray
    bonus: int


def verify_greedy(tree: TokenTree, choices: np.ndarray) -> Verified:
    """Walk down from the root as long as a child carries the target's choice.

    This is the naive rule at temperature 0: lossless for any tree, whatever drafted it, because the emitted tokens are
    `choices` along the path and nothing else.

    Args:
        tree: num_nodes nodes; siblings carry different tokens.
        choices: int64 [num_nodes], the target's argmax after each node.
    """
    path, parents, tokens, wanted = [0], tree.parents.tolist(), tree.tokens.tolist(), choices.tolist()
    for node in range(1, len(tree)):  # parents precede their children
        if parents[node] == path[-1] and tokens[node] == wanted[path[-1]]:
            path.append(node)
    return Verified(np.array(path, dtype=np.int64), wanted[path[-1]])


def verify_drawn(
    rule: str, trees: Sequence[TokenTree], targets: Sequence[TargetProbs], oracles: Sequence[Oracle]
) -> list[Verified]:
    """Verify the trees of several requests, one after another, by the distributions that their draws came from.

    Args:
        rule: "rejection" or "traversal".
        trees: one for each request. A draw's distribution is the row of `draft_probs` that `draws.rows` names, without
            the tokens of `draws.excluded`, renormalised over the others; -1 or no `rows` at all is a one-hot
            distribution.
        targets: for each request, what gives float32 or float64 [vocab], the target's distribution after a node. Only
            nodes whose distribution matters are asked for, in any order; nothing is written to what it returns. None,
            which is not for the root, ends the output there: where the node is accepted, its own token is the last one.
        oracles: for each request, its randomness.

    Raises:
        ConfigError: an unknown rule.
        Exception: whatever a target raises; `verify_drawn_one` keeps that to one request.
    """
    each = zip(trees, targets, oracles, strict=True)
    return [verify_drawn_one(rule, tree, target, oracle) for tree, target, oracle in each]


def verify_drawn_one(rule: str, tree: TokenTree, target: TargetProbs, oracle: Oracle) -> Verified:
    """`verify_drawn` for one request."""
    reject_unknown("verification rule", [rule], RANDOM_DRAWS)
    below = _draws_below(tree)
    return _rejection(below, target, oracle) if rule == "rejection" else _traversal(below, target, oracle)


@dataclass(eq=False)
class _Draw:
    """One proposal: its node and token, and the distribution that it came from; no row means one-hot."""

    child: int
    token: int
    row: np.ndarray | None
    excluded: list[int]

    @cached_property
    def row_mass(self) -> float:
        """What the row sums to without the excluded tokens. Summed: 1 - (their sum) cancels where it matters."""
        if self.row is None or not self.excluded:
            return 1.0
        edges = [-1, *sorted(self.excluded), len(self.row)]
        return sum(float(np.add.reduce(self.row[a + 1 : b])) for a, b in pairwise(edges))

    @property
    def prob(self) -> float:
        q = 1.0 if self.row is None else float(self.row[self.token]) / self.row_mass
        assert q > 0, f"token {self.token} was drawn where its probability is {q}"
        return q


def _draws_below(tree: TokenTree) -> list[list[_Draw]]:
    """The draws at each node, in draw order."""
    draws, tokens = tree.draws, tree.tokens.tolist()
    below: list[list[_Draw]] = [[] for _ in tokens]
    children = draws.children.tolist()
    rows = [-1] * len(children) if draws.rows is None else draws.rows.tolist()
    excluded = draws.excluded or [()] * len(children)
    for parent, child, row, out in zip(draws.parents.tolist(), children, rows, excluded, strict=True):
        probs = tree.draft_probs[row] if row >= 0 else None
        below[parent].append(_Draw(child, tokens[child], probs, list(set(out))))
    return below


class _Residual:
    """The distribution that is left at a node, unnormalised, and the probability that the node is accepted.

    Scalars are read before rows are touched: a draw that is accepted costs no pass over the vocabulary. The target's
    own row is never written.
    """

    def __init__(self, probs: np.ndarray, accept: float = 1.0):
        self.probs, self.accept = probs, accept
        self._mass = self._summed = 1.0  # the distribution's sum now, and when it was last taken over the whole row
        self._borrowed = True

    def chance(self, draw: _Draw) -> float:
        """With which probability the draw, or something below it, is to be accepted: 0 where the target's is."""
        return min(1.0, self.accept * float(self.probs[draw.token]) / self._mass / draw.prob)

    def reject(self, draw: _Draw) -> bool:
        """Take the draw's distribution away. False where an accepted node has nothing left, which only rounding can
        bring about.

        Then r = q but for rounding, and the draw is to be accepted, as it is for certain where r = q; or, if its token
        has no probability, to be ignored.
        """
        probs, mass = self._without(draw.token) if draw.row is None else self._minus(draw, draw.row)
        if not mass > 0 and self.accept == 1:
            return False
        left = self.accept * mass / self._mass
        self.probs, self._mass, self._borrowed = probs, mass, False
        self.accept = left / (left + (1.0 - self.accept))  # stays exactly 1 where it is
        return True

    def _minus(self, draw: _Draw, row: np.ndarray) -> tuple[np.ndarray, float]:
        """max(a p - q, 0) in units of p's, so that only q is scaled, and its sum: three or four passes over the row."""
        scale = min(self._mass / (self.accept * draw.row_mass), _MAX_SCALE)
        taken = np.multiply(row, scale, dtype=self.probs.dtype)
        if draw.excluded:
            taken[draw.excluded] = 0.0
        np.minimum(self.probs, taken, out=taken)  # maximum(difference, 0) took three times as long
        left = np.subtract(self.probs, taken, out=taken)
        left[draw.token] = 0.0  # so already, but for rounding
        self._summed = float(np.add.reduce(left))
        return left, self._summed

    def _without(self, token: int) -> tuple[np.ndarray, float]:
        """The distribution with one token's probability set to 0, and its sum."""
        probs = self.probs.copy() if self._borrowed else self.probs
        mass = self._mass - float(probs[token])
        probs[token] = 0.0
        if mass < self._summed / 2:  # a difference that has lost a bit: take the sum anew
            mass = self._summed = float(np.add.reduce(probs))
        return probs, mass


def _rejection(below: Sequence[Sequence[_Draw]], target: TargetProbs, oracle: Oracle) -> Verified:
    path, token = [0], None
    while True:
        probs = target(path[-1])
        if probs is None:
            assert token is not None, "the root has a distribution"
            return Verified(np.array(path[:-1], dtype=np.int64), token)
        left = _Residual(probs)
        for draw in below[path[-1]]:
            chance = left.chance(draw)
            accepted = chance > 0 and oracle.flip(chance)
            if accepted or (not left.reject(draw) and chance > 0):
                path.append(draw.child)
                token = draw.token
                break
        else:  # no child can be what is drawn now: their tokens have nothing left
            return Verified(np.array(path, dtype=np.int64), oracle.choose(left.probs))


def _traversal(below: Sequence[Sequence[_Draw]], target: TargetProbs, oracle: Oracle) -> Verified:
    def visit(node: int, accept: float, token: int | None = None) -> tuple[list[int], int] | None:
        """With probability `accept` the path from the leaf's end up to `node`, and the token after it."""
        if not below[node] and not oracle.flip(accept):  # a leaf's distribution matters only once it is accepted
            return None
        probs = target(node)
        if probs is None:
            assert token is not None, "the root has a distribution"
            return ([], token) if not below[node] or oracle.flip(accept) else None
        if not below[node]:
            return [node], oracle.choose(probs)
        left = _Residual(probs, accept)
        for draw in below[node]:
            chance = left.chance(draw)
            found = visit(draw.child, chance, draw.token) if chance > 0 else None
            if found is None and not left.reject(draw) and chance > 0:
                found = visit(draw.child, 1.0, draw.token)
            if found is not None:
                found[0].append(node)
                return found
            if left.accept == 0:
                return None
        return ([node], oracle.choose(left.probs)) if oracle.flip(left.accept) else None

    found = visit(0, 1.0)
    assert found is not None, "the root is accepted with probability 1"
    return Verified(np.array(found[0][::-1], dtype=np.int64), found[1])
