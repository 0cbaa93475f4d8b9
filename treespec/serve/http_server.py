"""uvicorn with limits on header size, on the time for requests to arrive, and on the shutdown time."""

import asyncio
import errno
import json
import logging
import os
import socket
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from treespec.errors import ConfigError
from treespec.serve.errors import Shutdown, error_document
from treespec.serve.options import ServerOptions

logger = logging.getLogger("uvicorn.error")

GRACE = 5  # seconds for running requests to end after Ctrl-C or SIGTERM
LINGER = 1  # seconds for sending and reading a last answer
# Seconds that idle connections stay open: longer than in clients' pools (httpx: 5), which would otherwise send requests
# on connections that are being closed.
KEEP_ALIVE = 75
MAX_HEADER_BYTES = 64 << 10


class Protocol(HttpToolsProtocol):
    """Protocol that answers status 431 to oversized headers, and 408 to headers that arrive too slowly.

    httptools joins the parts of a header in time quadratic in their number. Trailers and chunk extensions count as
    headers. `Guard` limits the time of bodies.
    """

    def __init__(self, *args: Any, read_timeout: float, **options: Any):
        super().__init__(*args, **options)
        self._read_timeout = read_timeout
        self._timer: asyncio.TimerHandle | None = None  # active while a request is expected or arriving
        self._num_header_bytes = 0  # header bytes since the last byte of a body
        self._is_in_headers = self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self._is_refused and not self.transport.is_closing():
            room = MAX_HEADER_BYTES - self._num_header_bytes
            if not room:
                self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
                return
            chunk, data = data[:room], data[room:]
            self._num_header_bytes += len(chunk)
            super().data_received(chunk)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._read_timeout, self._end_slow_request)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow_request(self) -> None:
        if self.is_answering:  # an earlier request, or the one with a body awaited by `Guard`
            self._start_timer()
        elif self._is_in_headers:
            self._refuse(408, f"the headers took more than {self._read_timeout:g} s (--read-timeout)")
        else:  # nothing was sent, or a body continues after the answer
            self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Answer invalid input. Closing immediately, while the client may be sending, would reset the connection."""
        if self.is_answering:
            self.transport.close()
            return
        body = json.dumps(error_document(message, status)).encode()
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self.transport.write("\r\n".join(head).encode() + body)
        self._is_refused = True
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER, self.transport.close)


class HttpServer(uvicorn.Server):
    """Serves an application of `create_app` until it is interrupted.

    After an interrupt, it rejects new requests, gives running requests `grace` seconds, and then ends them. A second
    signal ends them immediately.
    """

    def __init__(self, app: FastAPI, options: ServerOptions, grace: float = GRACE):
        protocol: Any = partial(Protocol, read_timeout=options.read_timeout)
        settings = options.uvicorn_settings | {"http": protocol, "ws": "none", "lifespan": "off"}
        super().__init__(
            uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=GRACE, **settings)
        )
        self._ending: Shutdown = app.state.shutdown
        self._grace = grace

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # uvicorn handles a second SIGINT, but not a second SIGTERM
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for bound in sockets or ():
            _reuse(bound)  # lets the next server bind the port soon after this one
        await super().startup(sockets)
        if sockets:  # otherwise uvicorn logs the address
            self._log_started_message(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.begin()
        if count := len(self.server_state.tasks):
            logger.info("%d running requests have %g s to end; a second signal ends them now", count, self._grace)
        await self._finish_requests(self._grace)
        self._ending.end()
        await self._finish_requests(LINGER)
        for connection in [*self.server_state.connections]:
            # The client does not read. Cancelling its task, as uvicorn does, would log a traceback.
            if isinstance(connection, Protocol) and (self.force_exit or connection.is_answering):
                connection.transport.abort()
        await super().shutdown(sockets)

    async def _finish_requests(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while self.server_state.tasks and not self.force_exit and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)


def bind(host: str, port: int) -> list[socket.socket]:
    """Return bound, not yet listening sockets for a port on all addresses of a host. Raises ConfigError."""
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            if sockets and not port:  # use one port for all addresses
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets.append(_bind(family, kind, protocol, address))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error  # for example ::1 with IPv6 disabled
        if not sockets and absent is not None:
            raise absent
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise ConfigError(f"port {port} of {host}: {error.strerror}; choose another --port or --host") from error
    return sockets


def _bind(family: int, kind: int, protocol: int, address: Any, reuses: bool = False) -> socket.socket:
    """Bind a socket. Raises OSError.

    If closed connections of an earlier server hold the port, it is reused; until one listens, another process may reuse
    it, too.
    """
    bound = socket.socket(family, kind, protocol)
    try:
        if reuses:
            _reuse(bound)
        if family == socket.AF_INET6:  # IPv4 has its own sockets, as in asyncio
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if reuses or error.errno != errno.EADDRINUSE:
            raise
        return _bind(family, kind, protocol, address, reuses=True)
    return bound


def _reuse(bound: socket.socket) -> None:
    if os.name == "posix":  # elsewhere, reuse would take over the port of a listening process
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
