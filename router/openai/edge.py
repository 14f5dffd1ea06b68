"""The edge of the HTTP server: who is let in, and how much one client may take of it.

A key is looked at before a body; a whole body is read, in time, before anything is made of it.

Must not know: routes, what a request asks for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from foundation.log import bound
from foundation.tls import RenewedContext
from net.http_site import BoundedSite, head_limits
from router.access import BROWSER_CHALLENGE, CHALLENGE, Access, Denied
from router.openai.errors import plain_error_response

LINGERING_S = 2.0
"""After an answer: how long the rest of a body that was not wanted is read, so that the client reads the answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body_bytes: int
    header_bytes: int
    connections: int
    keep_alive_s: float
    read_timeout_s: float


class HttpEdge:
    """`refused` counts by reason; `tls` None: in the clear."""

    def __init__(
        self, limits: HttpLimits, access: Access, tls: RenewedContext | None, refused: Callable[[str], None]
    ) -> None:
        self.limits = limits
        self._access = access
        self._tls = tls
        self._refused = refused

    def runner(self, application: web.Application) -> web.AppRunner:
        return web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            lingering_time=LINGERING_S,
            **head_limits(self.limits.header_bytes, self.limits.keep_alive_s, lambda: self._refused("malformed_http")),
        )

    def site(self, runner: web.AppRunner, listener: socket.socket) -> BoundedSite:
        """On a socket that is already listening."""
        return BoundedSite(
            runner,
            self.limits.connections,
            lambda: self._refused("too_many_connections"),
            None if self._tls is None else self._tls.context,
            (lambda: None) if self._tls is None else self._tls.renew,
            sock=listener,
        )

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        judged = self._access.to_path(request.path, request.headers.get("Authorization"))
        if isinstance(judged, Denied):
            return _denied(request, judged)
        try:
            async with asyncio.timeout(self.limits.read_timeout_s):
                await request.read()
        except TimeoutError:
            return self._too_slow()
        if not judged.name:
            return await handler(request)
        with bound(api_key=judged.name):
            return await handler(request)

    def _too_slow(self) -> web.Response:
        self._refused("body_too_slow")
        message = f"the body did not arrive within {self.limits.read_timeout_s:g} s"
        response = plain_error_response(408, message, "body_too_slow")
        response.force_close()
        return response


def _denied(request: web.Request, denied: Denied) -> web.Response:
    if denied.known:
        return plain_error_response(403, denied.message, denied.code)
    challenge = BROWSER_CHALLENGE if "text/html" in request.headers.get("Accept", "") else CHALLENGE
    return plain_error_response(401, denied.message, denied.code, {"WWW-Authenticate": challenge})
