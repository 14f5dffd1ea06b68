"""A node's gRPC server: its services, health (`liveness`, `readiness`, and the empty name = readiness) and reflection.

Must not know: roles, the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from foundation.errors import ConfigurationError
from net.grpc_plane import HANDSHAKE_LIMIT_MS, IN_THE_CLEAR, GrpcPlane

LONGEST_MESSAGE_BYTES = 16 << 20
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_LIMIT_MS),
    ("grpc.max_receive_message_length", LONGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", LONGEST_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
)


class GrpcEndpoint:
    def __init__(self, plane: GrpcPlane = IN_THE_CLEAR) -> None:
        self._plane = plane
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = HealthServicer()
        self._ready: bool | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._service_names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]

    def add(self, register: Callable[[Any, Any], None], servicer: Any, full_names: Sequence[str]) -> None:
        """`register` is the generated add_XServicer_to_server; `full_names` are what reflection lists."""
        register(servicer, self._server)
        self._service_names += full_names

    async def start(self, host: str, port: int) -> int:
        """The port it listens on (drawn when `port` is 0). Raises ConfigurationError naming the setting."""
        reflection.enable_server_reflection(self._service_names, self._server)
        try:
            bound = self._plane.add_port(self._server, f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigurationError("--control-port", f"cannot listen on {host}:{port}: is it in use?") from error
        await self._server.start()
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        return int(bound)

    async def set_ready(self, ready: bool) -> None:
        if ready is self._ready:
            return
        self._ready = ready
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("readiness", ""):
            await self._health.set(name, serving)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
