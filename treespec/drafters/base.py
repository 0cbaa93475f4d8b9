"""The `Drafter` protocol, and the validation of custom drafters and their proposals."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from treespec.errors import ConfigError, DraftError
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.verification.reference import MAX_DEPTH

RESERVED = ("ssm", "lookup", "suffix", "grammar")  # names that `SpecConfig.sources` gives another meaning
_METHODS = ("propose", "commit", "release")
_DTYPES: dict[str, tuple[Any, str]] = {  # of a tree's arrays, and the kinds of numbers that are converted to them
    "tokens": (np.int64, "iu"),
    "parents": (np.int64, "iu"),
    "depths": (np.int64, "iu"),
    "probs": (np.float64, "iuf"),
}


@runtime_checkable
class Drafter(Protocol):
    """A source of token trees, given to `LLM(drafts=[...])` as an object.

    The output is the target's own, whatever is proposed. A drafter that raises or proposes something else than trees
    ends the requests that it was asked for, with a `DraftError` that names it; other requests go on.

    `request.tokens` are the prompt and the output so far; the last of them is the root of the tree to propose. The
    engine goes on with these very lists, so copy them before adding guesses.

    Attributes:
        name: for `SpecConfig.sources`, metrics and errors; no other draft of the engine may have it.
    """

    name: str

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        """One tree per request over its last token, at most `max_depths[i]` deep.

        `TokenTree.from_parents` makes one; `TokenTree.root(request.tokens[-1])` proposes nothing. Asked once a round,
        for the requests of the batch whose `sources` allow this drafter and whose trees may grow.
        """

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Receive what was accepted of the last proposals, before `request.tokens` grows.

        `paths[i]` holds, from the root on, the accepted nodes as indices into the tree that `propose` returned for
        `requests[i]`; it ends at the first accepted node that this drafter did not propose.
        """

    def release(self, request: Request) -> None:
        """Release a finished request. Called for every request, also for those never asked about."""


def check_drafter(draft: Any) -> None:
    """Validate an object of `LLM(drafts=[...])` that is not a model.

    Raises:
        ConfigError: it is a class, lacks a part of the interface, or has a name that cannot be used.
    """
    if isinstance(draft, type):
        raise ConfigError(f"drafts: {draft.__name__} is a class; give an object of it, such as {draft.__name__}()")
    kind = type(draft).__name__
    missing = [f"{name}()" for name in _METHODS if not callable(getattr(draft, name, None))]
    if len(missing) == len(_METHODS):
        raise ConfigError(
            f"drafts: {draft!r} is neither a folder, a hub id, a model nor a Drafter (name, propose, commit, release)"
        )
    if missing:
        raise ConfigError(
            f"drafts: {kind} has no {', '.join(missing)}; a Drafter has propose(), commit() and release(), which may "
            "do nothing"
        )
    name = getattr(draft, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"drafts: {kind}.name is {name!r}; give it a name, such as name = {kind.lower()!r}")
    if name in RESERVED:
        raise ConfigError(
            f"drafts: {kind}.name is {name!r}, which names a source of the engine; valid: any name but "
            f"{', '.join(map(repr, RESERVED))}"
        )


def check_names(drafters: Sequence[Drafter], models: Collection[str]) -> None:
    """Raise ConfigError where two drafts have one name; `models` are those of drafts that are models."""
    taken = set(models)
    for drafter in drafters:
        if drafter.name in taken:
            raise ConfigError(
                f"drafts: {type(drafter).__name__}.name is {drafter.name!r}, as is another draft's; rename one of them"
            )
        taken.add(drafter.name)


def check_proposal(name: str, request: Request, tree: object, vocab_size: int) -> TokenTree:
    """Validate a drafter's proposal: it must be a tree over the request's root.

    Raises:
        DraftError: it is not. Nothing of it has reached the cache.
    """

    def refuse(what: str) -> DraftError:
        return DraftError(f"drafter {name!r} proposed {what} for request {request.request_id}")

    if not isinstance(tree, TokenTree):
        raise refuse(
            f"{type(tree).__name__} instead of a TokenTree (TokenTree.root(request.tokens[-1]) proposes nothing)"
        )
    tree = _with_usual_types(tree, refuse)
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
        return tree.as_deterministic()
    for row in tree.draft_probs:
        if row.shape != (vocab_size,) or not (np.isfinite(row).all() and row.min() >= 0 and abs(row.sum() - 1) < 1e-5):
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


def _with_usual_types(tree: TokenTree, refuse: Callable[[str], DraftError]) -> TokenTree:
    """The tree with int64 nodes and float64 probabilities, of equal lengths."""
    arrays: dict[str, Any] = {name: getattr(tree, name) for name in _DTYPES}
    changed: dict[str, Any] = {}
    for name, (dtype, kinds) in _DTYPES.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
            shown = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise refuse(f"{name} as {shown} instead of {np.dtype(dtype)} [num_nodes]; TokenTree.from_parents makes it")
        if array.dtype != dtype:
            changed[name] = array.astype(dtype)
    sizes = {len(array) for array in arrays.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise refuse(f"tokens, parents, depths and probs of sizes {sorted(sizes)}; they must be equal, at least 1")
    return replace(tree, **changed) if changed else tree
