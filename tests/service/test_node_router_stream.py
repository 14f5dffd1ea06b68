"""The Node service over real gRPC on loopback, with a recorder in place of a role."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import grpc
import pytest
import pytest_asyncio
from decant_proto.v1 import node_pb2, node_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from foundation.errors import ConfigurationError
from node import router_stream
from node.grpc_endpoint import GrpcEndpoint
from node.router_stream import Attachment, RouterStreams

pytestmark = pytest.mark.sockets

HEARTBEAT_S = 0.05


class RecordingRole:
    """A fake role: records what routers say."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Attachment, node_pb2.Submit]] = []
        self.cancelled: list[node_pb2.Cancel] = []
        self.gone: asyncio.Queue[tuple[Attachment, str]] = asyncio.Queue()

    def submit(self, attachment: Attachment, message: node_pb2.Submit) -> None:
        self.submitted.append((attachment, message))
        output = node_pb2.RequestOutput(request_id=message.request_id, attempt=message.attempt)
        attachment.send(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=[output])))

    def cancel(self, attachment: Attachment, message: node_pb2.Cancel) -> None:
        self.cancelled.append(message)

    def detached(self, attachment: Attachment, reason: str) -> None:
        self.gone.put_nowait((attachment, reason))


class Served:
    def __init__(self) -> None:
        self.role = RecordingRole()
        self.running = 0
        self.endpoint = GrpcEndpoint()
        self.streams = RouterStreams(
            self.role,
            node_pb2.NodeHello(model_id="toy"),
            lambda: node_pb2.NodeStatus(ready=True, running=self.running),
            HEARTBEAT_S,
        )
        self.port = 0


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    served.endpoint.add(node_pb2_grpc.add_NodeServicer_to_server, served.streams, ["decant.v1.Node"])
    served.port = await served.endpoint.start("127.0.0.1", 0)
    pushing = asyncio.create_task(served.streams.push_status())
    yield served
    pushing.cancel()
    served.streams.close("test over")
    await served.endpoint.stop(0.1)


@pytest_asyncio.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        yield channel


def hello(router_id: str = "r1", lease_ms: int = 2000) -> node_pb2.RouterMessage:
    return node_pb2.RouterMessage(hello=node_pb2.RouterHello(router_id=router_id, lease_ms=lease_ms))


def submit(request_id: str) -> node_pb2.RouterMessage:
    return node_pb2.RouterMessage(submit=node_pb2.Submit(request_id=request_id, attempt=1))


async def attach(channel: grpc.aio.Channel, first: node_pb2.RouterMessage) -> Any:
    stream = node_pb2_grpc.NodeStub(channel).Attach()
    await stream.write(first)
    return stream


async def next_of_kind(stream: Any, kind: str) -> Any:
    async with asyncio.timeout(5):
        while True:
            message = await stream.read()
            assert message is not grpc.aio.EOF, "the stream ended"
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)


async def test_a_router_hears_hello_then_status_then_heartbeats(served: Served, channel: grpc.aio.Channel) -> None:
    stream = await attach(channel, hello())
    kinds = [(await stream.read()).WhichOneof("message") for _ in range(4)]
    assert kinds == ["hello", "status", "status", "status"]


async def test_a_changed_load_is_told_before_the_next_heartbeat() -> None:
    served = Served()
    served.streams._heartbeat_s = 30.0
    attachment = Attachment("r1", 30.0)
    served.streams._attachments.add(attachment)
    pushing = asyncio.create_task(served.streams.push_status())
    served.running = 7
    served.streams.status_changed()
    async with asyncio.timeout(5):
        message = await anext(attachment.messages())
    assert message.status.running == 7
    pushing.cancel()


async def test_several_routers_hear_only_of_their_own_requests(served: Served, channel: grpc.aio.Channel) -> None:
    one, two = await attach(channel, hello("r1")), await attach(channel, hello("r2"))
    await one.write(submit("a"))
    await two.write(submit("b"))
    assert [output.request_id for output in (await next_of_kind(one, "step")).outputs] == ["a"]
    assert [output.request_id for output in (await next_of_kind(two, "step")).outputs] == ["b"]
    assert served.streams.routers == 2
    assert [attachment.router_id for attachment, _ in served.role.submitted] == ["r1", "r2"]


async def test_f36_a_router_that_falls_silent_loses_its_requests_when_its_lease_lapses(
    served: Served, channel: grpc.aio.Channel
) -> None:
    begun = asyncio.get_running_loop().time()
    stream = await attach(channel, hello("r1", lease_ms=200))
    with contextlib.suppress(
        asyncio.InvalidStateError
    ):  # where this process was kept waiting, the lease is over by now
        await stream.write(submit("a"))
    async with asyncio.timeout(10):
        _, reason = await served.role.gone.get()
    assert reason == "lease_lapsed"
    assert asyncio.get_running_loop().time() - begun > 0.1
    assert served.streams.routers == 0


async def test_heartbeats_renew_the_lease(served: Served, channel: grpc.aio.Channel) -> None:
    loop, lease_s = asyncio.get_running_loop(), 1.0
    for _ in range(20):
        stream = await attach(channel, hello("r1", lease_ms=round(1000 * lease_s)))
        await next_of_kind(stream, "hello")
        beats_s = [loop.time()]
        while beats_s[-1] - beats_s[0] < 1.2 * lease_s:
            await stream.write(node_pb2.RouterMessage(heartbeat=node_pb2.RouterHeartbeat()))
            await asyncio.sleep(0.1)  # what is tested is time: longer than the lease, in steps far below it
            beats_s.append(loop.time())
        if max(after - before for before, after in pairwise(beats_s)) < 0.5 * lease_s:
            assert served.role.gone.empty()
            assert served.streams.routers == 1
            return
        stream.cancel()  # this process was kept waiting, and its lease with it: nothing is shown
        await asyncio.wait_for(served.role.gone.get(), 10)
    raise AssertionError("this machine cannot keep a beat")


async def test_f36_a_router_whose_stream_ends_loses_its_requests_at_once(
    served: Served, channel: grpc.aio.Channel
) -> None:
    stream = await attach(channel, hello("r1", lease_ms=60_000))
    await next_of_kind(stream, "hello")
    stream.cancel()
    async with asyncio.timeout(10):
        attachment, _ = await served.role.gone.get()
    assert attachment.router_id == "r1"


@pytest.mark.parametrize(
    "first", [submit("a"), hello(router_id=""), hello(lease_ms=0), hello(lease_ms=10**9), node_pb2.RouterMessage()]
)
async def test_f17_a_stream_that_does_not_begin_with_a_valid_hello_is_refused(
    served: Served, channel: grpc.aio.Channel, first: node_pb2.RouterMessage
) -> None:
    stream = await attach(channel, first)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await next_of_kind(stream, "step")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.streams.routers == 0
    assert served.role.submitted == []


async def test_a_router_that_does_not_read_is_detached_at_the_outbox_limit() -> None:
    attachment = Attachment("slow", 30.0)
    for _ in range(router_stream.OUTBOX_LIMIT + 10):
        attachment.send(node_pb2.NodeMessage())
    assert not attachment.open
    assert attachment.end_reason == "outbox_full"


async def test_f36_a_router_that_is_cut_off_while_it_is_written_to_loses_its_requests_with_its_lease(
    served: Served, channel: grpc.aio.Channel
) -> None:
    async with asyncio.timeout(30):
        while not served.streams.routers:  # again where this process was kept waiting for longer than the lease
            await attach(channel, hello("r1", lease_ms=500))
            while not served.streams.routers and served.role.gone.empty():
                await asyncio.sleep(0.01)
            if not served.streams.routers:
                served.role.gone.get_nowait()
    (attachment,) = served.streams._attachments
    output = node_pb2.RequestOutput(request_id="x" * 32_768)
    for _ in range(1000):  # much more than an unread stream takes in
        attachment.send(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=[output])))
    async with asyncio.timeout(10):
        _, reason = await served.role.gone.get()
    assert reason == "lease_lapsed"
    assert attachment._outbox.qsize() > 100, "the writer was waiting"


async def test_what_was_said_before_the_end_still_reaches_the_router(served: Served, channel: grpc.aio.Channel) -> None:
    stream = await attach(channel, hello())
    await next_of_kind(stream, "hello")
    (attachment,) = served.streams._attachments
    attachment.send(node_pb2.NodeMessage(step=node_pb2.StepOutput()))
    served.streams.close("drained")
    await next_of_kind(stream, "step")
    assert await stream.read() is grpc.aio.EOF


async def test_a_role_that_fails_on_a_router_s_message_is_heard_of_by_the_node(
    served: Served, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only ended that router's stream, and nobody knew why."""
    failures: asyncio.Queue[BaseException | None] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.put_nowait(context.get("exception")))

    def submit_badly(attachment: Attachment, message: node_pb2.Submit) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(served.role, "submit", submit_badly)
    stream = await attach(channel, hello())
    await stream.write(submit("a"))
    async with asyncio.timeout(5):
        failure = await failures.get()
    assert str(failure) == "a bug"
    _, reason = await served.role.gone.get()
    assert reason == "stream_ended"


async def test_health_knows_liveness_readiness_and_the_whole(served: Served, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    async def serving(name: str) -> bool:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    assert [await serving(name) for name in ("liveness", "readiness", "")] == [True, False, False]
    await served.endpoint.set_ready(True)
    assert [await serving(name) for name in ("liveness", "readiness", "")] == [True, True, True]


async def test_reflection_lists_the_services(served: Served, channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await stream.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"decant.v1.Node", "grpc.health.v1.Health"} <= names


async def test_f32_a_control_port_in_use_names_the_setting(served: Served) -> None:
    second = GrpcEndpoint()
    with pytest.raises(ConfigurationError, match="--control-port"):
        await second.start("127.0.0.1", served.port)
