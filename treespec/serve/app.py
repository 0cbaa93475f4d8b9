"""The endpoints."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from treespec import __version__
from treespec.async_llm import AsyncLLM, RequestStream
from treespec.errors import ConfigError, RequestError, TreespecError
from treespec.outputs import RequestOutput
from treespec.sampling_params import SamplingParams
from treespec.serve.answers import Answer, ChatAnswer, CompletionAnswer
from treespec.serve.errors import (
    Guard,
    ServerError,
    error_document,
    on_http_error,
    on_invalid_body,
    on_server_error,
    on_user_error,
)
from treespec.serve.metrics import ServerMetrics
from treespec.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from treespec.text.chat import Conversation, conversations
from treespec.text.prompt_tokenizer import UserTokenizer

_Result = TypeVar("_Result")

MAX_BODY_BYTES = 4 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server, besides those of the engine.

    Attributes:
        model_names: names of the model for clients; the first one is reported.
        defaults: of requests that give no sampling parameters.
        chat_template: replaces the tokenizer's.
        api_key: required of clients; None = none.
        max_body_bytes: of a request.
        only_loopback: whether the server listens on the loopback interface only.
    """

    model_names: Sequence[str]
    defaults: SamplingParams
    chat_template: str | None = None
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    only_loopback: bool = True


class Server:
    """Handlers of the endpoints over one engine.

    Args:
        engine: generates.
        options: of the server.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions):
        self._engine, self._options = engine, options
        self._created = int(time())
        self._metrics = ServerMetrics(engine.llm.engine, options.model_names[0])
        self._tokenizer, self._vocab_size = (
            engine.llm._request_factory.tokenizer,
            engine.llm._request_factory.vocab_size,
        )

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several."""
        body.check()
        answer = CompletionAnswer(body, self._model_name(body.model))
        return await self._generate(body, answer, body.prompts(), request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        body.check()
        answer = ChatAnswer(body, self._model_name(body.model))
        return await self._generate(body, answer, [self._conversation(body)], request)

    async def _generate(
        self, body: GenerationBody, answer: Answer, prompts: Sequence[Any], request: Request
    ) -> Response:
        params = body.sampling_params(self._options.defaults)
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                streams.append(
                    await self._engine.add_request(
                        answer.request_id,
                        prompt,
                        params,
                        spec=body.speculation,
                        tokenization_kwargs=body.tokenization(),
                    )
                )
        except BaseException:
            _close(streams)
            raise
        if body.stream:
            return _Events(self._events(answer, streams, body.includes_usage), streams)
        try:
            outputs = await _while_connected(request, self._outputs(streams))
        finally:
            _close(streams)
        return Response(answer.response(outputs), media_type="application/json")

    async def _outputs(self, streams: Sequence[RequestStream]) -> list[RequestOutput]:
        """Return the finished outputs of all streams."""
        outputs = []
        for stream in streams:
            outputs.append(await self._next(stream))
        return outputs

    async def _events(self, answer: Answer, streams: Sequence[RequestStream], usage: bool) -> AsyncIterator[Any]:
        """Yield the events of a stream. An error is the last one, as OpenAI's clients expect it."""
        try:
            async for place, output in self._merged(streams):
                for chunk in answer.chunks(place, output):
                    yield {"data": chunk}
            if usage:
                yield {"data": answer.usage_chunk()}
            yield {"data": "[DONE]"}
        except (ServerError, TreespecError) as error:
            yield {"data": json.dumps(error_document(str(error), 500))}

    async def _merged(self, streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield the outputs of all streams as they come, each with the place of its stream."""
        if len(streams) == 1:  # without the tasks of several
            while True:
                output = await self._next(streams[0])
                yield 0, output
                if output.finished:
                    return
        reading = {asyncio.ensure_future(self._next(stream)): place for place, stream in enumerate(streams)}
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place, output = reading.pop(task), task.result()
                    if not output.finished:
                        reading[asyncio.ensure_future(self._next(streams[place]))] = place
                    yield place, output
        finally:
            for task in reading:
                task.cancel()

    async def _next(self, stream: RequestStream) -> RequestOutput:
        """Return the next output.

        Raises:
            ServerError: the request failed after it was accepted.
        """
        try:
            output = await anext(stream)
        except TreespecError as error:
            raise ServerError(str(error)) from error
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            raise ServerError("the request was aborted", 503)
        if output.finished:
            self._metrics.observe(output)
        return output

    def _model_name(self, name: str | None) -> str:
        """Return the name that the client uses, or the first one. Raises HTTPException for an unknown one."""
        names = self._options.model_names
        if name is not None and name not in names:
            raise HTTPException(404, f"model {name[:100]!r}; this server has {', '.join(map(repr, names))}")
        return name or names[0]

    def _conversation(self, body: ChatBody | TokenizeBody) -> Conversation:
        adds = body.add_generation_prompt
        # OpenAI's newer name for the system's instructions, which templates do not know
        messages = [m | {"role": "system"} if m.get("role") == "developer" else m for m in body.messages or ()]
        (conversation,) = conversations(
            self._engine.llm.get_tokenizer(),
            messages,
            self._options.chat_template,
            not body.continue_final_message if adds is None else adds,
            body.continue_final_message,
            None,
            body.chat_template_kwargs,
        )
        return conversation

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Return the token ids of a text or a conversation."""
        self._model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ConfigError("give either prompt or messages")
        tokens, texts = await asyncio.to_thread(self._tokenize, body)
        document = {"count": len(tokens), "max_model_len": self._engine.llm.config.max_model_len, "tokens": tokens}
        return JSONResponse(document | {"token_strs": texts})

    def _tokenize(self, body: TokenizeBody) -> tuple[list[int], list[str] | None]:
        tokenizer = self._require_tokenizer()
        if body.prompt is not None:
            tokens = tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            tokens = tokenizer.encode(self._conversation(body).render(tokenizer.own), special=False)
        return tokens, [tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Return the text of token ids."""
        self._model_name(body.model)
        tokenizer, size = self._require_tokenizer(), self._vocab_size
        if wrong := [token for token in body.tokens if not 0 <= token < size]:
            raise RequestError(f"token {wrong[0]}; valid: 0 to {size - 1}")
        return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    def _require_tokenizer(self) -> UserTokenizer:
        if self._tokenizer is None:
            raise ConfigError("the model has no tokenizer: prompts and outputs are token ids")
        return self._tokenizer

    async def models(self) -> Response:
        """List the model under its names."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._options.model_names]})

    async def model(self, name: str) -> Response:
        """Describe the model."""
        return JSONResponse(self._model(self._model_name(name)))

    def _model(self, name: str) -> dict[str, Any]:
        model = Model(id=name, created=self._created, object="model", owned_by="treespec")
        return model.model_dump(exclude_unset=True) | {"max_model_len": self._engine.llm.config.max_model_len}

    async def health(self) -> Response:
        """Answer 200 while rounds run when there are requests, and 503 afterwards."""
        return Response(status_code=200 if self._engine.is_running else 503)

    async def version(self) -> Response:
        """Return the version of treespec."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' format."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


class _Events(EventSourceResponse):
    """Server-sent events, which end their requests when the client leaves, even before the first event."""

    def __init__(self, events: AsyncIterator[Any], streams: Sequence[RequestStream]):
        super().__init__(events, sep="\n")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._streams)


def create_app(engine: AsyncLLM, options: ServerOptions) -> FastAPI:
    """Return the application. The engine remains the caller's to shut down."""
    server = Server(engine, options)
    app = FastAPI(title="treespec", version=__version__, docs_url=None, redoc_url=None)
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        "/v1/completions": ("POST", server.completions),
        "/v1/chat/completions": ("POST", server.chat),
        "/v1/models": ("GET", server.models),
        "/v1/models/{name:path}": ("GET", server.model),
        "/tokenize": ("POST", server.tokenize),
        "/detokenize": ("POST", server.detokenize),
        "/health": ("GET", server.health),
        "/version": ("GET", server.version),
        "/metrics": ("GET", server.metrics),
    }
    for path, (method, handler) in routes.items():
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(TreespecError, on_user_error)
    app.add_exception_handler(StarletteHTTPException, on_http_error)
    app.add_exception_handler(ServerError, on_server_error)
    app.add_exception_handler(Exception, on_server_error)
    app.add_middleware(
        Guard,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        only_loopback=options.only_loopback,
    )
    return app


def _close(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.close()


async def _while_connected(request: Request, result: Awaitable[_Result]) -> _Result:
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
