"""The page, its files, and the server-sent events that keep it up to date.

    history    once: the curves so far
    snapshot   twice a second: `board`
    sample     once a second: one more point of the curves

All viewers share one snapshot. A viewer that reads slowly gets the newest one whenever it is ready for one: nothing piles up.

Must not know: what a snapshot holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from aiohttp import web
from decant_proto.v1 import node_pb2

from foundation.background import end
from foundation.log import get_logger
from router.live_page.board import Board
from router.live_page.curves import Curves, Sample

log = get_logger()

MOST_VIEWERS = 32
SNAPSHOT_EVERY_S = 0.5
SAMPLE_EVERY_S = 1.0
WATCH_FOR_S = 6.0
"""What nodes are asked for while somebody looks; asked again after a third of it."""
RECONNECT_AFTER_MS = 1000
WRITE_WITHIN_S = 20.0
"""A viewer that takes nothing for so long is gone."""

_FILES = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "chart.js": ("chart.js", "text/javascript"),
    "rows.js": ("rows.js", "text/javascript"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LivePage:
    """`start` once, `close` once."""

    def __init__(self, board: Board, curves: Curves, now: Callable[[], float]) -> None:
        self._board = board
        self._curves = curves
        self._now = now
        self._viewers = 0
        self._arrived = asyncio.Event()
        self._news = asyncio.Condition()
        self._snapshot = b""
        self._samples = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        folder = files(__package__) / "static"
        self._files = {name: (folder / file).read_bytes() for name, (file, _) in _FILES.items()}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/ui", self._page),
            web.get("/ui/events", self._events, allow_head=False),  # a head alone would hold a viewer's place for ever
            web.get("/ui/{name}", self._file),
        ]

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="live page")

    async def close(self) -> None:
        await end(self._task)
        await self._end_streams()

    async def _end_streams(self) -> None:
        self._closing = True
        async with self._news:
            self._news.notify_all()

    async def _page(self, request: web.Request) -> web.Response:
        return self._answer("")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not name or name not in self._files:
            raise web.HTTPNotFound
        return self._answer(name)

    def _answer(self, name: str) -> web.Response:
        _, content_type = _FILES[name]
        headers = _SAFE | {"Cache-Control": "no-cache"}
        return web.Response(body=self._files[name], content_type=content_type, charset="utf-8", headers=headers)

    # --- the stream

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._viewers >= MOST_VIEWERS:
            text = f"{MOST_VIEWERS} are looking already\n"
            return web.Response(status=503, text=text, headers=_SAFE | {"Retry-After": "5"})
        headers = _SAFE | {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        self._viewers += 1
        self._arrived.set()
        try:
            await response.prepare(request)
            await self._tell(response)
        finally:
            self._viewers -= 1
        return response

    async def _tell(self, response: web.StreamResponse) -> None:
        seen_samples = self._samples
        await self._write(response, f"retry: {RECONNECT_AFTER_MS}\n\n".encode())
        await self._write(response, _event("history", [_point(sample) for sample in self._curves.samples]))
        while not self._closing:
            async with self._news:
                await self._news.wait()
            await self._write(response, self._snapshot)
            missed = min(self._samples - seen_samples, len(self._curves.samples))
            seen_samples = self._samples
            for sample in list(self._curves.samples)[len(self._curves.samples) - missed :]:
                await self._write(response, _event("sample", _point(sample)))

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(WRITE_WITHIN_S):
            await response.write(data)

    # --- what there is to tell

    async def _run(self) -> None:
        try:
            await self._follow()
        except Exception:  # a page that fails must not touch requests
            log.exception("live page stopped")
            await self._end_streams()  # whoever looks sees that it has stopped

    async def _follow(self) -> None:
        """Runs for the router's life: a sample a second; snapshots while somebody looks."""
        watched_until_s = next_sample_s = 0.0
        while True:
            now_s = self._now()
            if self._viewers and now_s >= watched_until_s:
                watched_until_s = now_s + WATCH_FOR_S / 3
                self._watch_nodes()
            if self._viewers:
                self._snapshot = _event("snapshot", self._board.snapshot())
            if now_s >= next_sample_s:
                next_sample_s = now_s + SAMPLE_EVERY_S
                self._curves.sample(now_s, self._board.kv_bytes_per_second() if self._viewers else None)
                self._samples += 1
            if self._viewers:
                async with self._news:
                    self._news.notify_all()
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SNAPSHOT_EVERY_S if self._viewers else SAMPLE_EVERY_S):
                    await self._arrived.wait()

    def _watch_nodes(self) -> None:
        watch = node_pb2.RouterMessage(watch=node_pb2.Watch(for_ms=round(WATCH_FOR_S * 1000)))
        for link in self._board.links():
            link.send(watch)


def _point(sample: Sample) -> dict[str, Any]:
    return asdict(sample)


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()
