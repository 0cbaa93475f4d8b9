"""Drafters that search texts, and requests for them: shared by the tests of both sources."""

from collections.abc import Callable

import numpy as np

from treespec import SpecConfig
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree

LOOKUP = SpecConfig(nodes=16, sources=("lookup",))
PAST = SpecConfig(nodes=16, sources=("suffix",))
BOTH = SpecConfig(nodes=16)


def new(remembers: int = 0) -> LookupDrafter:
    """Searches in numpy; test_lookup.py compares the compiled library with it."""
    return LookupDrafter(history_tokens=remembers)


def request_of(tokens: list[int], spec: SpecConfig = LOOKUP) -> Request:
    return Request(tokens, SamplingParams(), spec)


def ask(drafter: LookupDrafter, request: Request, depth: int) -> tuple[TokenTree, Callable[..., None]]:
    """The tree proposed for a request, and what counts a path of it, given as nodes."""
    proposals = drafter.propose([request], [depth], 0.0)
    tree = proposals.trees.get(request.request_id) or TokenTree.root(request.tokens[-1])
    tree.check_integrity()

    def count(*path: int) -> None:
        if proposals.trees:
            proposals.commit([request], [np.array(path)])

    return tree, count


def propose(drafter: LookupDrafter, request: Request, depth: int) -> TokenTree:
    return ask(drafter, request, depth)[0]


def write(drafter: LookupDrafter, tokens: list[int], spec: SpecConfig = PAST) -> None:
    """Let a request have come and gone that wrote these tokens behind the first of them."""
    request = request_of(tokens[:1], spec)
    request.tokens += tokens[1:]
    drafter.release(request)
