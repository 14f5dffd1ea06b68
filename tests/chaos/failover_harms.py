"""Five ways to take a decode node away from its streams, each with its proof and its way back.

A harm that cannot prove itself raises `NoEffect`: what it did shows nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import grpc.aio
from chaos_cluster import ROUTER, SILENCE_LIMIT_S, Cluster, condition
from chaos_faults import NoEffect
from chaos_network import Direction
from decant_proto.v1 import admin_pb2, admin_pb2_grpc
from waiting import TIMES_ARE_TOLD

DRAINED_WITHIN_S = 30.0
FREED_WITHIN_S = 30.0 if TIMES_ARE_TOLD else SILENCE_LIMIT_S + 1.0
GONE_WITHIN_S = 20.0


class Operator:
    """What an operator does through the router's Admin service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)

    async def spare(self, node: str) -> None:
        await self._stub.Drain(admin_pb2.DrainRequest(node_id=node))

    async def use_again(self, node: str) -> None:
        await self._stub.Drain(admin_pb2.DrainRequest(node_id=node, resume=True))

    async def attempts_on(self, node: str) -> int:
        return sum(view.attempts for view in await self.nodes() if view.node_id == node)

    async def nodes(self) -> list[admin_pb2.NodeView]:
        return list((await self._stub.Nodes(admin_pb2.NodesRequest())).nodes)


Harm = Callable[[Cluster, Operator, str], AbstractAsyncContextManager[None]]
"""Harmed when entered; the streams end while it lasts; proven and healed when left. (cluster, operator, decode node)"""


@contextlib.asynccontextmanager
async def killed(cluster: Cluster, operator: Operator, victim: str) -> AsyncIterator[None]:
    member = cluster[victim]
    member.send(signal.SIGKILL)
    try:
        yield
        if member.returncode() != -signal.SIGKILL:
            raise NoEffect(f"{victim} ended with {member.returncode()}, not by SIGKILL")
    finally:
        await condition(lambda: _gone(cluster, victim), GONE_WITHIN_S, f"{victim} is gone")
        member.start()


@contextlib.asynccontextmanager
async def stopped(cluster: Cluster, operator: Operator, victim: str) -> AsyncIterator[None]:
    member = cluster[victim]
    member.send(signal.SIGSTOP)
    try:
        yield
        if member.state() != "T":
            raise NoEffect(f"{victim} was in state {member.state()}, not T")
    finally:
        member.send(signal.SIGCONT)


@contextlib.asynccontextmanager
async def terminated(cluster: Cluster, operator: Operator, victim: str) -> AsyncIterator[None]:
    """SIGTERM: the node drains, and leaves when its streams have moved, long before its grace is over."""
    member = cluster[victim]
    member.send(signal.SIGTERM)
    try:
        yield
        await condition(lambda: _gone(cluster, victim), DRAINED_WITHIN_S, f"{victim} has drained")
        if member.returncode() != 0:
            raise NoEffect(f"{victim} ended with {member.returncode()} instead of draining")
    finally:
        if member.returncode() is None:
            member.send(signal.SIGKILL)
            await condition(lambda: _gone(cluster, victim), GONE_WITHIN_S, f"{victim} is gone")
        member.start()


@contextlib.asynccontextmanager
async def spared(cluster: Cluster, operator: Operator, victim: str) -> AsyncIterator[None]:
    """Drain through Admin: the node stays, its streams go."""
    await operator.spare(victim)
    try:
        yield
        if await operator.attempts_on(victim):
            raise NoEffect(f"{victim} still has streams of this router")
    finally:
        await operator.use_again(victim)


@contextlib.asynccontextmanager
async def cut_off(cluster: Cluster, operator: Operator, victim: str) -> AsyncIterator[None]:
    """Router and node lose each other; the node lives on, decodes on, and frees everything once the router's lease is over."""
    network = cluster.network
    assert network is not None
    before = await asyncio.to_thread(network.swallowed_packets)
    directions = (Direction(ROUTER, victim), Direction(victim, ROUTER))
    for direction in directions:
        await asyncio.to_thread(network.cut, direction)
    cut_s = time.monotonic()
    try:
        freeing = asyncio.create_task(_freed(cluster, victim, cut_s))
        yield
        await freeing
        if await asyncio.to_thread(network.swallowed_packets) == before:
            raise NoEffect(f"no packet was lost between {ROUTER} and {victim}")
    finally:
        for direction in directions:
            await asyncio.to_thread(network.heal, direction)


async def _freed(cluster: Cluster, victim: str, cut_s: float) -> None:
    """Raises AssertionError when the node holds anything of what it was cut off from for longer than it may."""

    async def nothing_held() -> bool:
        metrics = await cluster[victim].metrics()
        return not (
            metrics.blocks()["in_use"] or metrics.value("requests_running") or metrics.value("requests_waiting")
        )

    await condition(nothing_held, cut_s + FREED_WITHIN_S - time.monotonic(), f"{victim}, cut off, frees what it holds")


async def _gone(cluster: Cluster, name: str) -> bool:
    return cluster[name].returncode() is not None


PROCESS_HARMS: dict[str, Harm] = {"killed": killed, "stopped": stopped, "SIGTERM": terminated, "Admin drain": spared}
LINK_HARMS: dict[str, Harm] = {"cut off": cut_off}
