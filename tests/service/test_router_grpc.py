"""The router over gRPC: generation as a client finds it through reflection alone, errors by field, health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
from decant_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    types_pb2,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from router_fake_node import FakeNode, expected_answer
from router_model_folder import CONTEXT_LIMIT, write_model_folder
from router_under_test import RouterUnderTest, router_with, until

from router import grpc_errors, inference_service
from router.admin_service import AdminService
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.intake import Intake
from router.registry import EmbeddedRegistry

pytestmark = pytest.mark.sockets

SEEDED = inference_pb2.SamplingOptions(seed=3, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")


async def generate(router: RouterUnderTest, request: Any) -> list[Any]:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        return [response async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request)]


def _ask_through_reflection(address: str) -> tuple[list[str], list[Any]]:
    """What grpcurl does: no generated code, only what the server says of itself."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = sorted(database.get_services())
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("decant.v1.Inference").FindMethodByName("Generate")
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/decant.v1.Inference/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        asked: Any = request(text="hello")
        asked.sampling.seed, asked.sampling.max_tokens = 3, 12
        return services, list(call(asked, timeout=10))


async def test_a_client_without_generated_code_generates_through_reflection(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        services, responses = await asyncio.to_thread(_ask_through_reflection, router.grpc_address)
    assert "decant.v1.Inference" in services
    assert "decant.v1.Registry" in services
    assert "grpc.health.v1.Health" in services
    expected = expected_answer(list(b"hello"), 12, 3)
    assert "".join(response.text for response in responses) == bytes(expected).decode()
    assert [token.token_id for response in responses for token in response.tokens] == expected
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens) == (5, 12)


async def test_tokens_and_chat_are_inputs_too(folder: Path) -> None:
    by_tokens = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=b"hello"), sampling=SEEDED)
    message = inference_pb2.ChatMessage(role="user", content="hi")
    by_chat = inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages(messages=[message]), sampling=SEEDED)
    async with router_with(folder, FakeNode("d0")) as router:
        tokens = await generate(router, by_tokens)
        chat = await generate(router, by_chat)
    assert "".join(one.text for one in tokens) == bytes(expected_answer(list(b"hello"), 12, 3)).decode()
    assert "".join(one.text for one in chat) == bytes(expected_answer(list(b"user: hi\nassistant: "), 12, 3)).decode()


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingOptions(**fields.pop("sampling", {}))
    return inference_pb2.GenerateRequest(**{"text": "x", "sampling": sampling, **fields})


ROWS = [
    (request(n=0), "n"),
    (request(n=129), "n"),
    (request(sampling={"temperature": -1.0}), "temperature"),
    (request(sampling={"temperature": float("nan")}), "temperature"),
    (request(sampling={"top_p": float("inf")}), "top_p"),
    (request(sampling={"min_p": 2.0}), "min_p"),
    (request(sampling={"max_tokens": 0}), "max_tokens"),
    (request(sampling={"max_tokens": CONTEXT_LIMIT}), "max_tokens"),
    (request(sampling={"min_tokens": 5, "max_tokens": 4}), "min_tokens"),
    (request(sampling={"stop_token_ids": [999]}), "stop_token_ids"),
    (request(sampling={"logprobs": 21}), "logprobs"),
    (request(stop=[""]), "stop"),
    (request(text=""), "text"),
    (request(text="x" * CONTEXT_LIMIT), "text"),
    (inference_pb2.GenerateRequest(), "text, token_ids and chat"),
    (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[999])), "token_ids"),
    (inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages()), "messages"),
]


async def test_wrong_values_are_invalid_arguments_that_name_the_field(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        for wrong, field in ROWS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(router, wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, wrong
            assert field in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router, request(model="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert node.submits == []


async def test_a_bug_in_a_method_is_internal_and_tells_nothing_of_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def planted(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Intake, "generations", planted)
    monkeypatch.setattr(Dispatcher, "cancel", planted)
    monkeypatch.setattr(Dispatcher, "accounts", planted)
    monkeypatch.setattr(Fleet, "withhold", planted)
    monkeypatch.setattr(AdminService, "_node", planted)
    monkeypatch.setattr(EmbeddedRegistry, "withdraw", planted)
    logged: list[str] = []
    monkeypatch.setattr(grpc_errors.log, "exception", lambda event, **about: logged.append(about["path"]))
    async with router_with(folder, FakeNode("d0")) as router, grpc.aio.insecure_channel(router.grpc_address) as channel:
        inference, admin = inference_pb2_grpc.InferenceStub(channel), admin_pb2_grpc.AdminStub(channel)
        calls: list[Callable[[], Any]] = [
            lambda: inference.Generate(request()).read(),
            lambda: inference.Cancel(inference_pb2.CancelRequest(request_id="x")),
            lambda: admin.Nodes(admin_pb2.NodesRequest()),
            lambda: admin.Requests(admin_pb2.RequestsRequest()),
            lambda: admin.Drain(admin_pb2.DrainRequest(node_id="d0")),
            lambda: registry_pb2_grpc.RegistryStub(channel).Withdraw(registry_pb2.WithdrawRequest(node_id="d0")),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert caught.value.details() == "internal error of the router"
            assert dict(caught.value.trailing_metadata())["decant-code"] == "internal_error"
    assert [path.rpartition("/")[2] for path in logged] == [
        "Generate",
        "Cancel",
        "Nodes",
        "Requests",
        "Drain",
        "Withdraw",
    ]
    assert not caplog.records, "the library has nothing to say of it"


async def test_f17_bytes_that_are_no_request_are_an_invalid_argument(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_with(folder, FakeNode("d0")) as router, grpc.aio.insecure_channel(router.grpc_address) as channel:
        untyped: Any = channel
        generate = untyped.unary_stream("/decant.v1.Inference/Generate")
        nodes = untyped.unary_unary("/decant.v1.Admin/Nodes")
        for call in (generate(b"\xff" * 9).read(), nodes(b"\xff" * 9)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await router.metric('decant_requests_refused_total{reason="invalid"}') == 2
    assert not caplog.records, "strangers do not fill the log"


async def test_f10_a_client_that_cancels_frees_the_node(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=3)
    async with router_with(folder, node) as router, grpc.aio.insecure_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request(sampling={"max_tokens": 100}))
        await call.read()
        call.cancel()
        await until(lambda: node.cancels and not node.requests, 1.0)
        assert router.router.dispatcher.in_flight == 0


async def test_a_timeout_of_the_clients_own_ends_the_request(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=3)
    async with router_with(folder, node) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router, request(sampling={"max_tokens": 100}, timeout_ms=200))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not node.requests)


async def test_a_client_that_reads_nothing_is_given_up_after_its_deadline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_service, "WRITE_GRACE_S", 0.1)
    asked = request(sampling={"max_tokens": 400, "logprobs": 20}, timeout_ms=200)
    small_window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with (
        router_with(folder, FakeNode("d0")) as router,
        grpc.aio.insecure_channel(router.grpc_address, small_window) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(asked)
        await call.initial_metadata()
        await asyncio.sleep(0.5)  # nothing is read, and nothing else could be waited for
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [response async for response in call]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert dict(raised.value.trailing_metadata())["decant-code"] == "not_read"


async def test_readiness_follows_the_nodes_and_liveness_does_not(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router, grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def serving(service: str) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def becomes(service: str, wanted: bool) -> None:
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=10)
            async for answer in watch:
                if (answer.status == health_pb2.HealthCheckResponse.SERVING) is wanted:
                    return

        await becomes("readiness", True)
        assert (await router.get("/health"))[0] == 200
        await node.kill()
        await becomes("readiness", False)
        assert await serving("liveness")
        assert (await router.get("/health"))[0] == 503
        assert (await router.get("/live"))[0] == 200
