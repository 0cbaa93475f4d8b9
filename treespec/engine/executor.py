"""One round: plan, propose, forward, verify and commit, over data on the host or on the device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from treespec.engine.execution import Execution, StageClock
from treespec.request import Request

ExecutionT = TypeVar("ExecutionT", bound=Execution)


class Executor(ABC, Generic[ExecutionT]):
    """Runs rounds of batches.

    The order of the steps is the same wherever the data live. The host executor computes a step when it is called. The
    graph executor launches the first three, so the device may compute them while the host goes on.
    """

    _launched: ExecutionT | None = None

    def launch(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> None:
        """Begin a round of these requests, which the next `run` ends. Arguments as of `run`."""
        assert self._launched is None, "a round is in flight"
        execution = self.plan(list(requests), others_wait, clock)
        self.propose(execution, clock)
        self.forward(execution, clock)
        self._launched = execution

    def run(
        self, requests: Sequence[Request], others_wait: bool, clock: StageClock, meanwhile: Callable[[], None]
    ) -> ExecutionT:
        """Run one round, or end the launched one. Requests that are not in it join the next one.

        Args:
            requests: prefilled requests that this executor serves, at least one.
            others_wait: whether the queue holds requests for slots that become free.
            clock: receives the stages.
            meanwhile: called while a device computes the round, if the host waits for it.
        """
        if self._launched is None:
            self.launch(requests, others_wait, clock)
        execution, self._launched = self._launched, None
        assert execution is not None
        self.overlap(execution, others_wait, clock, meanwhile)
        self.verify(execution, clock)
        self.commit(execution, clock)
        return execution

    @abstractmethod
    def serves(self, request: Request) -> bool:
        """Return whether this executor can decode a request.

        Depends on the request's parameters only, never on the batch, so that one executor produces all of its tokens.
        """

    @abstractmethod
    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Return whether SSMs are expected to pay for a batch of these requests."""

    @abstractmethod
    def plan(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> ExecutionT:
        """Let the planner limit the trees. Arguments as of `run`."""

    @abstractmethod
    def propose(self, execution: ExecutionT, clock: StageClock) -> None:
        """Draft with every source, and merge the proposals into one tree per request."""

    @abstractmethod
    def forward(self, execution: ExecutionT, clock: StageClock) -> None:
        """Run one target pass over all nodes of all requests."""

    def overlap(
        self, execution: ExecutionT, others_wait: bool, clock: StageClock, meanwhile: Callable[[], None]
    ) -> None:
        """Do what can be done while a device computes the round; nothing without one. Arguments as of `run`."""

    @abstractmethod
    def verify(self, execution: ExecutionT, clock: StageClock) -> None:
        """Decide the accepted path of every tree, by the request's rule."""

    @abstractmethod
    def commit(self, execution: ExecutionT, clock: StageClock) -> None:
        """Compact the target's K/V to the accepted paths, and drop those of requests without one."""

    def drop_finished(self) -> None:
        """Wait for the device if all requests that it computes for have ended, and forget their round."""
