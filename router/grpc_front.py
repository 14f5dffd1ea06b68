"""The router's gRPC servers: what clients ask, on --grpc-port; the embedded registry, there as well or on a port of its own.

Under TLS the two are apart: clients and nodes know other authorities, and a gRPC server asks either everybody for a certificate
or nobody.

Must not know: what services do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio
from decant_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from foundation.errors import ConfigurationError
from net.grpc_plane import HANDSHAKE_LIMIT_MS, GrpcPlane
from router.access import Access, AccessInterceptor
from router.admin_service import AdminService
from router.clients import LARGEST_MESSAGE_BYTES
from router.grpc_errors import MethodRoot
from router.inference_service import InferenceService
from router.options import RouterOptions
from router.registry import EmbeddedRegistry, RegistryService

STOP_S = 1.0
LARGEST_ANNOUNCEMENT_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Services:
    """`registry` None: it is in Redis."""

    inference: InferenceService
    admin: AdminService
    registry: EmbeddedRegistry | None


class GrpcFront:
    """`start` once, `stop` once. Health: `liveness` always serves; `readiness`, and the server as a whole, only while ready."""

    def __init__(
        self,
        options: RouterOptions,
        access: Access,
        front: GrpcPlane,
        internal: GrpcPlane,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`refused` counts by reason."""
        self.port = 0
        self._options = options
        self._front = front
        self._internal = internal
        root = MethodRoot(lambda: refused("invalid"))
        guards = (root, AccessInterceptor(access)) if access.required else (root,)
        self._server = grpc.aio.server(
            interceptors=guards,
            options=_server_options(options.max_body_bytes, options.max_header_bytes),
            maximum_concurrent_rpcs=options.max_connections,
        )
        self._registry_server = self._server
        if options.has_own_registry_port:
            limits = _server_options(LARGEST_ANNOUNCEMENT_BYTES, options.max_header_bytes)
            self._registry_server = grpc.aio.server(
                interceptors=(root,) if internal.identity else guards, options=limits
            )
        self._health = health_aio.HealthServicer()
        self._ready: bool | None = None

    async def start(self, services: Services) -> None:
        """Raises ConfigurationError naming the port that cannot be listened on."""
        self._add(services)
        self.port = self._listen(self._front, self._server, "--grpc-port", self._options.grpc_port)
        await self._server.start()
        if self._registry_server is not self._server:
            self._listen(self._internal, self._registry_server, "--registry-port", self._options.registry_port)
            await self._registry_server.start()

    async def show(self, *, ready: bool) -> None:
        if ready is self._ready:
            return
        self._ready = ready
        status = health_pb2.HealthCheckResponse
        await self._health.set("liveness", status.SERVING)
        for service in ("", "readiness"):
            await self._health.set(service, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop(STOP_S) for server in {self._server, self._registry_server}))

    def _listen(self, plane: GrpcPlane, server: grpc.aio.Server, setting: str, port: int) -> int:
        address = f"{self._options.host}:{port}"
        try:
            return plane.add_port(server, address)
        except RuntimeError:
            raise ConfigurationError(setting, f"cannot listen on {address}: is it in use?") from None

    def _add(self, services: Services) -> None:
        names = [
            inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
            admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ]
        inference_pb2_grpc.add_InferenceServicer_to_server(services.inference, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(services.admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if services.registry is not None:
            registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(services.registry), self._registry_server)
            if self._registry_server is self._server:
                names.append(registry_pb2.DESCRIPTOR.services_by_name["Registry"].full_name)
        reflection.enable_server_reflection(names, self._server)


def _server_options(max_message_bytes: int, max_header_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_LIMIT_MS),
        ("grpc.max_metadata_size", max_header_bytes),
        ("grpc.absolute_max_metadata_size", 2 * max_header_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
    ]
