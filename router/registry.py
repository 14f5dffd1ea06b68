"""Who exists: the nodes' entries, embedded in this router or in Redis, behind one interface.

The embedded registry is served to nodes over gRPC (`RegistryService`); Redis is written by the nodes themselves. Either may be
lost at any time: the fleet keeps the streams it has.

Must not know: streams, placement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc.aio
from decant_proto.v1 import registry_pb2, registry_pb2_grpc, types_pb2

from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import NodeEntry, Role
from foundation.registry_redis import MOST_NODES, RedisRegistry

LONGEST_LEASE_S = 3600.0
_ROLES = {types_pb2.ROLE_PREFILL: Role.PREFILL, types_pb2.ROLE_DECODE: Role.DECODE}
_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}


class NodeSource(Protocol):
    """What the fleet needs of a registry."""

    async def entries(self) -> list[NodeEntry]:
        """Every live entry in order of node id. Raises foundation.registry_redis.RegistryUnavailable."""

    async def changed(self, timeout_s: float) -> None:
        """Returns when an entry may have changed, at the latest after `timeout_s`."""

    async def close(self) -> None: ...


class RedisSource:
    """Redis, asked once every `timeout_s`."""

    def __init__(self, registry: RedisRegistry) -> None:
        self._registry = registry

    async def entries(self) -> list[NodeEntry]:
        return await self._registry.entries()

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        await self._registry.close()


class EmbeddedRegistry:
    """Entries under leases in this process's memory."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._entries: dict[NodeId, tuple[NodeEntry, float]] = {}
        self._change = asyncio.Event()

    async def announce(self, entry: NodeEntry, lease_s: float) -> None:
        """Raises ValueError when the registry is full."""
        self._expire()
        known = self._entries.get(entry.node_id)
        if known is None and len(self._entries) >= MOST_NODES:
            raise ValueError(f"{MOST_NODES} nodes are announced already")
        self._entries[entry.node_id] = (entry, self._now() + min(lease_s, LONGEST_LEASE_S))
        if known is None or known[0] != entry:
            self._change.set()

    async def withdraw(self, node_id: NodeId, incarnation: Incarnation) -> None:
        known = self._entries.get(node_id)
        if known is not None and known[0].incarnation == incarnation:
            del self._entries[node_id]
            self._change.set()

    async def entries(self) -> list[NodeEntry]:
        self._expire()
        return sorted((entry for entry, _ in self._entries.values()), key=lambda entry: entry.node_id)

    async def changed(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._change.wait(), timeout_s)
        except TimeoutError:
            return
        self._change.clear()

    async def close(self) -> None:
        self._entries.clear()

    def _expire(self) -> None:
        now_s = self._now()
        self._entries = {node: held for node, held in self._entries.items() if held[1] > now_s}


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """The embedded registry as nodes reach it."""

    def __init__(self, registry: EmbeddedRegistry) -> None:
        self._registry = registry

    async def Announce(
        self,
        request: registry_pb2.AnnounceRequest,
        context: grpc.aio.ServicerContext[registry_pb2.AnnounceRequest, registry_pb2.AnnounceReply],
    ) -> registry_pb2.AnnounceReply:
        entry = entry_from_proto(request.entry)
        if isinstance(entry, str):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, entry)
        if request.lease_ms == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "lease_ms must be more than 0")
        try:
            await self._registry.announce(entry, request.lease_ms / 1000)
        except ValueError as full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(full))
        return registry_pb2.AnnounceReply()

    async def Withdraw(
        self,
        request: registry_pb2.WithdrawRequest,
        context: grpc.aio.ServicerContext[registry_pb2.WithdrawRequest, registry_pb2.WithdrawReply],
    ) -> registry_pb2.WithdrawReply:
        await self._registry.withdraw(NodeId(request.node_id), Incarnation(request.incarnation))
        return registry_pb2.WithdrawReply()

    async def List(
        self,
        request: registry_pb2.ListRequest,
        context: grpc.aio.ServicerContext[registry_pb2.ListRequest, registry_pb2.ListReply],
    ) -> registry_pb2.ListReply:
        entries = await self._registry.entries()
        return registry_pb2.ListReply(entries=[entry_to_proto(entry) for entry in entries])


def entry_to_proto(entry: NodeEntry) -> types_pb2.NodeEntry:
    return types_pb2.NodeEntry(
        node_id=entry.node_id,
        role=_ROLE_NUMBERS[entry.role],
        control_address=entry.control_address,
        incarnation=entry.incarnation,
    )


def entry_from_proto(message: types_pb2.NodeEntry) -> NodeEntry | str:
    """The entry, or what is wrong with it."""
    role = _ROLES.get(message.role)
    if role is None:
        return "entry.role must be prefill or decode"
    if not message.node_id:
        return "entry.node_id must not be empty"
    if ":" not in message.control_address:
        return f"entry.control_address must be host:port, not {message.control_address!r}"
    return NodeEntry(NodeId(message.node_id), role, message.control_address, Incarnation(message.incarnation))
