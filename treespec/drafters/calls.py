"""Guarded calls of drafters: a custom drafter's exception or invalid tree fails single requests, never the batch."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from treespec.drafters.base import Drafter, check_proposal
from treespec.drafters.foreign.foreign_drafter import ForeignDrafter
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.errors import DraftError, describe_error
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.utils.torch_state import outside_code

logger = logging.getLogger("treespec")

Failures: TypeAlias = dict[Request, DraftError]
Source: TypeAlias = Drafter | SsmDrafter

_REMEDY = "return a list with one TokenTree for each request, TokenTree.root(request.tokens[-1]) for no guess"


def is_from_outside(drafter: Source) -> bool:
    """Whether a drafter is a user's own object."""
    return not isinstance(drafter, SsmDrafter | LookupDrafter | ForeignDrafter)


def may_draft(drafter: Drafter, request: Request) -> bool:
    """Whether a request's `sources` allow a drafter."""
    if isinstance(drafter, ForeignDrafter):
        return drafter.allows(request)
    return request.spec.allows(drafter.name, drafter.name)


def ask(
    drafter: Drafter, requests: Sequence[Request], max_depths: Sequence[int], vocab_size: int
) -> tuple[dict[str, TokenTree], Failures]:
    """The checked trees that a drafter proposes, by request id, and the requests that it failed for.

    Args:
        drafter: a user's own, or a draft with another tokenizer.
        requests: of the round.
        max_depths: of their trees.
        vocab_size: of the target.
    """
    places = list(range(len(requests)))
    if is_from_outside(drafter):
        places = [i for i in places if max_depths[i] > 0 and may_draft(drafter, requests[i])]
        if not places:
            return {}, {}
    asked, depths = [requests[i] for i in places], [max_depths[i] for i in places]
    failures: Failures = {}
    proposed: object = []
    with _guarded(drafter, "propose", asked, failures):
        proposed = drafter.propose(list(asked), depths)
    if len(failures) == len(asked):
        return {}, failures
    if not isinstance(proposed, list | tuple) or len(proposed) != len(asked):
        what = f"{len(proposed)} trees" if isinstance(proposed, list | tuple) else type(proposed).__name__
        said = f"propose returned {what} for {len(asked)} requests; {_REMEDY}"
        return {}, {request: _failure(drafter, request, said) for request in asked}
    trees: dict[str, TokenTree] = {}
    for request, tree in zip(asked, proposed, strict=True):
        try:
            trees[request.request_id] = check_proposal(drafter.name, request, tree, vocab_size)
        except DraftError as error:
            failures.setdefault(request, error)
        except Exception as error:  # of a tree made by hand, whose parts may be anything
            if not is_from_outside(drafter):
                raise
            found = describe_error(error)
            said = f"propose returned a malformed tree ({found}); TokenTree.from_parents makes a sound one"
            failures.setdefault(request, _failure(drafter, request, said))
    return trees, failures


def tell(drafter: Source, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> Failures:
    """Tell a drafter what was accepted of its trees; return the requests that it failed for."""
    failures: Failures = {}
    with _guarded(drafter, "commit", requests, failures):
        drafter.commit(requests, paths)
    return failures


def release(drafter: Source, request: Request) -> None:
    """Release a request's state in a drafter. The request has ended, so an exception is only logged."""
    failures: Failures = {}
    with _guarded(drafter, "release", [request], failures):
        drafter.release(request)
    for failure in failures.values():
        logger.error("%s; the request had ended already", failure, exc_info=failure.__cause__)


@contextmanager
def _guarded(drafter: Source, method: str, requests: Sequence[Request], failures: Failures) -> Iterator[None]:
    """Turn a custom drafter's exceptions, and changes of `request.tokens`, into failures of these requests.

    The engine's own drafters are not guarded: what they raise is a bug of the engine.
    """
    if not is_from_outside(drafter):
        yield
        return
    before = [(request, request.tokens, request.tokens.copy()) for request in requests]
    try:
        with outside_code():
            yield
    except Exception as error:  # code from outside may raise anything, and only these requests asked for it
        said = f"{method} raised {describe_error(error)}; correct it, or leave the drafter out of `sources`"
        for request in requests:
            failures[request] = _failure(drafter, request, said)
            failures[request].__cause__ = error
    for request, tokens, copy in before:
        if request.tokens is not tokens or tokens != copy:
            tokens[:], request.tokens = copy, tokens
            said = f"{method} changed request.tokens, which is the text itself; work on list(request.tokens)"
            failures.setdefault(request, _failure(drafter, request, said))


def _failure(drafter: Source, request: Request, said: str) -> DraftError:
    return DraftError(f"drafter {drafter.name!r} failed for request {request.request_id}: {said}")
