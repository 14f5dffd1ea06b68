"""Where HTTP is listened on: connections are counted, those beyond the limit are refused with a 503 that says when to come again.

Heads of requests are bounded by aiohttp (`head_limits`): in size, and in time, since its keep-alive timer also runs while
the first or a later head is incomplete. Bodies are the application's to bound.

Must not know: routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

BACKLOG = 1024
TLS_HANDSHAKE_LIMIT_S = 10.0
MOST_HEADERS = 100
RETRY_AFTER_S = 1
FAREWELL_S = 1.0
"""For a refused client to read why."""

_BODY = json.dumps(
    {
        "error": {
            "message": "the server has as many connections as it takes",
            "type": "server_error",
            "param": None,
            "code": "too_many_connections",
            "retryable": True,
        }
    }
).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nConnection: close\r\n"
    + f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(_BODY)}\r\n\r\n".encode()
    + _BODY
)


def head_limits(max_header_bytes: int, keep_alive_s: float, malformed: Callable[[], None]) -> dict[str, Any]:
    """Arguments of aiohttp's AppRunner. Longer heads are answered 400; slower ones are hung up on. `malformed` is told of each
    request that is no HTTP or too long; otherwise it would be logged with a traceback, by whoever likes to."""
    return {
        "logger": _log_without_strangers(malformed),
        "max_line_size": max_header_bytes,
        "max_field_size": max_header_bytes,
        "max_headers": MOST_HEADERS,
        "keepalive_timeout": keep_alive_s,
    }


def _log_without_strangers(malformed: Callable[[], None]) -> logging.Logger:
    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info is not None else None
        if isinstance(error, HttpProcessingError):
            malformed()
        # The latter is of a body, and was raised to whoever wanted that before aiohttp met it again.
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)

    log = logging.Logger("net.http")
    log.parent = logging.getLogger()
    log.addFilter(is_ours)
    return log


class BoundedSite(web.BaseSite):
    """`where`: `sock`, or `host` and `port`, as for `loop.create_server`. `refused` is told of each connection too many."""

    def __init__(
        self,
        runner: web.AppRunner,
        most_connections: int,
        refused: Callable[[], None],
        tls: ssl.SSLContext | None = None,
        before_accept: Callable[[], None] = lambda: None,
        **where: Any,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._most_connections = most_connections
        self._refused = refused
        self._before_accept = before_accept
        self._where = where

    @property
    def name(self) -> str:
        return "https" if self._ssl_context else "http"

    async def start(self) -> None:
        """Raises OSError when it cannot listen."""
        await super().start()
        where = dict(self._where)
        if self._ssl_context is not None:
            where |= {"ssl": self._ssl_context, "ssl_handshake_timeout": TLS_HANDSHAKE_LIMIT_S}
        listen: Callable[..., Awaitable[asyncio.AbstractServer]] = asyncio.get_running_loop().create_server
        self._server = await listen(self._accept, backlog=self._backlog, **where)

    def _accept(self) -> asyncio.Protocol:
        self._before_accept()
        server = self._runner.server
        assert server is not None, "a site is started after its runner is set up"
        if len(server.connections) < self._most_connections:
            return server()
        self._refused()
        return _Refusing()


class _Refusing(asyncio.Protocol):
    """Says why, and hangs up when the client has, or after a moment."""

    def __init__(self) -> None:
        self._farewell: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_REFUSAL)
        if transport.can_write_eof():
            transport.write_eof()
        self._farewell = asyncio.get_running_loop().call_later(FAREWELL_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
