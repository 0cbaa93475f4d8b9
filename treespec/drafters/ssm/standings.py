"""Decides which SSMs read a request, by how much the best SSM of earlier requests was ahead of the leading one."""

from collections.abc import Sequence

import numpy as np

from treespec.drafters.ssm.ssm_state import SsmState

MIN_LAG, MAX_LAG = 16, 256  # committed tokens that an inactive SSM may miss before it catches up
ADVANTAGE = 0.2  # initial advantage over the leading SSM, in nats per token
ADVANTAGE_EMA = 0.1  # weight of a comparison in the running means
RECOVERY = 0.01  # of the advantage towards its initial value, per request
SAVED_PER_NAT = 0.6  # share of a request's time that a nat per token saves


class Standings:
    """Running means over requests of the SSMs' weights, and of the advantage of the best one.

    An SSM must read a request's tokens before it can draft or be compared. The leading SSM always does; another one
    reads if its expected advantage saves more of the rest of the request than the reading takes.

    Args:
        num_ssms: number of SSMs.
    """

    def __init__(self, num_ssms: int):
        self._weights, self._advantage = np.full(num_ssms, 1 / num_ssms), ADVANTAGE
        self._compared: list[tuple[SsmState, int, int]] = []  # state, leader, SSM that reads beside it

    def begin_request(self) -> None:
        """Let the advantage recover, so that SSMs that are not compared are tried again."""
        self._advantage += RECOVERY * (ADVANTAGE - self._advantage)

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
        """Return the SSMs that read what they missed of a request now; an SSM that reads in vain reads more rarely.

        Args:
            state: of the request.
            allowed: SSMs that may draft for it.
            context_len: number of its committed tokens.
            time_left: expected time of its rest, in tokens that an SSM reads in it.
        """
        leader, found = self.leader(state, allowed), []
        affordable = SAVED_PER_NAT * self._advantage * time_left
        behind = (context_len - state.valid).tolist()
        for ssm in allowed:
            if behind[ssm] >= state.max_lags[ssm] and (ssm == leader or behind[ssm] <= affordable):
                found.append(ssm)
                state.max_lags[ssm] = min(2 * int(state.max_lags[ssm]), MAX_LAG)
                if ssm != leader:
                    self._compared.append((state, leader, ssm))
        return found

    def learn(self) -> None:
        """Update the running means from the SSMs that have just read beside a leader."""
        for state, leader, ssm in self._compared:
            gained = state.trust.advantage(ssm, leader)
            if gained is not None:
                self._advantage += ADVANTAGE_EMA * (max(gained, 0.0) - self._advantage)
                both = [leader, ssm]
                share = self._weights[both].sum() * state.trust.weights(both)
                self._weights[both] += ADVANTAGE_EMA * (share - self._weights[both])
        self._compared.clear()
