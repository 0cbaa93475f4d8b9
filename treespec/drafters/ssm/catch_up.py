"""Choice of the SSMs that read a request's tokens, by their expected advantage over the SSM that drafts."""

from collections.abc import Sequence

import numpy as np

from treespec.drafters.ssm.ssm_state import SsmState

MIN_LAG, MAX_LAG = 16, 256  # committed tokens that an inactive SSM may miss before it catches up
INITIAL_ADVANTAGE = 0.2  # over the leading SSM, in nats per token
EMA = 0.1  # weight of a comparison in the running means
RECOVERY = 0.01  # of the advantage towards its initial value, per request
# Share of a request's time that a nat per token saves. A chain whose tokens are accepted with probability p has
# 1 / (1 - p) tokens, p / (1 - p) more per nat: 1.3 times at p = 0.56, and half of that beside other sources.
SAVED_PER_NAT = 0.6


class CatchUpPolicy:
    """Decides when an SSM reads the tokens that it missed, by running means over requests.

    An SSM must have read a request's tokens to draft for it or to be compared. The leading SSM always reads them.
    Another one does if its expected advantage saves more time in the rest of the request than reading takes.
    """

    def __init__(self, num_ssms: int):
        self._weights, self._advantage = np.full(num_ssms, 1 / num_ssms), INITIAL_ADVANTAGE
        self._compared: list[tuple[SsmState, int, int]] = []  # state, leader, SSM that reads beside it

    def begin_request(self) -> None:
        """Let the advantage recover, so that SSMs that are not compared are tried again."""
        self._advantage += RECOVERY * (INITIAL_ADVANTAGE - self._advantage)

    def leader(self, state: SsmState, allowed: Sequence[int]) -> int:
        """Return the SSM that drafts best for a request, or for earlier ones as long as none has drafted for it."""
        weights = state.weights if state.active else self._weights
        return max(allowed, key=lambda ssm: weights[ssm])

    def unread(self, state: SsmState, allowed: Sequence[int], context_len: int) -> int:
        """Return the tokens that the leading SSM must read before it drafts, beyond its lag; 0 without SSMs."""
        if not allowed:
            return 0
        leader = self.leader(state, allowed)
        return max(int(context_len - state.valid[leader] - state.max_lags[leader]), 0)

    def readers(self, state: SsmState, allowed: Sequence[int], context_len: int, time_left: float) -> list[int]:
        """Return the SSMs that read their missed tokens of a request now; one not selected reads more rarely."""
        leader, readers = self.leader(state, allowed), []
        affordable = SAVED_PER_NAT * self._advantage * time_left
        behind = (context_len - state.valid).tolist()
        for ssm in allowed:
            if behind[ssm] >= state.max_lags[ssm] and (ssm == leader or behind[ssm] <= affordable):
                readers.append(ssm)
                state.max_lags[ssm] = min(2 * int(state.max_lags[ssm]), MAX_LAG)
                if ssm != leader:
                    self._compared.append((state, leader, ssm))
        return readers

    def learn(self) -> None:
        """Update the running means from the SSMs that have just read beside a leader."""
        for state, leader, ssm in self._compared:
            gained = state.mixture.advantage(ssm, leader)
            if gained is not None:
                self._advantage += EMA * (max(gained, 0.0) - self._advantage)
                both = [leader, ssm]
                share = self._weights[both].sum() * state.mixture.weights(both)
                self._weights[both] += EMA * (share - self._weights[both])
        self._compared.clear()
