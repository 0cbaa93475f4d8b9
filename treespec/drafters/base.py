"""What a source of guesses is to the engine."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from treespec.request import Request
from treespec.tree import TokenTree


@runtime_checkable
class Drafter(Protocol):
    """Proposes trees. A drafter can only cost time: whatever it proposes, the output is the target's.

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
