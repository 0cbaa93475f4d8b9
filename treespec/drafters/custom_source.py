"""Custom drafters as draft sources, with guarded calls and validated trees."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from treespec.drafters.base import Drafter, DraftSource, Failures, Proposals
from treespec.errors import DraftError, describe_error
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.utils.torch_state import outside_code
from treespec.verification.reference import MAX_DEPTH

logger = logging.getLogger("treespec")

_REMEDY = "return a list with one TokenTree per request; TokenTree.root(request.tokens[-1]) proposes nothing"
_DTYPES: dict[str, tuple[Any, str]] = {  # dtype of each tree array, and the numpy kinds that are cast to it
    "tokens": (np.int64, "iu"),
    "parents": (np.int64, "iu"),
    "depths": (np.int64, "iu"),
    "probs": (np.float64, "iuf"),
}


class CustomSource(DraftSource):
    """A custom drafter. Its exceptions and invalid trees fail the affected requests, never the whole batch."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.name, self._vocab_size = drafter, drafter.name, vocab_size

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float) -> Proposals:
        """Like `DraftSource.propose`; calls the drafter only for depths greater than 0."""
        trees: dict[str, TokenTree] = {}
        proposals = Proposals(trees, self._commit)
        asked = [(r, depth) for r, depth in zip(requests, max_depths, strict=True) if depth > 0 and self.may_draft(r)]
        if not asked:
            return proposals
        requests_asked, failures = [request for request, _ in asked], proposals.failures
        proposed: object = []
        with self._guarded("propose", requests_asked, failures):
            proposed = self.drafter.propose(list(requests_asked), [depth for _, depth in asked])
        if len(failures) == len(asked):
            return proposals
        if not isinstance(proposed, list | tuple) or len(proposed) != len(asked):
            returned = f"{len(proposed)} trees" if isinstance(proposed, list | tuple) else type(proposed).__name__
            message = f"propose returned {returned} for {len(asked)} requests; {_REMEDY}"
            failures |= {request: self._failure(request, message) for request in requests_asked}
            return proposals
        for request, tree in zip(requests_asked, proposed, strict=True):
            try:
                trees[request.request_id] = check_proposal(self.name, request, tree, self._vocab_size)
            except DraftError as error:
                failures.setdefault(request, error)
            except Exception as error:  # attributes of a hand-built tree may be of any type
                reason = describe_error(error)
                message = f"propose returned a malformed tree ({reason}); TokenTree.from_parents builds valid trees"
                failures.setdefault(request, self._failure(request, message))
        return proposals

    def _commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> Failures:
        failures: Failures = {}
        with self._guarded("commit", requests, failures):
            self.drafter.commit(requests, paths)
        return failures

    def release(self, request: Request) -> None:
        """Release a finished request. It has already ended, so exceptions are only logged."""
        failures: Failures = {}
        with self._guarded("release", [request], failures):
            self.drafter.release(request)
        for failure in failures.values():
            logger.error("%s; the request had ended already", failure, exc_info=failure.__cause__)

    @contextmanager
    def _guarded(self, method: str, requests: Sequence[Request], failures: Failures) -> Iterator[None]:
        """Record the drafter's exceptions and changes to `request.tokens` in `failures`; restore changed lists."""
        before = [(request, request.tokens, request.tokens.copy()) for request in requests]
        try:
            with outside_code():
                yield
        except Exception as error:  # user code may raise anything
            message = f"{method} raised {describe_error(error)}; fix it, or leave the drafter out of `sources`"
            for request in requests:
                failures[request] = self._failure(request, message)
                failures[request].__cause__ = error
        for request, tokens, copy in before:
            if request.tokens is not tokens or tokens != copy:
                tokens[:], request.tokens = copy, tokens
                message = f"{method} changed request.tokens, the engine's own list; work on list(request.tokens)"
                failures.setdefault(request, self._failure(request, message))

    def _failure(self, request: Request, message: str) -> DraftError:
        return DraftError(f"drafter {self.name!r} failed for request {request.request_id}: {message}")


def check_proposal(name: str, request: Request, tree: object, vocab_size: int) -> TokenTree:
    """Validate a drafter's proposal for a request; return the tree with canonical dtypes.

    Raises DraftError unless `tree` is a well-formed TokenTree rooted at the request's last token.
    """

    def error(proposal: str) -> DraftError:
        return DraftError(f"drafter {name!r} proposed {proposal} for request {request.request_id}")

    if not isinstance(tree, TokenTree):
        raise error(
            f"{type(tree).__name__} instead of a TokenTree (TokenTree.root(request.tokens[-1]) proposes nothing)"
        )
    tree = _cast_arrays(tree, error)
    tokens, probs = tree.tokens.tolist(), tree.probs.tolist()
    if tokens[0] != request.tokens[-1]:
        raise error(f"a tree over token {tokens[0]}; the root is the last token, {request.tokens[-1]}")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise error(f"tokens from {min(tokens)} to {max(tokens)}; valid: 0 to {vocab_size - 1}")
    if not all(0 <= prob <= 1 for prob in probs):
        raise error(f"probs from {tree.probs.min()} to {tree.probs.max()}; valid: 0 to 1")
    problem = tree.find_problem()
    if problem is not None:
        raise error(f"a malformed tree: {problem}")
    if not request.draws_at_random:
        return tree.as_deterministic()
    for row in tree.draft_probs:
        if row.shape != (vocab_size,) or not (np.isfinite(row).all() and row.min() >= 0 and abs(row.sum() - 1) < 1e-5):
            raise error(f"draft_probs that are not probabilities of {vocab_size} tokens")
    if tree.draw_rows is not None:
        rows, excluded = tree.draw_rows.tolist(), tree.draw_excluded or [()] * len(tree.draw_rows)
        for child, row, out in zip(tree.draw_nodes.tolist(), rows, excluded, strict=True):
            token = int(tree.tokens[child])
            if row >= 0 and (token in out or not tree.draft_probs[row][token] > 0):
                raise error(f"token {token} as drawn from row {row} of draft_probs, which excludes it")
            if any(not 0 <= other < vocab_size for other in out):
                raise error(f"excluded tokens {out}; valid: 0 to {vocab_size - 1}")
        if tree.depths.max() > MAX_DEPTH:
            raise error(f"a tree of depth {tree.depths.max()}; at most {MAX_DEPTH} are possible")
    return tree


def _cast_arrays(tree: TokenTree, error: Callable[[str], DraftError]) -> TokenTree:
    """Cast a tree's arrays to int64 nodes and float64 probabilities, and check that their lengths agree."""
    arrays: dict[str, Any] = {name: getattr(tree, name) for name in _DTYPES}
    changed: dict[str, Any] = {}
    for name, (dtype, kinds) in _DTYPES.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
            shown = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise error(
                f"{name} as {shown} instead of {np.dtype(dtype)} [num_nodes]; TokenTree.from_parents builds valid trees"
            )
        if array.dtype != dtype:
            changed[name] = array.astype(dtype)
    sizes = {len(array) for array in arrays.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise error(f"tokens, parents, depths and probs of sizes {sorted(sizes)}; they must be equal and at least 1")
    return replace(tree, **changed) if changed else tree
