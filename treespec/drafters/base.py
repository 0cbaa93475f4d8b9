"""What a source of guesses is to the engine."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from treespec.errors import DraftError
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.verify_reference import MAX_DEPTH


@runtime_checkable
class Drafter(Protocol):
    """Proposes trees. A drafter can only cost time: whatever it proposes, the output is the target's, or an error.

    `request.tokens` are the prompt and the output so far; the last of them is the root of the tree to propose.
    """

    name: str

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        """One tree per request over its last token, at most `max_depths[i]` deep; the one-node tree where none."""

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Learn what was accepted, before `request.tokens` grows.

        `paths[i]` holds, from the root on, the accepted nodes as indices into the tree that `propose` returned for
        request i; it ends at the first accepted node that this drafter did not propose.
        """

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""


def check_proposal(name: str, request: Request, tree: object, vocab_size: int) -> TokenTree:
    """What a drafter from outside proposed, if it is a tree over the request's root.

    Raises:
        DraftError: it is not, named with the drafter. Nothing of it has reached the cache.
    """

    def refuse(what: str) -> DraftError:
        return DraftError(f"drafter {name!r} proposed {what} for request {request.request_id}")

    if not isinstance(tree, TokenTree):
        raise refuse(f"{type(tree).__name__} instead of a TokenTree")
    sizes = {len(tree.tokens), len(tree.parents), len(tree.depths), len(tree.probs)}
    if len(sizes) != 1 or 0 in sizes:
        raise refuse(f"tokens, parents, depths and probs of sizes {sorted(sizes)}; they must be equal, at least 1")
    if tree.tokens[0] != request.tokens[-1]:
        raise refuse(f"a tree over token {tree.tokens[0]}; the root is the last token, {request.tokens[-1]}")
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise refuse(f"tokens from {tree.tokens.min()} to {tree.tokens.max()}; valid: 0 to {vocab_size - 1}")
    if not (np.isfinite(tree.probs).all() and tree.probs.min() >= 0 and tree.probs.max() <= 1):
        raise refuse(f"probs from {tree.probs.min()} to {tree.probs.max()}; valid: 0 to 1")
    problem = tree.find_problem()
    if problem is not None:
        raise refuse(f"a malformed tree: {problem}")
    if not request.draws_at_random:
        return tree.without_chance()
    for law in tree.draft_probs:
        if law.shape != (vocab_size,) or not (np.isfinite(law).all() and law.min() >= 0 and abs(law.sum() - 1) < 1e-5):
            raise refuse(f"draft_probs that are no probabilities of {vocab_size} tokens")
    if tree.draws.rows is not None:
        rows, excluded = tree.draws.rows.tolist(), tree.draws.excluded or [()] * len(tree.draws.rows)
        for child, row, out in zip(tree.draws.children.tolist(), rows, excluded, strict=True):
            token = int(tree.tokens[child])
            if row >= 0 and (token in out or not tree.draft_probs[row][token] > 0):
                raise refuse(f"token {token} as drawn from row {row} of its draft_probs, where it cannot come up")
            if any(not 0 <= other < vocab_size for other in out):
                raise refuse(f"excluded tokens {out}; valid: 0 to {vocab_size - 1}")
        if tree.depths.max() > MAX_DEPTH:
            raise refuse(f"a tree of depth {tree.depths.max()}; at most {MAX_DEPTH} are possible")
    return tree
