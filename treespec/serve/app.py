"""The endpoints."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response

from treespec import __version__
from treespec.async_llm import AsyncLLM, RequestStream
from treespec.errors import ConfigError, RequestError, TreespecError
from treespec.outputs import RequestOutput
from treespec.sampling_params import SamplingParams
from treespec.serve.adapters import Adapters
from treespec.serve.answers import Answer, ChatAnswer, CompletionAnswer
from treespec.serve.audit import Audit
from treespec.serve.errors import INTERNAL_ERROR, Guard, ServerError, Shutdown, on_error
from treespec.serve.messages import generic_messages
from treespec.serve.metrics import ServerMetrics
from treespec.serve.options import ServerOptions
from treespec.serve.output_parser import (
    CALL_FORMATS,
    REASONING_TAGS,
    REQUIRED_CALLS,
    OutputParser,
    detect_call_format,
    detect_reasoning,
)
from treespec.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from treespec.serve.reading import Events, Reading, RoundFeed, while_connected
from treespec.serve.responses import ResponsesAnswer, ResponsesBody
from treespec.text.chat import ChatOptions, Conversation, conversations
from treespec.text.prompt_tokenizer import TokenizerThreads, UserTokenizer

logger = logging.getLogger("treespec")

PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


class Server:
    """Handlers of the endpoints over one engine. `defaults` are for requests without parameters."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions, defaults: SamplingParams, shutdown: Shutdown):
        self._shutdown = shutdown
        self._engine, self._options, self._defaults = engine, options, defaults
        self._created = int(time())
        self.adapters = Adapters(engine.llm.loras, options)  # errors stop the server before it listens
        self._metrics = ServerMetrics(engine.llm.engine, options.served_model_name[0])
        factory = engine.llm.request_factory
        self._tokenizer, self._vocab_size = factory.tokenizer, factory.vocab_size
        self._tokenizer_threads = TokenizerThreads()
        template = str(options.chat_template or getattr(engine.llm.get_tokenizer(), "chat_template", None) or "")
        self._is_chat_model = bool(template)
        calls, reasoning = options.tool_call_parser, options.reasoning_parser
        self._calls = CALL_FORMATS.get(str(detect_call_format(template) if calls == "auto" else calls))
        self._reasoning = REASONING_TAGS.get(str(detect_reasoning(template) if reasoning == "auto" else reasoning))
        arguments = options.audit, self._metrics.count_audit, self.adapters.has
        self._audit = Audit(engine, *arguments) if options.audit else None

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several."""
        body.check()
        answer = CompletionAnswer(body, self._model_name(body.model), self._tokenizer)
        return await self._generate(body, answer, body.prompts(), request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        body.check()
        answer = ChatAnswer(body, self._model_name(body.model), self._parser(body))
        return await self._generate(body, answer, [self._conversation(body)], request)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API."""
        body.check()
        chat = body.chat()
        answer = ResponsesAnswer(body, chat, self._model_name(body.model), self._parser(chat))
        return await self._generate(chat, answer, [self._conversation(chat)], request)

    async def _generate(
        self, body: GenerationBody, answer: Answer, prompts: Sequence[Any], request: Request
    ) -> Response:
        params = body.sampling_params(self._defaults)
        lora = self.adapters.get(body.model)
        if answer.needs_special_tokens and body.skip_special_tokens is None:
            params.skip_special_tokens = False

        def ended(prompt_index: int, output: RequestOutput) -> None:
            self._metrics.observe(output)
            if self._audit is not None:
                self._audit.add(streams[prompt_index], output, params, body.speculation, lora)

        with ExitStack() as ends:
            feed, streams = None, list[RequestStream]()
            limit = self._shutdown.limit if body.stream else asyncio.timeout_at  # `Guard` ends other requests
            reading = Reading(streams, self._options.request_timeout, ended, limit)
            if body.rounds:
                feed = RoundFeed(self._engine.llm, answer.request_id)
                ends.callback(feed.close)
            for index, prompt in enumerate(prompts):
                stream = await self._engine.add_request(
                    answer.request_id if len(prompts) == 1 else f"{answer.request_id}-{index}",
                    prompt,
                    params,
                    spec=body.speculation,
                    tokenization_kwargs=body.tokenization(),
                    priority=body.priority or 0,
                    lora_request=lora,
                )
                ends.callback(stream.close)
                streams.append(stream)
            if body.stream:
                return Events(self._events(answer, reading, feed), ends.pop_all())
            outputs = await while_connected(request, reading.outputs())
        return Response(answer.response(outputs), media_type="application/json")

    async def _events(self, answer: Answer, reading: Reading, feed: RoundFeed | None) -> AsyncIterator[dict[str, str]]:
        try:
            for event in answer.opening():
                yield event
            async for prompt_index, output in reading.merged():
                for event in answer.chunks(prompt_index, output, None if feed is None else feed.take()):
                    yield event
            for event in answer.closing():
                yield event
        except ServerError as error:
            self._count_error(error)
            for event in answer.failure(error):
                yield event
        except Exception as error:
            self._count_error(error)
            logger.exception("request %s failed", answer.request_id)
            for event in answer.failure(ServerError(INTERNAL_ERROR)):
                yield event

    def _parser(self, body: ChatBody) -> OutputParser:
        """Return the parser of a request's answers. Raises ConfigError if the format of its calls is unknown."""
        if body.called is not None:
            return OutputParser(named=body.called)
        max_calls = 1 if body.parallel_tool_calls is False else None
        if body.must_call:
            return OutputParser(calls=REQUIRED_CALLS, functions=body.functions, max_calls=max_calls)
        if body.is_constrained:
            return OutputParser()
        calls = self._calls if body.tools_for_template else None
        if body.tools_for_template and calls is None:
            raise ConfigError(
                "tools: the chat template has no known format of calls; start the server with --tool-call-parser "
                f"({', '.join(CALL_FORMATS)}), or use tool_choice 'required'"
            )

        @functools.cache  # called once per choice
        def last_turn(text: str) -> str:
            return self._conversation(body).last_turn(self._engine.llm.get_tokenizer(), text)

        return OutputParser(self._reasoning, calls, functions=body.functions, max_calls=max_calls, last_turn=last_turn)

    def _model_name(self, name: str | None) -> str:
        """Return the client's name for the model, or the first one. Raises HTTPException for an unknown name."""
        names = [*self._options.served_model_name, *self.adapters]
        if name is not None and name not in names:
            raise HTTPException(404, f"model {name[:100]!r}; this server has {', '.join(map(repr, names))}")
        return name or names[0]

    def _conversation(self, body: ChatBody | TokenizeBody) -> Conversation:
        self._require_tokenizer()
        if not self._is_chat_model:
            raise ConfigError("the model has no chat template (not a chat model); use /v1/completions")
        adds, tools = body.add_generation_prompt, body.tools_for_template
        messages = [message.for_template() for message in body.messages or ()]
        if self._calls is not None and self._calls.is_generic:
            messages, tools = generic_messages(messages, tools, self._describing_role if tools else ""), None
        (conversation,) = conversations(
            self._engine.llm.get_tokenizer(),
            messages,
            ChatOptions(
                self._options.chat_template,
                not body.continue_final_message if adds is None else adds,
                body.continue_final_message,
                tools,
                body.chat_template_kwargs,
            ),
        )
        return conversation

    @functools.cached_property
    def _describing_role(self) -> str:
        """The role of the message that describes tools to templates without tools: system, or user if unsupported."""
        turns = [{"role": "system", "content": "probe"}, {"role": "user", "content": "?"}]
        probe = Conversation(turns, ChatOptions(self._options.chat_template))
        try:
            takes_system = "probe" in probe.render(self._engine.llm.get_tokenizer())
        except TreespecError:
            takes_system = False
        role = "system" if takes_system else "user"
        logger.warning(
            "tools: a message of role %r describes them, and calls are read as JSON (--tool-call-parser generic, for "
            "chat templates without tools; none refuses them)",
            role,
        )
        return role

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Return the token ids of a text or conversation, even if it is longer than the context."""
        self._model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ConfigError("pass either prompt or messages")
        prompt = self._conversation(body) if body.prompt is None else body.prompt
        tokenize = functools.partial(self._tokenize, body, prompt, self._require_tokenizer())
        return await asyncio.wrap_future(self._tokenizer_threads.submit(prompt, tokenize))

    def _tokenize(self, body: TokenizeBody, prompt: str | Conversation, tokenizer: UserTokenizer) -> Response:
        if isinstance(prompt, str):
            tokens = tokenizer.encode(prompt, body.add_special_tokens)
        else:
            tokens = tokenizer.encode(prompt.render(tokenizer.base), special=False)
        texts = [tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
        document = {"count": len(tokens), "max_model_len": self._engine.llm.config.max_model_len, "tokens": tokens}
        return JSONResponse(document | {"token_strs": texts})

    def detokenize(self, body: DetokenizeBody) -> Response:
        """Return the text of token ids."""
        self._model_name(body.model)
        if invalid := [token for token in body.tokens if not 0 <= token < self._vocab_size]:
            raise RequestError(f"token {invalid[0]}; valid: 0 to {self._vocab_size - 1}")
        return JSONResponse({"prompt": self._require_tokenizer().decode(body.tokens)})

    def _require_tokenizer(self) -> UserTokenizer:
        if self._tokenizer is None:
            raise ConfigError("the model has no tokenizer: prompts and outputs are token ids")
        return self._tokenizer

    async def models(self) -> Response:
        """List the model under its names, and the adapters."""
        names = [*self._options.served_model_name, *self.adapters]
        return JSONResponse({"object": "list", "data": [*map(self._model, names)]})

    async def model(self, name: str) -> Response:
        """Describe the model."""
        return JSONResponse(self._model(self._model_name(name)))

    def _model(self, name: str) -> dict[str, Any]:
        model = Model(id=name, created=self._created, object="model", owned_by="treespec")
        llm = self._engine.llm
        document = model.model_dump(exclude_unset=True)
        if (lora := self.adapters.get(name)) is not None:
            document |= {"root": lora.lora_path, "parent": self._options.served_model_name[0]}
        return document | {
            "max_model_len": llm.config.max_model_len,
            "max_nodes": llm.config.max_tree_slots,
            "sources": [*llm.draft_names, "lookup"],
            "chat": self._is_chat_model,
        }

    async def page(self) -> Response:
        """Return the page that shows the rounds of a prompt."""
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Return an error response."""
        generating = (self.completions, self.chat, self.responses)
        if request.scope.get("endpoint") in generating and request.method == "POST":
            self._count_error(error)
        return await on_error(request, error)

    def _count_error(self, error: Exception) -> None:
        """Count a request, unless the engine has (invalid prompts, failures in rounds) or its client disconnected."""
        if not isinstance(error, RequestError) and (not isinstance(error, ServerError) or error.status >= 503):
            self._metrics.num_refused += 1

    async def health(self) -> Response:
        """Answer 200 as long as the engine can run rounds, and 503 afterwards."""
        return Response(status_code=200 if self._engine.is_running else 503)

    async def version(self) -> Response:
        """Return the version of treespec."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus format."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


def create_app(engine: AsyncLLM, options: ServerOptions, defaults: SamplingParams) -> FastAPI:
    """Return the application; arguments as in `Server`. The caller must shut down the engine.

    `state.shutdown` is for the HTTP server's shutdown.
    """
    shutdown = Shutdown()
    server = Server(engine, options, defaults, shutdown)
    app = FastAPI(title="treespec", version=__version__, docs_url=None, redoc_url=None)
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        "/v1/completions": ("POST", server.completions),
        "/v1/chat/completions": ("POST", server.chat),
        "/v1/responses": ("POST", server.responses),
        "/v1/models": ("GET", server.models),
        "/v1/models/{name:path}": ("GET", server.model),
        "/v1/load_lora_adapter": ("POST", server.adapters.load),
        "/v1/unload_lora_adapter": ("POST", server.adapters.unload),
        "/tokenize": ("POST", server.tokenize),
        "/detokenize": ("POST", server.detokenize),
        "/health": ("GET", server.health),
        "/ping": ("GET", server.health),
        "/version": ("GET", server.version),
        "/metrics": ("GET", server.metrics),
        "/": ("GET", server.page),
    }
    for path, (method, handler) in routes.items():
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.mount("/page", StaticFiles(directory=PAGE))
    for kind in (RequestValidationError, StarletteHTTPException, TreespecError, ServerError, Exception):
        app.add_exception_handler(kind, server.on_error)
    app.add_middleware(Guard, options=options, shutdown=shutdown)
    app.state.shutdown = shutdown
    if options.allowed_origins:  # outside the guard, since preflight requests have no key
        origins = options.allowed_origins
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app
