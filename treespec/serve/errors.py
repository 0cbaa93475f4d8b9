"""Errors in OpenAI's format, checks before a request's body is read, and server shutdown."""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treespec.errors import TreespecError, describe_error, short_repr
from treespec.serve.options import LOOPBACK, ServerOptions

INTERNAL_ERROR = "an internal error; see the server's log"
SHUTTING_DOWN = "the server is shutting down"
_MAX_MESSAGE = 2000  # maximum characters of a message, which may quote the request
_MAX_NAME = 200  # maximum characters of a field name, which may come from the client
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 503: {"Connection": "close"}}
# Names of the Python API in errors, and their replacements: the server's fields and flags.
_TERMS = (
    (re.compile(r"tokenization_kwargs=\{'(\w+)': ([^}]*)\}"), r"\1=\2"),
    (re.compile(r'LLM\((\w+)="?([^")]*)"?\)'), lambda found: f"the server's --{found[1].replace('_', '-')} {found[2]}"),
    (re.compile(r"\bmax_model_len\b"), "the server's --max-model-len"),
    (re.compile(r"(valid: |, or )None\b"), r"\1null"),
    (re.compile(r"=(True|False)\b"), lambda found: f"={found[1].lower()}"),
    (re.compile(r"\bSpecConfig\b"), "speculation"),
    (re.compile(r"\bStructuredOutputsParams\b"), "structured_outputs"),
)


class ServerError(Exception):
    """A failure after the request was accepted."""

    def __init__(self, message: str, status: int = 500):
        super().__init__(message)
        self.status = status


def error_document(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    text = message[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()  # the message may quote a lone surrogate
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    headers = _HEADERS.get(status, headers)
    return JSONResponse(error_document(message, status, param, code), status, headers)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Return the error response for a malformed, rejected or failed request."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_response(f"the body is not JSON: {first['ctx']['error']}", 400)
        if isinstance(first["input"], bytes):  # FastAPI reads no other types as JSON
            return error_response("send the body as JSON, with the header Content-Type: application/json", 400)
        path = [str(key) for key in first["loc"] if key != "body"]
        name = ".".join(path)[:_MAX_NAME] or "body"
        value = "" if first["type"] == "missing" else f"={short_repr(first['input'])}"
        return error_response(f"{name}{value}: {first['msg']}", 400, path[0] if path else None)
    if isinstance(error, StarletteHTTPException):
        cause = error.__cause__  # of FastAPI's "error parsing the body": not UTF-8, or nested too deeply
        detail = error.detail if cause is None else f"the body is not JSON: {describe_error(cause)}"
        message = f"{request.method} {request.url.path[:100]}: {detail}"
        return error_response(message, error.status_code, headers=error.headers)  # the Allow header of a 405
    if isinstance(error, TreespecError):
        message = str(error)
        for term, replacement in _TERMS:
            message = term.sub(replacement, message)
        return error_response(message, 400)
    if isinstance(error, ServerError):
        return error_response(str(error), error.status)
    return error_response(INTERNAL_ERROR, 500)


class Shutdown:
    """Server shutdown: `begin` rejects new requests; `end` ends running requests with status 503.

    Must be used in the event loop's thread.
    """

    def __init__(self) -> None:
        self.has_begun = self._has_ended = False
        self._timeouts = set[asyncio.Timeout]()

    def begin(self) -> None:
        self.has_begun = True

    def end(self) -> None:
        self.has_begun = self._has_ended = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def limit(self, deadline: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Limit a block by a deadline of the loop's clock (TimeoutError) and by `end` (ServerError)."""
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                if self._has_ended:
                    raise TimeoutError
                self._timeouts.add(timeout)
                try:
                    yield timeout
                finally:
                    self.release(timeout)
        except TimeoutError:
            if self._has_ended:
                raise ServerError(SHUTTING_DOWN, 503) from None
            raise

    def release(self, timeout: asyncio.Timeout) -> None:
        """Let a limited block continue after `end`."""
        self._timeouts.discard(timeout)


class Guard:
    """Middleware that rejects requests without API key, to other hosts, with large or slow bodies, or during shutdown.

    `/health`, `/ping` and the server's own page (which asks for the key) need no key. Without a key, a server on the
    loopback interface rejects other names in `Host`, so that web pages cannot reach it by a name that points to
    127.0.0.1.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, shutdown: Shutdown):
        self._app, self._key, self._max_body_bytes = app, options.api_key, options.max_body_bytes
        self._read_timeout, self._shutdown = options.read_timeout, shutdown
        self._only_loopback = options.is_local and options.uds is None and options.api_key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = scope.get("root_path", "").rstrip("/")  # uvicorn prepends it to the path
        path = scope["path"].removeprefix(root)
        if root and path.startswith(f"{root}/"):  # the proxy did not remove it
            scope, path = {**scope, "path": path}, path.removeprefix(root)
        refusal = self._refuse(Headers(scope=scope), path)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        received = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._read_timeout

        async def receive_limited() -> Message:
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body took more than {self._read_timeout:g} s (--read-timeout)") from None
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            if not message.get("more_body"):
                deadline = None
            return message

        try:
            async with self._shutdown.limit(None) as timeout:

                async def send_released(message: Message) -> None:
                    self._shutdown.release(timeout)  # a started response ends by itself
                    await send(message)

                await self._app(scope, receive_limited, send_released)
        except ServerError as error:
            await error_response(str(error), error.status)(scope, receive, send)

    def _refuse(self, headers: Headers, path: str) -> JSONResponse | None:
        if self._shutdown.has_begun:
            return error_response(SHUTTING_DOWN, 503)
        if self._key is not None and path not in ("/health", "/ping", "/") and not path.startswith("/page/"):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self._key.encode()):
                return error_response(
                    "missing or wrong API key: Authorization: Bearer KEY", 401, code="invalid_api_key"
                )
        host = re.sub(r":\d+$", "", headers.get("host", "").lower()).strip("[]")
        if self._only_loopback and host not in LOOPBACK:
            return error_response(f"Host {host[:60]!r}: this server answers {', '.join(LOOPBACK)}", 403)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return error_response(self._too_large, 413)
        return None

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._max_body_bytes} bytes"
