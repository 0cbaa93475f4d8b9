"""vLLM's `AsyncLLM` interface: the requests of asyncio programs share the rounds of one thread."""

import asyncio
import atexit
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Self, Unpack

from treespec.config.configs import SpecConfig
from treespec.config.vllm_options import CallOptions
from treespec.errors import ConfigError
from treespec.frontend.engine_args import EngineArgs
from treespec.frontend.requests import Prompt, UnreadSamples
from treespec.llm import LLM, new_requests, refuse_unknown
from treespec.lora import LoRARequest
from treespec.outputs import RequestOutput
from treespec.request import Request, new_request_id
from treespec.sampling_params import RequestOutputKind, SamplingParams
from treespec.text.prompt_tokenizer import TokenizerThreads

logger = logging.getLogger("treespec")

_Wakes = dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]  # futures of waiting readers


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request of an `AsyncLLM`, for a single reader.

    The next output is created when the reader asks for it, and contains all tokens added until then, so a slow reader
    delays no round and outputs do not pile up. If waiting for an output is cancelled, the next wait returns it.
    """

    def __init__(self, engine: "AsyncLLM", request_id: str, samples: list[Request]):
        self.request_id = request_id
        self._engine, self._samples = engine, samples
        self._kind = samples[0].params.output_kind
        self._unread = UnreadSamples(samples)
        self._lock = threading.Lock()  # guards the three attributes below, shared by the reader and the round thread
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._undelivered: RequestOutput | Exception | None = None  # None while a reader waits
        self._has_ended = False  # whether the samples can no longer change
        self._decoding: asyncio.Future[RequestOutput | Exception] | None = None  # of FINAL_ONLY
        self._is_exhausted = False

    async def __anext__(self) -> RequestOutput:
        """Return the next output. Raises RequestError or DraftError if the request failed."""
        if self._is_exhausted:
            raise StopAsyncIteration
        if (wake := self._begin_wait()) is not None:
            self._engine._wake.set()
            await wake
        with self._lock:
            output, self._undelivered = self._undelivered, None
        if output is None:  # the request has ended
            if self._kind is RequestOutputKind.FINAL_ONLY:  # decodes all tokens now
                if self._decoding is None:
                    self._decoding = asyncio.ensure_future(asyncio.to_thread(self._make))
                output = await asyncio.shield(self._decoding)
            else:
                output = self._make()
            self._is_exhausted = True
        if isinstance(output, Exception):
            raise output
        return output

    def _begin_wait(self) -> asyncio.Future[None] | None:
        """Return a future that the round thread sets when there is an output, or None if there already is one."""
        with self._lock:
            if self._has_ended or self._undelivered is not None:
                return None
            loop = asyncio.get_running_loop()
            wake = loop.create_future()
            self._waiting = loop, wake
            return wake

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each completion so far."""
        return [sample.output_token_ids for sample in self._samples]

    def close(self) -> None:
        """End the request and free its pages, after the running round. Idempotent."""
        self._is_exhausted = True
        if not self._has_ended:
            with suppress(ConfigError):  # a shutdown has ended it
                self._engine._submit(partial(self._engine.llm.rounds.end, self._samples))

    def _is_running(self) -> bool:
        return any(not sample.finished for sample in self._samples)

    def _hand_over(self, wakes: _Wakes) -> None:
        """Create the next output for a waiting reader, and add the reader to `wakes`. Called between rounds."""
        ends = not self._is_running()
        is_read_at_the_end = self._kind is RequestOutputKind.FINAL_ONLY
        if not ends and (self._waiting is None or is_read_at_the_end or not self._unread.changed()):
            return
        new = None if ends else self._make()
        with self._lock:
            waiting, self._waiting, self._has_ended = self._waiting, None, ends
            if new is not None:
                self._undelivered = new
        if waiting is not None:
            loop, wake = waiting
            wakes[loop].append(wake)

    def _make(self) -> RequestOutput | Exception:
        """Return the next output, or the error of creating it, which ends the reader but no round."""
        try:
            if self._samples[0].params.logprobs is not None and not self._has_ended:
                self._engine.llm.engine.run_deferred()  # deferred updates of a round that overlaps with the next one
            return self._take()
        except Exception as error:  # including errors of a tokenizer
            return error

    def _take(self) -> RequestOutput:
        """Return the output in the requested kind. Raises the error of a failed sample."""
        factory, ends = self._engine.llm.request_factory, not self._is_running()
        if self._kind is RequestOutputKind.DELTA:
            new = [factory.delta(sample, self._unread.take(sample)) for sample in self._unread.changed()]
            return factory.output(self._samples, ends, new)
        if self._kind is RequestOutputKind.CUMULATIVE:
            for sample in self._unread.changed():
                self._unread.take(sample)
        output = factory.output(self._samples, ends)
        for sample in self._samples:
            sample.raise_error()
        return output


class AsyncLLM:
    """Runs the engine of an `LLM` for asyncio programs, in one thread, as long as there are requests.

    Requests join and leave between rounds. The output of a request does not depend on other requests.

    `with AsyncLLM(llm) as engine:` shuts it down at the end.

    Args:
        llm: the LLM whose engine to run. It remains usable: requests of other threads share the rounds.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._streams: dict[str, RequestStream] = {}  # streams with running requests or a waiting reader, by id
        self._creating: dict[str, bool] = {}  # whether a request that is being created was aborted meanwhile, by id
        self._calls: deque[tuple[Callable[[], object], Future[None]]] = deque()  # calls to make between rounds
        self._wake = threading.Event()
        self._lock = threading.Lock()  # guards `_is_closed` and `_creating`
        self._is_closed = False
        self._creator = TokenizerThreads()  # create requests while another thread runs rounds
        self._thread = threading.Thread(target=self._run, name="treespec-rounds", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its arguments."""
        return cls(LLM.from_engine_args(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        spec: SpecConfig | str | dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt and yield outputs as rounds extend them. Leaving the loop ends the request.

        `SamplingParams.output_kind` determines the contents of outputs. A slow reader gets fewer and larger ones.

        Args:
            prompt, sampling_params, spec, tokenization_kwargs, priority, lora_request: as in `LLM.generate`, for one
                prompt.
            request_id: id for `abort` and the outputs, which no unfinished request has; None creates one.

        Raises:
            ConfigError: an unknown keyword, an id that is in use, or the engine is shut down.
            RequestError, DraftError: the request is invalid, or fails later.
        """
        refuse_unknown(AsyncLLM.generate, vllm_options)
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            spec=spec,
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
            lora_request=lora_request,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | str | dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> RequestStream:
        """Add a request to the next round and return its outputs, to be read with `async for`.

        Arguments and errors are those of `generate`. `close()` of the result ends the request; otherwise it runs to its
        end, even if nobody reads it.
        """
        refuse_unknown(AsyncLLM.add_request, vllm_options)
        self.llm.rounds.check_threads()
        arguments = spec, tokenization_kwargs, priority, lora_request
        create = partial(self._create, prompt, self._seeded(params), *arguments)
        request_id = new_request_id() if request_id is None else request_id
        with self._lock:
            self._check_open()
            if request_id in self._creating or request_id in self._streams:
                raise ConfigError(f"request_id={request_id!r} is in use; choose another one")
            self._creating[request_id] = False
        try:
            samples = await asyncio.wrap_future(self._creator.submit(prompt, create))
            for sample in samples:
                sample.output_id = request_id
            stream = RequestStream(self, request_id, samples)
            self._submit(partial(self._admit, stream))
        except BaseException:
            with self._lock:
                del self._creating[request_id]
            raise
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests and free their pages, after the running round. Unknown ids are ignored.

        Requests that `add_request` is still creating end when they are added. Cancelling the wait does not revoke an
        abort.
        """
        names = {request_id} if isinstance(request_id, str) else {*request_id}
        await asyncio.wrap_future(self._submit(partial(self._abort, names)))

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None."""
        return self.llm.get_tokenizer()

    @property
    def is_running(self) -> bool:
        """Whether the round thread serves requests."""
        return self._thread.is_alive()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._streams)

    def shutdown(self) -> None:
        """Abort all requests and stop the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._creator.shutdown()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _seeded(self, params: Any) -> Any:
        """Return parameters with a seed. Seeds are drawn in order of arrival, before threads create requests."""
        params = self.llm.get_default_sampling_params() if params is None else params
        if isinstance(params, SamplingParams) and params.seed is None and params.temperature > 0:
            params = params.clone()
            params.seed = self.llm.request_factory.draw_seed()
        return params

    def _create(self, prompt: Any, params: Any, *others: Any) -> list[Request]:
        """Return the samples of a prompt, by `new_requests`. Raises RequestError if it is invalid."""
        self._check_open()
        stream = getattr(params, "output_kind", None) is not RequestOutputKind.FINAL_ONLY
        (samples,) = new_requests(self.llm, [prompt], params, *others, stream=stream)
        if samples[0].finished:
            self._submit(partial(self.llm.engine.stats.add_finished, samples[0]))
            samples[0].raise_error()
        return samples

    def _admit(self, stream: RequestStream) -> None:
        self._streams[stream.request_id] = stream
        for sample in stream._samples:
            self.llm.engine.scheduler.add(sample)
        with self._lock:
            is_aborted = self._creating.pop(stream.request_id)
        if is_aborted:
            self.llm.rounds.end(stream._samples)

    def _abort(self, names: set[str]) -> None:
        with self._lock:
            self._creating |= dict.fromkeys(self._creating.keys() & names, True)
        for name in self._streams.keys() & names:
            self.llm.rounds.end(self._streams[name]._samples)

    def _submit(self, call: Callable[[], object]) -> Future[None]:
        """Schedule a call between rounds. Raises ConfigError after `shutdown`."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # cancelling the wait does not cancel the call
        with self._lock:
            self._check_open()
            self._calls.append((call, future))
        self._wake.set()
        return future

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this AsyncLLM is shut down; create another one")

    def _run(self) -> None:
        """Run rounds until `shutdown`."""
        rounds = self.llm.rounds
        try:
            while not self._is_closed:
                if not self._streams:
                    self._wake.wait()
                self._wake.clear()
                with rounds.turn():
                    self._make_calls()
                    self._hand_over()
                    if self._streams:
                        try:
                            rounds.step()
                        except BaseException:  # the round's requests ended, others continue; any exception
                            logger.exception("a round failed")
                        self._hand_over()
                rounds.yield_lock()
        finally:
            with self._lock:
                self._is_closed = True
            with rounds.turn():
                self._make_calls()
                for stream in self._streams.values():
                    rounds.end(stream._samples)
                self._hand_over()

    def _make_calls(self) -> None:
        while self._calls:
            call, future = self._calls.popleft()
            try:
                call()
            except Exception as error:  # the thread continues with the others' requests
                logger.exception("a call between rounds failed")
                future.set_exception(error)
            else:
                future.set_result(None)

    def _hand_over(self) -> None:
        """Hand new outputs to all waiting readers, and drop ended requests."""
        wakes: _Wakes = defaultdict(list)
        for key, stream in list(self._streams.items()):
            stream._hand_over(wakes)
            if stream._has_ended:
                del self._streams[key]
        for loop, readers in wakes.items():  # one call per loop, since each call wakes it through a socket
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_wake_up, readers)


AsyncLLMEngine = AsyncLLM  # vLLM's older name


def _wake_up(readers: list[asyncio.Future[None]]) -> None:
    for reader in readers:
        if not reader.done():  # cancelled
            reader.set_result(None)
