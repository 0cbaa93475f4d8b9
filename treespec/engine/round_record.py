"""Round records, and the observers that receive them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treespec.errors import ConfigError
from treespec.planning.draft_plan import PlainReason
from treespec.planning.round_costs import RoundSeconds
from treespec.tree import TokenTree
from treespec.utils.torch_state import outside_code

if TYPE_CHECKING:
    from treespec.engine.executor import VerifiedRequest

logger = logging.getLogger("treespec")

RoundObserver = Callable[["RoundRecord"], object]


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round of one request: the verified token tree and the accepted path.

    In rounds replayed from CUDA graphs, `tree.draw_probs` of SSMs are NaN: the device keeps the mixture, `tree.probs`.

    Attributes:
        request_id: as in `RequestOutput`.
        number: index of the round within the sample, from 1.
        context: prompt and output tokens before the root.
        tree: the verified nodes with probabilities and sources.
        path: int64 [1 + accepted], the accepted nodes, root first.
        bonus: the target's token after the path; None if the output ended inside the path.
        index: of the sample, as in `CompletionOutput.index`.
        seconds: duration of the round, for all of its requests.
        target_seconds: duration of the target pass; in captured rounds, with verification and commit.
        draft_seconds: duration of drafts that run a model.
        plain_reasons: why nothing was drafted, empty if something was. "off": speculation is off. "room": only one more
            token fits. "reading": the SSMs still read the prompt. "drafting_cost": a draft level is not expected to
            pay. "drafting_paused": it did not pay or was not expected to, and is reconsidered later.
            "model_free_paused": likewise for sources without a model. "nothing_proposed": the sources that were asked
            proposed nothing. "cut": none of the proposed nodes is expected to pay, or is allowed.
    """

    request_id: str
    number: int
    context: list[int]
    tree: TokenTree
    path: np.ndarray
    bonus: int | None
    index: int = 0
    seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    plain_reasons: tuple[PlainReason, ...] = ()

    @property
    def accepted(self) -> int:
        """The number of accepted drafted tokens."""
        return len(self.path) - 1

    @property
    def emitted(self) -> list[int]:
        """The tokens added to the output."""
        tokens = self.tree.tokens[self.path[1:]].tolist()
        return tokens if self.bonus is None else [*tokens, self.bonus]

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON-serialisable values; `sources` lists names by node, none for the root."""
        tree = self.tree
        return {
            "request_id": self.request_id,
            "index": self.index,
            "number": self.number,
            "context": self.context,
            "tokens": tree.tokens.tolist(),
            "parents": tree.parents.tolist(),
            "probs": tree.probs.tolist(),
            "sources": [list(tree.sources_of(node)) for node in range(len(tree))],
            "path": self.path.tolist(),
            "bonus": self.bonus,
            "seconds": self.seconds,
            "target_seconds": self.target_seconds,
            "draft_seconds": self.draft_seconds,
            "plain_reasons": list(self.plain_reasons),
        }

    @classmethod
    def of(
        cls,
        verified: "VerifiedRequest",
        emitted: int,
        seconds: RoundSeconds,
        other_seconds: float,
        plain_reasons: tuple[PlainReason, ...],
    ) -> "RoundRecord":
        """Record a round whose `emitted` tokens were just added; a stop may have cut the path and the bonus token."""
        request, path = verified.request, verified.path
        complete = emitted == len(path)  # the accepted nodes and the bonus token
        return cls(
            request.output_id,
            request.num_rounds,
            request.tokens[: len(request.tokens) - emitted - 1],
            verified.tree,
            path if complete else path[: 1 + emitted],
            int(verified.bonus) if complete else None,
            request.sample,
            sum(seconds) + other_seconds,
            seconds.forward,
            seconds.draft + seconds.read + other_seconds,
            plain_reasons,
        )


class ObserverHandle:
    """Handle of a registered observer; `remove()` or leaving a `with` block unregisters it."""

    def __init__(self, observer: RoundObserver, registered: "list[ObserverHandle]"):
        self._observer, self._registered = observer, registered
        registered.append(self)

    def remove(self) -> None:
        """Unregister the observer. Idempotent."""
        if self in self._registered:
            self._registered.remove(self)

    def __enter__(self) -> "ObserverHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class RoundObservers:
    """The observers of an engine; falsy if there are none."""

    def __init__(self) -> None:
        self._handles: list[ObserverHandle] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, observer: RoundObserver) -> ObserverHandle:
        if not callable(observer):
            raise ConfigError(f"observer={observer!r}; valid: a function that takes a RoundRecord")
        return ObserverHandle(observer, self._handles)

    def notify(self, record: RoundRecord) -> None:
        """Call every observer. One that raises is logged and removed; the request continues."""
        for handle in list(self._handles):
            try:
                with outside_code():
                    handle._observer(record)
            except Exception:
                handle.remove()
                name = getattr(handle._observer, "__qualname__", type(handle._observer).__name__)
                logger.exception(
                    "round observer %s failed in round %d of request %s and was removed; the request continues",
                    name,
                    record.number,
                    record.request_id,
                )
