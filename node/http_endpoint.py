"""A node's HTTP side, for people and probes: /live, /health, /metrics. No request of a client comes here.

Must not know: roles, the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from foundation.errors import ConfigurationError
from foundation.health import Health
from net.http_site import BoundedSite, head_limits

LONGEST_HEADER_BYTES = 8190
KEEP_ALIVE_S = 75.0
MOST_CONNECTIONS = 256
"""Probes and scrapers."""


class HttpEndpoint:
    """`exposition` gives the metrics in Prometheus' text format and its content type; `parts` says how each part of the node is,
    ready or not."""

    def __init__(
        self,
        health: Health,
        exposition: Callable[[], tuple[bytes, str]],
        parts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._health = health
        self._exposition = exposition
        self._parts = parts
        application = web.Application()
        application.router.add_get("/live", self._live)
        application.router.add_get("/health", self._ready)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            application, access_log=None, **head_limits(LONGEST_HEADER_BYTES, KEEP_ALIVE_S, lambda: None)
        )

    async def start(self, host: str, port: int) -> int:
        """The port it listens on (drawn when `port` is 0). Raises ConfigurationError naming the setting."""
        await self._runner.setup()
        site = BoundedSite(self._runner, MOST_CONNECTIONS, lambda: None, host=host, port=port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError("--http-port", f"cannot listen on {host}:{port}: {error.strerror}") from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _ready(self, request: web.Request) -> web.Response:
        problems = self._health.problems()
        body = {
            "status": "not_ready" if problems else "ready",
            "reasons": [problem.for_people() for problem in problems],
            "parts": self._parts(),
        }
        return web.json_response(body, status=503 if problems else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._exposition()
        return web.Response(body=body, headers={"Content-Type": content_type})
