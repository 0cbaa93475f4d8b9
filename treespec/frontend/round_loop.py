"""Execution of one engine's rounds for callers in several threads."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock

import torch

from treespec.config.configs import EngineConfig
from treespec.engine.engine import Engine
from treespec.errors import ConfigError, RequestError, describe_error
from treespec.request import Request
from treespec.utils.torch_state import on_device, one_thread, own_passes


class RoundLoop:
    """Runs the rounds of an engine, one at a time, for the requests of all threads."""

    def __init__(self, engine: Engine, config: EngineConfig):
        self.lock = RLock()  # held during a round: requests do not change while another thread holds it
        self._engine, self._config = engine, config
        self._in_round = False
        self._ending: deque[Request] = deque()  # requests to end after the current round
        self._waiting: set[object] = set()  # callers in other threads that want the next round

    def run(self, requests: Sequence[Request], only_finished: bool = False) -> Iterator[Request]:
        """Add requests, run rounds until all have ended, and yield each request after every round that changed it.

        With `only_finished`, yield each request when it has ended.
        """
        self.check_threads()
        open_requests = dict.fromkeys(requests, 0)  # number of yielded tokens by request

        def goes_on() -> bool:
            return only_finished and not self._waiting and not any(request.finished for request in open_requests)

        def changed() -> list[Request]:
            """Return requests that have ended or have new tokens, from rounds of any thread or an abort."""
            if only_finished:
                advanced = [request for request in open_requests if request.finished]
            else:
                advanced = [r for r, num_seen in open_requests.items() if r.finished or r.num_generated > num_seen]
            for request in advanced:
                open_requests[request] = request.num_generated
                if request.finished:
                    del open_requests[request]
            return advanced

        try:
            with self.turn():
                for request in requests:
                    self._engine.scheduler.add(request)
            while open_requests:
                with self.turn():
                    requests_to_yield = changed()
                    if not requests_to_yield:
                        self.step(goes_on)
                        requests_to_yield = changed()
                yield from requests_to_yield
                self.yield_lock()
        finally:  # also after Ctrl-C, an error, or if the caller stops iterating
            with self.turn():
                self.end(requests)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock. Other threads' `yield_lock` gives way to threads waiting here."""
        caller = object()
        self._waiting.add(caller)
        try:
            self.lock.acquire()
        finally:  # also after Ctrl-C
            self._waiting.discard(caller)
        try:
            yield
        finally:
            self.lock.release()

    def step(self, goes_on: Callable[[], bool] = lambda: False) -> None:
        """Run one round, and further ones while `goes_on()`; the caller holds the lock.

        If a round raises, all running requests end in an undefined state.
        """
        if self._in_round:
            raise RequestError(
                "a processor, drafter or observer cannot generate with the engine that called it, in the middle of a "
                "round; use another LLM"
            )
        device = self._config.device
        try:
            with own_passes(device), on_device(device), one_thread() if self._config.compile else nullcontext():
                while True:
                    self._in_round = True
                    self._engine.step()
                    self._end_round()
                    if not goes_on():
                        break
        except BaseException as error:
            with ExitStack() as ends:
                for request in list(self._engine.scheduler.running):
                    if isinstance(error, Exception):
                        reason = RequestError(f"a round failed: {describe_error(error)}")
                        ends.callback(self._engine.finish, request, "error", reason)
                    else:  # Ctrl-C
                        ends.callback(self._engine.finish, request, "abort")
            raise
        finally:
            self._end_round()

    def _end_round(self) -> None:
        self._in_round = False
        if self._ending:
            self.end([self._ending.popleft() for _ in range(len(self._ending))])

    @contextmanager
    def between(self) -> Iterator[None]:
        """Hold the lock, after the engine has learned from the last round."""
        with self.turn():
            self._engine.run_deferred()
            yield

    def end(self, requests: Sequence[Request]) -> None:
        """Abort the unfinished requests among `requests`. Calls from within a round take effect after it."""
        if self._in_round:
            self._ending.extend(requests)
            return
        with ExitStack() as ends:
            for request in requests:
                ends.callback(self._engine.finish, request, "abort")

    def check_threads(self) -> None:
        """Raise ConfigError if torch's number of threads has changed since the self-test. Bits depend on it."""
        threads, tested = torch.get_num_threads(), self._config.num_threads
        if threads != tested:
            raise ConfigError(
                f"torch has {threads} threads now, but had {tested} when this engine passed its self-test; "
                f"call torch.set_num_threads({tested}), or build a new LLM"
            )

    def yield_lock(self) -> None:
        """Let a waiting thread take the lock, which this thread would otherwise reacquire immediately."""
        waiting = len(self._waiting)
        for _ in range(20 if waiting else 0):  # at most 1 ms
            time.sleep(5e-5)
            if len(self._waiting) < waiting:
                break
