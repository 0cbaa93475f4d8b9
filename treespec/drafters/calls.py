"""Calls to drafters, guarded against their errors.

An exception or an invalid tree from a custom drafter fails the affected requests, never the whole batch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from treespec.drafters.base import Drafter, check_proposal
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CrossTokenizerDrafter
from treespec.drafters.lookup.lookup_drafter import LookupDrafter, LookupProposals
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.drafters.table.table_drafter import TableDrafter
from treespec.errors import DraftError, describe_error
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.utils.torch_state import outside_code

logger = logging.getLogger("treespec")

Failures: TypeAlias = dict[Request, DraftError]
Source: TypeAlias = Drafter | SsmDrafter
Committing: TypeAlias = Source | LookupProposals  # classes with a `commit` method

_REMEDY = "return a list with one TokenTree per request; TokenTree.root(request.tokens[-1]) proposes nothing"


def is_custom(drafter: Committing) -> bool:
    """Return whether a drafter is a user-defined object rather than one of the engine's own."""
    return not isinstance(drafter, SsmDrafter | LookupDrafter | LookupProposals | TableDrafter | CrossTokenizerDrafter)


def may_draft(drafter: Drafter, request: Request) -> bool:
    if isinstance(drafter, CrossTokenizerDrafter):
        return drafter.allows(request)
    return request.spec.allows(drafter.name, drafter.name)


def call_propose(
    drafter: Drafter, requests: Sequence[Request], max_depths: Sequence[int], vocab_size: int
) -> tuple[dict[str, TokenTree], Failures]:
    """Return a drafter's valid trees by request id, and its errors. Custom drafters are called for depths > 0 only."""
    indices = list(range(len(requests)))
    if is_custom(drafter):
        indices = [i for i in indices if max_depths[i] > 0 and may_draft(drafter, requests[i])]
        if not indices:
            return {}, {}
    asked, depths = [requests[i] for i in indices], [max_depths[i] for i in indices]
    failures: Failures = {}
    proposed: object = []
    with _guarded(drafter, "propose", asked, failures):
        proposed = drafter.propose(list(asked), depths)
    if len(failures) == len(asked):
        return {}, failures
    if not isinstance(proposed, list | tuple) or len(proposed) != len(asked):
        returned = f"{len(proposed)} trees" if isinstance(proposed, list | tuple) else type(proposed).__name__
        message = f"propose returned {returned} for {len(asked)} requests; {_REMEDY}"
        return {}, {request: _failure(drafter, request, message) for request in asked}
    trees: dict[str, TokenTree] = {}
    for request, tree in zip(asked, proposed, strict=True):
        try:
            trees[request.request_id] = check_proposal(drafter.name, request, tree, vocab_size)
        except DraftError as error:
            failures.setdefault(request, error)
        except Exception as error:  # a custom tree's attributes may have any type
            if not is_custom(drafter):
                raise
            reason = describe_error(error)
            message = f"propose returned a malformed tree ({reason}); TokenTree.from_parents builds valid trees"
            failures.setdefault(request, _failure(drafter, request, message))
    return trees, failures


def call_commit(drafter: Committing, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> Failures:
    """Call a drafter's `commit` with the accepted paths; return errors by request."""
    failures: Failures = {}
    with _guarded(drafter, "commit", requests, failures):
        drafter.commit(requests, paths)
    return failures


def call_release(drafter: Source, request: Request) -> None:
    """Call a drafter's `release`. The request has already ended, so an exception is only logged."""
    failures: Failures = {}
    with _guarded(drafter, "release", [request], failures):
        drafter.release(request)
    for failure in failures.values():
        logger.error("%s; the request had already ended", failure, exc_info=failure.__cause__)


@contextmanager
def _guarded(drafter: Committing, method: str, requests: Sequence[Request], failures: Failures) -> Iterator[None]:
    """Record a custom drafter's exceptions and changes to `request.tokens` in `failures`.

    Modified token lists are restored. Exceptions of the engine's own drafters are bugs and propagate.
    """
    if not is_custom(drafter):
        yield
        return
    before = [(request, request.tokens, request.tokens.copy()) for request in requests]
    try:
        with outside_code():
            yield
    except Exception as error:  # user code may raise anything
        message = f"{method} raised {describe_error(error)}; fix it, or leave the drafter out of `sources`"
        for request in requests:
            failures[request] = _failure(drafter, request, message)
            failures[request].__cause__ = error
    for request, tokens, copy in before:
        if request.tokens is not tokens or tokens != copy:
            tokens[:], request.tokens = copy, tokens
            message = f"{method} changed request.tokens, the engine's own list; work on list(request.tokens)"
            failures.setdefault(request, _failure(drafter, request, message))


def _failure(drafter: Committing, request: Request, message: str) -> DraftError:
    return DraftError(f"drafter {drafter.name!r} failed for request {request.request_id}: {message}")
