"""Selection of the SSMs that read a request's tokens, by expected advantage over the drafting SSM."""

from collections.abc import Sequence

import numpy as np

from treespec.drafters.ssm.ssm_state import SsmState

MIN_LAG, MAX_LAG = 16, 256  # committed tokens that an inactive SSM may miss before it catches up
INITIAL_ADVANTAGE = 0.2  # prior advantage over the leading SSM, nats per token
EMA = 0.1  # weight of a comparison in the running means
RECOVERY = 0.01  # step of the advantage towards its initial value, per request
# Share of a request's time saved per nat and token. If each token of a chain is accepted with probability p, the chain
# yields 1 / (1 - p) tokens, and p / (1 - p) more per nat: 1.3 times at p = 0.56, half of that with other sources.
SAVED_PER_NAT = 0.6


class CatchUpPolicy:
    """Policy that decides when an SSM reads the tokens that it missed, from running means over requests.

    An SSM must have read a request's tokens to draft for it or to be compared. The leading SSM always reads them.
    Another SSM reads them if its expected advantage saves more time in the rest of the request than reading takes.
    """

    def __init__(self, num_ssms: int):
        self._weights, self._advantage = np.full(num_ssms, 1 / num_ssms), INITIAL_ADVANTAGE
        self._compared: list[tuple[SsmState, int, int]] = []  # (state, leader, compared SSM)

    def begin_request(self) -> None:
        """Move advantages towards their prior, so that SSMs that are not compared are retried."""
        self._advantage += RECOVERY * (INITIAL_ADVANTAGE - self._advantage)

    def leader(self, state: SsmState, allowed: Sequence[int]) -> int:
        """Return the best SSM for a request, judged by earlier requests until one has drafted for it."""
        weights = state.weights if state.active else self._weights
        return max(allowed, key=lambda ssm: weights[ssm])

    def unread(self, state: SsmState, allowed: Sequence[int], context_len: int) -> int:
        """Return how many tokens beyond its maximum lag the leading SSM must read to draft; 0 without SSMs."""
        if not allowed:
            return 0
        leader = self.leader(state, allowed)
        return max(int(context_len - state.valid[leader] - state.max_lags[leader]), 0)

    def readers(self, state: SsmState, allowed: Sequence[int], context_len: int, time_left: float) -> list[int]:
        """Return the SSMs that now read a request's missed tokens, and double their maximum lag."""
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
        """Update the running means from the SSMs just compared with a leader."""
        for state, leader, ssm in self._compared:
            gained = state.mixture.advantage(ssm, leader)
            if gained is not None:
                self._advantage += EMA * (max(gained, 0.0) - self._advantage)
                both = [leader, ssm]
                share = self._weights[both].sum() * state.mixture.weights(both)
                self._weights[both] += EMA * (share - self._weights[both])
        self._compared.clear()
