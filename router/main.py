"""A router process: everything put together, started, drained and stopped.

`run` listens before it does anything slow, so a port in use stops the start with a message that names the setting. SIGTERM and
SIGINT drain: readiness goes 503 at once, new requests are refused, those in flight end within the grace period. A background task
that fails is a bug and ends the process loudly, after what is in flight was told so: its supervisor starts another one.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from foundation import log as logs
from foundation.api_keys import ApiKeyStore, api_key_of
from foundation.background import Background, end
from foundation.errors import ConfigurationError
from foundation.health import Health
from foundation.keys import MasterKeys, read_key_file
from foundation.metrics import RouterMetrics
from foundation.model_folder import resolve_model_folder, served_model_name
from foundation.ports import require_free_port
from foundation.registry_redis import RedisRegistry
from foundation.tls import RenewedContext, TlsIdentity
from foundation.tracing import open_tracer
from net.grpc_plane import GrpcPlane, internal_plane
from router.access import Access
from router.admin_service import AdminService
from router.clients import LinkTiming
from router.dispatch import Dispatcher, Limits
from router.fleet import Fleet
from router.grpc_front import GrpcFront, Services
from router.inference_service import InferenceService
from router.intake import Intake
from router.live_page.board import Board
from router.live_page.curves import Curves
from router.live_page.endpoints import LivePage
from router.openai.edge import HttpEdge, HttpLimits
from router.openai.server import HttpServer
from router.options import EMBEDDED, RouterOptions
from router.placement import Disaggregate
from router.registry import EmbeddedRegistry, NodeSource, RedisSource
from router.request_trace import Traces
from router.tokenizer import ModelText

log = logs.get_logger()

HEALTH_EVERY_S = 0.25
HTTP_BACKLOG = 1024
CLOSE_WITHIN_S = 15.0
"""What takes longer is left to the end of the process."""


def run(options: RouterOptions) -> int:
    """Serves until SIGTERM or SIGINT; the exit code is 0 after a drain, 1 after a failure. Raises StartError before it serves."""
    logs.configure(options.log_level, options.log_format, role="router")
    keys = read_master_keys(Path(options.key_file).expanduser())
    template = Path(options.chat_template) if options.chat_template is not None else None
    text = ModelText.from_folder(resolve_model_folder(options.model, options.revision), template)
    require_free_port("--grpc-port", options.host, options.grpc_port)
    api_keys = ApiKeyStore(_path(options.api_key_file), api_key_of(os.environ))
    for risk in options.risks(api_keys_required=api_keys.required):
        log.warning("unsafe", risk=risk)
    with listen("--http-port", options.host, options.http_port) as listener:
        return uvloop.run(_serve_until_signalled(options, keys, text, api_keys, listener))


async def _serve_until_signalled(
    options: RouterOptions, keys: MasterKeys, text: ModelText, api_keys: ApiKeyStore, listener: socket.socket
) -> int:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    over: asyncio.Future[BaseException | None] = loop.create_future()

    def leave(failure: BaseException | None) -> None:
        """The first call decides."""
        if not over.done():
            over.set_result(failure)

    async def drain_when_signalled() -> None:
        await signalled.wait()
        await router.drain(options.drain_grace_s)
        leave(None)

    background = Background(leave)
    router = Router(options, keys, text, background, api_keys)
    await router.start(listener)
    gc.collect()
    gc.freeze()  # what has been loaded stays: collections need not look at it again
    log.info("router ready", http=f"{options.host}:{options.http_port}", grpc=f"{options.host}:{options.grpc_port}")
    background.start(drain_when_signalled(), "drain")
    if (failure := await over) is not None:
        log.critical("stopped by a failure", exc_info=failure)
        router.dispatcher.give_up()
    try:
        async with asyncio.timeout(CLOSE_WITHIN_S):
            await router.close()
    except TimeoutError:
        log.warning("not closed in time", limit_s=CLOSE_WITHIN_S)
    return 0 if failure is None else 1


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What no task was there to be told of. Logged, and no more: callbacks run for strangers' connections, too."""
    log.error("event loop", problem=context.get("message"), exc_info=context.get("exception"))


class Router:
    """All parts of one router; several may live in one process, as in tests. `start`, then `drain` if wanted, then `close`."""

    def __init__(
        self,
        options: RouterOptions,
        keys: MasterKeys,
        text: ModelText,
        background: Background,
        api_keys: ApiKeyStore | None = None,
    ) -> None:
        """Raises ConfigurationError when certificates are wrong. `api_keys` None: everybody is let in."""
        self.options = options
        self.metrics = RouterMetrics()
        handshake_failed = self.metrics.tls_failures_total.count
        plane = _internal_plane(options, handshake_failed)
        now = time.monotonic
        self.embedded = EmbeddedRegistry(now) if options.registry == EMBEDDED else None
        router_id = f"router-{secrets.token_hex(8)}"
        self.fleet = Fleet(
            self._source(),
            router_id,
            keys,
            LinkTiming(options.silence_limit_s, options.heartbeat_s),
            now,
            text.fingerprint,
            Disaggregate(options.disaggregate),
            plane,
        )
        limits = Limits(options.max_waiting_requests, options.max_waiting_tokens)
        self._tracer = open_tracer(options.otlp_traces_endpoint, "decant-router", {"service.instance.id": router_id})
        model_name = served_model_name(options.model, options.served_model_name)
        self.dispatcher = Dispatcher(self.fleet, text, self.metrics, limits, now, Traces(self._tracer, model_name))
        self.intake = Intake(
            model_name,
            text,
            self._context_limit,
            options.request_timeout_s,
            options.tool_call_parser,
        )
        self._own_context_limit = _least(options.max_model_len, text.context_limit)
        self.health = Health(now)
        self.health.add(lambda: "draining" if self.dispatcher.draining else None)
        self.health.add(self.fleet.problem)
        board = Board(self.fleet, self.dispatcher, self.health, self.intake.model_name, now)
        self._live_page = LivePage(board, Curves(self.metrics), now)
        files = options.front_files()
        tls = None if files is None else RenewedContext(files, handshake_failed)
        _watch_expiry(self.metrics, "front", None if tls is None else tls.identity)
        _watch_expiry(self.metrics, "internal", plane.identity)
        refused = self.metrics.requests_refused_total.count
        access = Access(api_keys or ApiKeyStore(None), refused)
        edge = HttpEdge(_http_limits(options), access, tls, refused)
        self._http = HttpServer(
            self.intake, self.dispatcher, self.fleet, self.metrics, self.health, self._live_page, edge
        )
        self._grpc = GrpcFront(options, access, GrpcPlane(None if tls is None else tls.identity), plane, refused)
        self._background = background
        self._health_task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Raises ConfigurationError naming the port that cannot be listened on."""
        inference = InferenceService(self.intake, self.dispatcher, self.metrics)
        await self._grpc.start(Services(inference, AdminService(self.fleet, self.dispatcher), self.embedded))
        self.fleet.start(self.dispatcher, self._background)
        await self._http.start(listener)
        self._live_page.start()
        self._health_task = self._background.start(self._follow_health(), "health")

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and wait for those in flight."""
        self.dispatcher.draining = True
        await self._grpc.show(ready=False)
        log.info("draining", requests=self.dispatcher.in_flight)
        try:
            await asyncio.wait_for(self.dispatcher.drained(), grace_s)
        except TimeoutError:
            log.warning("grace period over", requests=self.dispatcher.in_flight)
            self.dispatcher.give_up()

    async def close(self) -> None:
        await end(self._health_task)
        await self._live_page.close()
        await self._http.close()
        await self._grpc.stop()
        await self.fleet.close()
        self._tracer.close()

    def _source(self) -> NodeSource:
        if self.embedded is not None:
            return self.embedded
        try:
            return RedisSource(RedisRegistry(self.options.registry))
        except ValueError as error:
            raise ConfigurationError("--registry", f"{self.options.registry!r} is no Redis URL: {error}") from None

    def _context_limit(self) -> int:
        limit = _least(self._own_context_limit, self.fleet.context_limit())
        return limit if limit is not None else 1 << 31

    async def _follow_health(self) -> None:
        while True:
            await self._grpc.show(ready=not self.health.problems())
            await asyncio.sleep(HEALTH_EVERY_S)


def read_master_keys(path: Path) -> MasterKeys:
    """Raises ConfigurationError when the file holds a node's keys: with those a router can sign for one node alone."""
    keys = read_key_file(path)
    if not isinstance(keys, MasterKeys):
        raise ConfigurationError("--key-file", f"{path} holds a node's keys; a router needs the master keys")
    return keys


def listen(setting: str, host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigurationError naming the setting."""
    require_free_port(setting, host, port)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(HTTP_BACKLOG)
    return listener


def _internal_plane(options: RouterOptions, failed: Callable[[str], None]) -> GrpcPlane:
    files = (options.tls_cert_file, options.tls_key_file, options.tls_ca_file)
    return internal_plane(*files, server_name=options.tls_server_name, failed=failed)


def _watch_expiry(metrics: RouterMetrics, plane: str, identity: TlsIdentity | None) -> None:
    if identity is not None:
        metrics.tls_certificate_not_after_seconds.follow(plane, lambda: identity.current().not_after_s)


def _http_limits(options: RouterOptions) -> HttpLimits:
    return HttpLimits(
        options.max_body_bytes,
        options.max_header_bytes,
        options.max_connections,
        options.timeout_keep_alive_s,
        options.request_read_timeout_s,
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
