"""The SSM group in captured rounds, where trees grow and emitted tokens are prefilled on the device."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.request import Request
from treespec.tree import TokenTree


class CapturedSsms:
    """The host state of drafting in captured rounds: the SSMs' K/V lengths and mixture weights."""

    def __init__(self, ssms: SsmDrafter):
        self.ssms = ssms

    def catch_up(self, requests: Sequence[Request], width: int) -> bool:
        """Compute the SSMs' missing K/V before a round that itself reads the last `width` tokens.

        With a draft head, the round does not read the first token, at whose position a head has no row. Return whether
        any SSM missed more tokens.
        """
        caught_up = True
        for request in requests:
            state, allowed = self.ssms.state(request), self.ssms.allowed(request)
            if state.active != allowed:
                state.active, state.captured_weights, caught_up = allowed, None, False
            read_to = state.read_to
            caught_up = caught_up and read_to is not None and request.context_len < read_to + width
        if caught_up:
            return False
        for request in requests:
            self.ssms.state(request).read_to = None
        missed = False
        for draft in self.ssms.drafts:
            behind = []
            for request in requests:
                state = self.ssms.state(request)
                if draft.ssm not in state.active:
                    continue
                unread = request.context_len + 1 - state.valid[draft.ssm]
                first_row = max(self.ssms.models[ssm].offset for ssm in state.active)
                if unread > width or state.valid[draft.ssm] < first_row:
                    behind.append(request)
                    state.captured_weights = None
            self.ssms.read(draft, behind)
            missed = missed or bool(behind)
        return missed

    def first_unread(self, request: Request) -> int:
        """Return the first position without K/V in an active SSM's pool, at most the root's."""
        state = self.ssms.state(request)
        if state.read_to is None:
            state.read_to = int(state.valid[state.active].min())
        return min(state.read_to, request.context_len)

    def weights(self, request: Request) -> np.ndarray:
        """Return the mixture weights of a round, float64 [num_ssms]; NaN for SSMs that do not draft."""
        state = self.ssms.state(request)
        if state.captured_weights is None:
            state.captured_weights = self._weigh(request)
        return state.captured_weights

    def end_round(self, request: Request, probs: np.ndarray, seed_tree: TokenTree | None) -> Callable[[], None]:
        """Update a request's state after a round over a seed tree, in which the SSMs read all of `request.tokens`.

        `probs`, float32 [num_ssms, n], are each SSM's probabilities of the last n tokens; NaN where it computed NaN.
        Returns a callback that scores the SSMs on these tokens and updates their weights for the next round.
        """
        state, end = self.ssms.state(request), len(request.tokens)
        state.valid[state.active] = state.read_to = end
        state.slots, state.accepted, state.seed_tree = None, None, seed_tree
        return partial(self._score, request, state.active, end - probs.shape[1], probs)

    def _score(self, request: Request, ssms: Sequence[int], first: int, probs: np.ndarray) -> None:
        """Score SSMs by their probabilities of the tokens from position `first` on."""
        state = self.ssms.state(request)
        for ssm in ssms:
            state.mixture.observe(ssm, first, probs[ssm])
        state.captured_weights = self._weigh(request) if state.active else None

    def _weigh(self, request: Request) -> np.ndarray:
        """Return the mixture weights of the active SSMs, at most `max_ssms` of them; NaN for the others."""
        state, max_ssms = self.ssms.state(request), request.spec.max_ssms
        shares = state.mixture.weights(state.active)
        if max_ssms is not None:
            shares[np.argsort(-shares, kind="stable")[max_ssms:]] = 0.0
        weights = np.full(len(state.valid), np.nan)
        weights[state.active] = np.where(shares > 0, shares / shares.sum(), np.nan)
        return weights
