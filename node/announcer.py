"""Tells the registry that this node exists, again and again; a registry that is gone stops nothing.

Two registries hold the same entries: Redis (`redis://...`), and the one embedded in a router (`host:port` of its gRPC server).

Must not know: roles, what routers do with an entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import grpc
from decant_proto.v1 import registry_pb2, registry_pb2_grpc

from foundation.log import get_logger
from foundation.registry_entry import ANNOUNCE_EVERY_S, LEASE_S, NodeEntry
from foundation.registry_redis import RedisRegistry, RegistryUnavailable
from net.grpc_plane import IN_THE_CLEAR, GrpcPlane
from node.wire import entry_to_wire

ANSWER_WITHIN_S = 2.0
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2_000))

log = get_logger()


class Registry(Protocol):
    """Both calls raise RegistryUnavailable when the registry does not answer in time."""

    async def announce(self, entry: NodeEntry, lease_s: float) -> None: ...

    async def withdraw(self, entry: NodeEntry) -> None: ...

    async def close(self) -> None: ...


class _Redis:
    def __init__(self, url: str) -> None:
        self._client = RedisRegistry(url, ANSWER_WITHIN_S)

    async def announce(self, entry: NodeEntry, lease_s: float) -> None:
        await self._client.announce(entry, lease_s)

    async def withdraw(self, entry: NodeEntry) -> None:
        await self._client.withdraw(entry.node_id, entry.incarnation)

    async def close(self) -> None:
        await self._client.close()


class _Embedded:
    """`metadata` goes with every call. A channel that failed is dialled anew, with certificates as they are then."""

    def __init__(self, address: str, plane: GrpcPlane, metadata: Sequence[tuple[str, str]]) -> None:
        self._address = address
        self._plane = plane
        self._metadata = tuple(metadata)
        self._dial()

    def _dial(self) -> None:
        self._channel = self._plane.channel(self._address, CHANNEL_OPTIONS)
        self._stub = registry_pb2_grpc.RegistryStub(self._channel)

    async def announce(self, entry: NodeEntry, lease_s: float) -> None:
        request = registry_pb2.AnnounceRequest(entry=entry_to_wire(entry), lease_ms=round(lease_s * 1000))
        try:
            await self._stub.Announce(request, timeout=ANSWER_WITHIN_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error) from error

    async def withdraw(self, entry: NodeEntry) -> None:
        request = registry_pb2.WithdrawRequest(node_id=entry.node_id, incarnation=entry.incarnation)
        try:
            await self._stub.Withdraw(request, timeout=ANSWER_WITHIN_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error) from error

    async def _lost(self, error: grpc.aio.AioRpcError) -> RegistryUnavailable:
        await self._channel.close()
        self._dial()
        self._plane.why_lost(self._address, error.code(), error.details())
        return RegistryUnavailable(error.details())

    async def close(self) -> None:
        await self._channel.close()


def open_registry(address: str, plane: GrpcPlane = IN_THE_CLEAR, api_key: str | None = None) -> Registry:
    """`plane` and `api_key` are for a router's. ValueError when `address` is no Redis URL and no host:port."""
    if "://" in address:
        return _Redis(address)
    return _Embedded(address, plane, () if api_key is None else (("authorization", f"Bearer {api_key}"),))


class Announcer:
    def __init__(self, registry: Registry, entry: NodeEntry) -> None:
        self._registry = registry
        self._entry = entry
        self._announced: bool | None = None

    @property
    def announced(self) -> bool:
        """Whether the registry took the last announcement."""
        return self._announced is True

    async def run(self) -> None:
        """Runs until cancelled. Losing and finding the registry are logged once each."""
        while True:
            try:
                await self._registry.announce(self._entry, LEASE_S)
            except RegistryUnavailable as error:
                if self._announced is not False:
                    log.warning("no registry answers", problem=str(error))
                self._announced = False
            else:
                if not self._announced:
                    log.info("announced", control_address=self._entry.control_address)
                self._announced = True
            await asyncio.sleep(ANNOUNCE_EVERY_S)

    async def withdraw(self) -> None:
        try:
            await self._registry.withdraw(self._entry)
        except RegistryUnavailable as error:
            log.warning("no registry answers", problem=str(error))

    async def close(self) -> None:
        await self._registry.close()
