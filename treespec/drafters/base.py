"""The protocols of draft sources and of custom drafters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from treespec.errors import ConfigError, DraftError
from treespec.request import Request
from treespec.tree import TokenTree

RESERVED = ("ssm", "lookup", "suffix", "table", "grammar")  # names of the built-in sources in `SpecConfig.sources`
_METHODS = ("propose", "commit", "release")

Failures: TypeAlias = dict[Request, DraftError]


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


@dataclass(frozen=True)
class Proposals:
    """The trees proposed by one source in a round, by request id; some requests may have none."""

    trees: Mapping[str, TokenTree]
    # Receives the accepted path through each of these trees, int64, root first, up to the first accepted token that is
    # not in the tree. Returns the errors of requests for which the source failed
    commit: Callable[[Sequence[Request], Sequence[np.ndarray]], Failures | None]
    failures: Failures = field(default_factory=dict)  # requests for which the source failed


class DraftSource(ABC):
    """A source of proposals that the SSMs extend: lookup, the table, drafts with other tokenizers, custom drafters."""

    name: str
    stage = "search"  # stage of `StageClock` for its time
    nbytes = 0  # maximum size of the data learned from outputs
    is_captured = True  # whether it may propose for captured rounds

    @property
    def remembered(self) -> int:
        """Number of stored tokens of earlier outputs."""
        return 0

    @property
    def held(self) -> set[str]:
        """Ids of the requests with state in this source: those it was asked for and has not released."""
        return set()

    def may_draft(self, request: Request) -> bool:
        return request.spec.allows(self.name, self.name)

    @abstractmethod
    def propose(self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float) -> Proposals:
        """Propose trees rooted at the requests' last tokens, at most `max_depths[i]` deep.

        `least_value` is the minimum value of adaptive trees' nodes. Earlier proposals may be committed later.
        """

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release a finished request."""

    def evict(self, request: Request) -> None:  # noqa: B027
        """Release the K/V of a preempted request; its tokens remain."""

    def forget(self, running: Sequence[Request]) -> None:  # noqa: B027
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
