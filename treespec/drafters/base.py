"""The `Drafter` protocol, and the validation of custom drafters and their proposals."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from treespec.errors import ConfigError, DraftError
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.verification.reference import MAX_DEPTH

RESERVED = ("ssm", "lookup", "suffix", "table", "grammar")  # names of the engine's own sources in `SpecConfig.sources`
_METHODS = ("propose", "commit", "release")
_DTYPES: dict[str, tuple[Any, str]] = {  # dtype of each tree array, and the numpy kinds that are cast to it
    "tokens": (np.int64, "iu"),
    "parents": (np.int64, "iu"),
    "depths": (np.int64, "iu"),
    "probs": (np.float64, "iuf"),
}


@runtime_checkable
class Drafter(Protocol):
    """A custom source of token trees, passed to `LLM(drafts=[...])`.

    Proposals affect speed, never the output. If a drafter raises or does not return one tree per request, the requests
    of that call end with a `DraftError` that names the drafter; other requests continue.

    `request.tokens` holds the prompt and the output so far; its last token is the root of the tree to propose. It is
    the engine's own list: copy it before appending.

    Attributes:
        name: identifies the drafter in `SpecConfig.sources`, metrics and errors; unique among the engine's drafts.
    """

    name: str

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        """Return one tree per request, rooted at its last token and at most `max_depths[i]` deep.

        `TokenTree.from_parents` builds a tree; `TokenTree.root(request.tokens[-1])` proposes nothing. Called at most
        once per round, with the requests of the batch whose `sources` allow this drafter and whose maximum depth is
        above 0.
        """

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Receive the accepted paths through the last proposals, before `request.tokens` grows.

        `paths[i]` holds node indices of the tree that `propose` returned for `requests[i]`, root first. It stops
        before the first accepted token that this drafter did not propose.
        """

    def release(self, request: Request) -> None:
        """Free the state of a finished request. Called for every request, including those never passed to `propose`."""


class ModelFreeDrafter(Drafter, Protocol):
    """A built-in source that runs no model and learns from outputs."""

    nbytes: int  # maximum size of the data learned from outputs
    proposed: Any  # object whose `commit` evaluates the last proposals, even after the next call of `propose`

    def propose(
        self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float = 0.0
    ) -> list[TokenTree]:
        """Return one tree per request. Adaptive trees have nodes only if the best one has at least `least_value`."""

    def forget(self, running: Sequence[Request] = ()) -> None:
        """Discard all data learned from outputs; learn only from future tokens of running requests."""


def check_drafter(draft: Any) -> None:
    """Raise ConfigError if a non-model object in `LLM(drafts=[...])` is not a drafter or has an unusable name."""
    if isinstance(draft, type):
        raise ConfigError(f"drafts: {draft.__name__} is a class; pass an instance, such as {draft.__name__}()")
    kind = type(draft).__name__
    missing = [f"{name}()" for name in _METHODS if not callable(getattr(draft, name, None))]
    if len(missing) == len(_METHODS):
        raise ConfigError(
            f"drafts: {draft!r} is neither a folder, a hub id, a model nor a Drafter (name, propose, commit, release)"
        )
    if missing:
        raise ConfigError(
            f"drafts: {kind} has no {', '.join(missing)}; a Drafter has propose(), commit() and release(); commit() "
            "and release() may do nothing"
        )
    name = getattr(draft, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"drafts: {kind}.name is {name!r}; give it a name, such as name = {kind.lower()!r}")
    if name in RESERVED:
        raise ConfigError(
            f"drafts: {kind}.name is {name!r}, which is reserved for a built-in source; choose a name other than "
            f"{', '.join(map(repr, RESERVED))}"
        )


def check_names(drafters: Sequence[Drafter], models: Collection[str]) -> None:
    """Raise ConfigError unless custom drafters' names are distinct and not in `models`, the other drafts' names."""
    taken = set(models)
    for drafter in drafters:
        if drafter.name in taken:
            raise ConfigError(
                f"drafts: {type(drafter).__name__}.name is {drafter.name!r}, like another draft's; rename one of them"
            )
        taken.add(drafter.name)


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
    if tree.tokens[0] != request.tokens[-1]:
        raise error(f"a tree over token {tree.tokens[0]}; the root is the last token, {request.tokens[-1]}")
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise error(f"tokens from {tree.tokens.min()} to {tree.tokens.max()}; valid: 0 to {vocab_size - 1}")
    if not (np.isfinite(tree.probs).all() and tree.probs.min() >= 0 and tree.probs.max() <= 1):
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
