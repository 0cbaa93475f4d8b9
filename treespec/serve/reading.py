"""Reading of a request's streams and rounds until they end, time out, or the client disconnects."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from treespec.async_llm import RequestStream
from treespec.drawing.recording import picture
from treespec.engine.round_record import RoundRecord
from treespec.errors import ParameterError, TreespecError
from treespec.llm import LLM
from treespec.outputs import RequestOutput
from treespec.serve.errors import ServerError

_MAX_UNREAD = 256  # maximum unread rounds; a slow client misses the oldest
_CONTEXT = 16  # tokens decoded before the root, for the texts of the nodes

_Result = TypeVar("_Result")


class Reading:
    """Reads the outputs of streams, one per prompt, for up to `seconds`; calls `ended` with index and last output.

    `limit` creates the context of each wait from its deadline, such as `asyncio.timeout_at`.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        seconds: float | None,
        ended: Callable[[int, RequestOutput], None],
        limit: Callable[[float | None], AbstractAsyncContextManager[Any]],
    ):
        self._streams, self._seconds, self._ended, self._limit = streams, seconds, ended, limit
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def outputs(self) -> list[RequestOutput]:
        """Return the finished outputs of all streams. Raises ServerError if the request fails or is too slow."""
        return [await self._next(index) for index in range(len(self._streams))]

    async def merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield the outputs of all streams as they arrive, with stream indices. Errors as in `outputs`."""
        if len(self._streams) == 1:  # avoids tasks
            while True:
                output = await self._next(0)
                yield 0, output
                if output.finished:
                    return
        reading = {asyncio.ensure_future(self._next(index)): index for index in range(len(self._streams))}
        try:
            while reading:
                completed, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in completed:
                    index, output = reading.pop(task), task.result()
                    if not output.finished:
                        reading[asyncio.ensure_future(self._next(index))] = index
                    yield index, output
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)  # asyncio logs unretrieved errors

    async def _next(self, index: int) -> RequestOutput:
        try:
            async with self._limit(self._deadline):
                output = await anext(self._streams[index])
        except TimeoutError:
            raise ServerError(f"the request took more than {self._seconds:g} s (--request-timeout)", 504) from None
        except TreespecError as error:
            raise ServerError(str(error), 400 if isinstance(error, ParameterError) else 500) from error
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            raise ServerError("the request was aborted", 503)
        if output.finished:
            self._ended(index, output)
        return output


class RoundFeed:
    """Collector of the rounds of one request of an LLM, until `close`."""

    def __init__(self, llm: LLM, request_id: str):
        self._tokenizer, self._request_id = llm.get_tokenizer(), request_id
        self._records: deque[RoundRecord] = deque(maxlen=_MAX_UNREAD)
        self._handle = llm.add_round_observer(self._add)

    def _add(self, record: RoundRecord) -> None:
        if record.request_id == self._request_id:
            self._records.append(replace(record, context=record.context[-_CONTEXT:]))

    def take(self) -> list[dict[str, Any]]:
        """Return the rounds since the last call: `RoundRecord.as_dict` with the texts of nodes and bonus token."""
        rounds = []
        while self._records:
            record = self._records.popleft()
            drawn = picture(record, self._tokenizer)
            document = record.as_dict() | {"texts": drawn.tokens, "bonus_text": drawn.bonus}
            del document["request_id"], document["context"]
            rounds.append(document)
        return rounds

    def close(self) -> None:
        """Stop observing. Idempotent."""
        self._handle.remove()


class Events(EventSourceResponse):
    """Server-sent events; `ends` is closed when the client disconnects, even before the first event."""

    def __init__(self, events: AsyncIterator[Any], ends: ExitStack):
        super().__init__(events, sep="\n", shutdown_grace_period=math.inf)  # `Shutdown` ends them
        self._ends = ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ends:
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, result: Awaitable[_Result]) -> _Result:
    """Await a result, and cancel it if the client disconnects."""
    working, listening = asyncio.ensure_future(result), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ServerError("the client disconnected", 499)
        return await working
    finally:
        working.cancel()
        listening.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
