"""One node's life, whatever its role: start, announce, serve, drain, stop.

Order of starting: the HTTP side answers while the model is loaded (live, not ready); routers hear of the node only when
everything listens. On SIGTERM readiness is gone at once and new work is refused; work in flight ends; the process exits
within `--drain-grace-s`. A background task or callback that fails is a bug and ends the process loudly: a router goes on
with another node, and nobody meets a node that is half dead.

Must not know: what a role does with a request.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import uvloop
from decant_proto.v1 import node_pb2, node_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST

from engine.port import EngineEvent
from foundation.api_keys import api_key_of
from foundation.background import Background
from foundation.health import Health
from foundation.ids import Incarnation, NodeId
from foundation.log import configure, get_logger
from foundation.metrics import NodeMetrics
from foundation.registry_entry import NodeEntry
from foundation.tracing import NO_TRACER, Tracer, open_tracer
from kv_transfer.wire import write_fingerprint
from net.grpc_plane import IN_THE_CLEAR, GrpcPlane, internal_plane
from node.announcer import Announcer, open_registry
from node.data_devices import data_devices, watch
from node.detail import RecentFailures, TransfersNow, node_detail
from node.engine_feed import EngineFeed
from node.engine_link import EngineLink
from node.engine_setup import ReadyEngine, prepare_engine
from node.grpc_endpoint import GrpcEndpoint
from node.health import EngineProgress
from node.http_endpoint import HttpEndpoint
from node.options import NodeOptions
from node.router_stream import RequestHandler, RouterStreams
from node.wire import entry_to_wire

TEARDOWN_S = 2.0
"""Part of the drain grace that is kept for closing what listens."""

LOADING = "loading_model"

STREAM_GRACE_S = 0.5
"""For what was said last to reach routers and peers."""

log = get_logger()


class NodeService(RequestHandler, Protocol):
    """A role's requests."""

    draining: bool
    idle: asyncio.Event
    failures: RecentFailures

    def drain(self) -> None: ...

    def engine_events(self, events: Sequence[EngineEvent]) -> None: ...


class Role(Protocol):
    """What a role adds to a node. `start` is awaited before the control port listens, `stop` before it stops listening."""

    @property
    def service(self) -> NodeService: ...

    @property
    def epoch(self) -> int:
        """Prefill nodes: the ticket epoch."""

    @property
    def lanes(self) -> Mapping[NodeId, float]:
        """Decode nodes: bytes a second from each prefill node that they are paired with."""

    @property
    def broken_lanes(self) -> Iterable[NodeId]:
        """Decode nodes: the prefill nodes from which no KV comes now."""

    def transfers_now(self) -> TransfersNow:
        """For people: asked for /metrics, for /health, and while a router watches."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a role is assembled from."""

    entry: NodeEntry
    ready: ReadyEngine
    engine: EngineLink
    metrics: NodeMetrics
    health: Health
    endpoint: GrpcEndpoint
    tracer: Tracer = NO_TRACER
    plane: GrpcPlane = IN_THE_CLEAR
    """How routers and other nodes are dialled."""


Assemble = Callable[[NodeParts], Role]


def run_node(options: NodeOptions, assemble: Assemble) -> int:
    """Serve until SIGTERM or SIGINT; the exit code is 0 after a drain, 1 after a failure. Raises StartError before it serves."""
    incarnation = Incarnation(secrets.randbits(64) or 1)
    configure(
        options.log_level,
        options.log_format,
        role=options.role.value,
        node=NodeId(options.node_id),
        incarnation=incarnation,
    )
    for risk in options.risks():
        log.warning("unsafe", risk=risk)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Host(options, incarnation).serve(assemble))


class _Serving(NamedTuple):
    engine: EngineLink
    role: Role
    streams: RouterStreams


class _Host:
    def __init__(self, options: NodeOptions, incarnation: Incarnation) -> None:
        self._options = options
        self._entry = NodeEntry(NodeId(options.node_id), options.role, options.control_address, incarnation)
        self._metrics = NodeMetrics()
        self._plane = internal_plane(
            options.tls_cert_file,
            options.tls_key_file,
            options.tls_ca_file,
            server_name=options.tls_server_name,
            own_name=options.advertise_address,
            failed=self._metrics.tls_failures_total.count,
        )
        if (identity := self._plane.identity) is not None:
            self._metrics.tls_certificate_not_after_seconds.follow("internal", lambda: identity.current().not_after_s)
        self._feed: EngineFeed | None = None
        self._serving: _Serving | None = None
        self._announcer: Announcer | None = None
        self._tracer = open_tracer(
            options.otlp_traces_endpoint,
            f"decant-{options.role.value}",
            {"service.instance.id": options.node_id, "decant.incarnation": f"{incarnation:016x}"},
        )
        self._state = LOADING
        self._background = Background(self._stop)

    async def serve(self, assemble: Assemble) -> int:
        loop = asyncio.get_running_loop()
        self._stop_wanted = loop.create_future()
        loop.set_exception_handler(self._callback_failed)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, None)
        health = self._health = Health(loop.time)
        health.add(lambda: self._state or None)
        http = HttpEndpoint(health, self._exposition, self._parts)
        await http.start(self._options.host, self._options.http_port)
        try:
            return await self._serve_with_engine(health, assemble)
        finally:
            await http.stop()
            self._tracer.close()

    async def _serve_with_engine(self, health: Health, assemble: Assemble) -> int:
        loop = asyncio.get_running_loop()
        ready = await asyncio.to_thread(prepare_engine, self._options)
        gc.collect()
        gc.freeze()  # what was built stays: collections need not walk it again
        engine = EngineLink(ready.engine, loop)
        endpoint = GrpcEndpoint(self._plane)
        devices = data_devices()
        role = assemble(
            NodeParts(self._entry, ready, engine, self._metrics, health, endpoint, self._tracer, self._plane)
        )
        feed = self._feed = EngineFeed(engine.status, self._metrics, ready.graphs)
        progress = EngineProgress(loop.time, max(self._options.silence_limit_s, 3 * ready.step_limit_s))
        health.add(lambda: progress.observe(engine.status().steps, engine.status().has_work))

        def status() -> node_pb2.NodeStatus:
            return feed.node_status(health.problems(), role.service.draining, role.epoch, role.lanes, role.broken_lanes)

        def detail() -> node_pb2.NodeDetail:
            return node_detail(engine.status(), role.transfers_now(), role.service.failures.views())

        streams = RouterStreams(role.service, self._hello(ready), status, self._options.heartbeat_s, detail)
        self._serving = _Serving(engine, role, streams)

        def events_arrived(events: Sequence[EngineEvent]) -> None:
            feed.after_step()
            role.service.engine_events(events)
            if feed.load_changed():
                streams.status_changed()
            if (reason := engine.status().failed) is not None:
                self._stop(RuntimeError(f"the engine failed: {reason}"))

        engine.start(events_arrived)
        endpoint.add(node_pb2_grpc.add_NodeServicer_to_server, streams, ["decant.v1.Node"])
        try:
            await role.start()
            await endpoint.start(self._options.host, self._options.control_port)
            self._background.start(watch(devices, self._options.advertise_address), "watch data devices")
            return await self._serve_until_stopped(role, streams, endpoint, health)
        finally:
            await role.stop()
            await endpoint.stop(STREAM_GRACE_S)
            if not await engine.stop():
                log.warning("the engine's last step did not end in time")

    async def _serve_until_stopped(
        self, role: Role, streams: RouterStreams, endpoint: GrpcEndpoint, health: Health
    ) -> int:
        registry = open_registry(self._options.registry, self._plane, api_key_of(os.environ))
        announcer = self._announcer = Announcer(registry, self._entry)
        self._state = ""
        announcing = self._background.start(announcer.run(), "announce")
        self._background.start(streams.push_status(), "push status")
        self._background.start(self._publish_readiness(endpoint, health), "publish readiness")
        log.info("serving", control_address=self._entry.control_address)
        try:
            failure: BaseException | None = await self._stop_wanted
            if failure is not None:
                log.critical("stopped by a failure", exc_info=failure)
                streams.close("node_failed")
                return 1
            announcing.cancel()
            self._state = "draining"
            role.service.drain()
            streams.status_changed()
            await endpoint.set_ready(False)
            await self._drain(role, announcer)
            streams.close("drained")
            return 0
        finally:
            self._background.cancel()
            await announcer.close()

    async def _drain(self, role: Role, announcer: Announcer) -> None:
        grace_s = max(0.0, self._options.drain_grace_s - TEARDOWN_S)
        log.info("draining", grace_s=grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await announcer.withdraw()
                await role.service.idle.wait()
        except TimeoutError:
            log.warning("drain grace is over, work in flight is given up")
        else:
            log.info("drained")

    async def _publish_readiness(self, endpoint: GrpcEndpoint, health: Health) -> None:
        said: set[str] = set()
        while True:
            problems = health.problems()
            for problem in problems:
                if problem.name not in said:
                    log.warning("not ready", reason=problem.name, detail=problem.detail or None)
            if said and not problems:
                log.info("ready again", after=sorted(said))
            said = {problem.name for problem in problems}
            await endpoint.set_ready(not problems)
            await asyncio.sleep(self._options.heartbeat_s)

    def _hello(self, ready: ReadyEngine) -> node_pb2.NodeHello:
        return node_pb2.NodeHello(
            entry=entry_to_wire(self._entry),
            fingerprint=write_fingerprint(ready.parts.fingerprint),
            model_id=ready.model_id,
            max_model_len=ready.config.max_sequence_length,
            block_size=ready.config.block_size,
            step_limit_ms=round(ready.step_limit_s * 1000),
            kv_bytes_per_token=ready.parts.layout.token_bytes,
            max_num_seqs=ready.config.max_num_seqs,
            max_num_batched_tokens=ready.config.max_num_batched_tokens,
        )

    def _exposition(self) -> tuple[bytes, str]:
        if self._feed is not None:
            self._feed.before_exposition()
        if self._serving is not None:
            self._serving.role.transfers_now().export(self._metrics)
        self._metrics.show_problems({problem.name: problem.since_s for problem in self._health.problems()})
        self._metrics.registry_up.set(self._announcer is not None and self._announcer.announced)
        return self._metrics.exposition(), CONTENT_TYPE_LATEST

    def _parts(self) -> dict[str, Any]:
        """How each part is, for people who read /health."""
        if self._serving is None:
            return {}
        engine, role, streams = self._serving
        status, transfers = engine.status(), role.transfers_now()
        return {
            "engine": {"steps": status.steps, "has_work": status.has_work, "running": status.running},
            "data_plane": {
                "lanes": {
                    peer: {"lane": lane.name, "gigabytes_per_second": round(lane.bytes_per_second / 1e9, 3)}
                    for peer, lane in transfers.lanes.items()
                },
                "broken": dict(transfers.broken),
                "transfers": len(transfers.in_flight),
                "quarantined_arenas": transfers.quarantined_arenas,
            },
            "peers": {"routers": streams.routers},
            "registry": {"announced": self._announcer is not None and self._announcer.announced},
            "draining": role.service.draining,
        }

    # Ends.

    def _stop(self, failure: BaseException | None) -> None:
        """The first call decides; a second signal during a drain changes nothing, SIGKILL is there for the impatient."""
        if failure is None and self._state == LOADING:
            # Nobody knows of this node yet, and the thread that loads the model cannot be interrupted.
            log.info("stopped while loading the model")
            os._exit(0)
        if not self._stop_wanted.done():
            self._stop_wanted.set_result(failure)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback that raised (an engine event, a timer) is a bug of ours; other reports are logged."""
        failure = context.get("exception")
        log.error("event loop", problem=context.get("message"), exc_info=failure)
        if "handle" in context and failure is not None:
            self._stop(failure)
