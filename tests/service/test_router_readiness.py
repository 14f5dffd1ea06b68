"""What a router says of itself: live, ready, why not and since when, the same over HTTP, gRPC and in metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from decant_proto.v1 import inference_pb2, inference_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import LEASE_S, RouterUnderTest, router_with, until

from router.main import HEALTH_EVERY_S
from router.tokenizer import ModelText

pytestmark = pytest.mark.sockets

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("readiness") / "tiny-model")


async def health(router: RouterUnderTest) -> tuple[int, Any]:
    status, body = await router.get("/health")
    return status, json.loads(body)


async def serving(router: RouterUnderTest, service: str) -> int:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_f25_a_router_names_what_is_missing_and_since_when_and_lives_all_the_while(folder: Path) -> None:
    node = FakeNode("d0", ready=False, tokenizer=ModelText.from_folder(folder).fingerprint or "")
    async with router_with(folder, wait_ready=False) as router:
        status, body = await health(router)
        assert (status, body["reasons"][0]["reason"]) == (503, "no_decode_node")
        await until(lambda: router.router.health.problems()[0].since_s > 0.2)
        assert await router.metric('decant_not_ready_seconds{reason="no_decode_node"}') > 0.2
        assert await router.metric("decant_ready") == 0
        assert (await router.get("/live"))[0] == 200
        assert (await serving(router, "liveness"), await serving(router, "readiness")) == (SERVING, NOT_SERVING)

        await node.start()
        try:
            assert router.router.embedded is not None
            await router.router.embedded.announce(node.entry, LEASE_S)
            await until(lambda: [one.detail for one in router.router.health.problems()] == ["d0: node_not_ready"])
            status, body = await health(router)
            assert (status, body["reasons"][0]["reason"]) == (503, "no_usable_decode_node")
            assert [(one["node"], one["refusal"]) for one in body["nodes"]] == [("d0", "node_not_ready")]
            assert await router.metric('decant_nodes{role="decode"}') == 1
            assert await router.metric('decant_nodes_usable{role="decode"}') == 0
            node.ready = True
            await until(lambda: not router.router.health.problems())
            assert (await health(router))[0] == 200
            assert await router.metric("decant_ready") == 1
            assert await router.metric('decant_not_ready_seconds{reason="no_usable_decode_node"}') == 0
            assert await router.metric("decant_registry_up") == 1
            async with asyncio.timeout(40 * HEALTH_EVERY_S):
                while await serving(router, "readiness") != SERVING:
                    await asyncio.sleep(0.02)
        finally:
            await node.kill()


async def test_f23_a_draining_router_is_alive_and_not_ready(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        router.router.dispatcher.draining = True
        status, body = await health(router)
        assert (status, [one["reason"] for one in body["reasons"]]) == (503, ["draining"])
        assert (await router.get("/live"))[0] == 200
        assert await serving(router, "liveness") == SERVING


async def test_a_client_s_trace_context_reaches_the_node_over_http_and_grpc_though_nothing_is_traced_here(
    folder: Path,
) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        for given in (CONTEXT, "nonsense", ""):
            body = {"prompt": "x", "max_tokens": 1}
            async with router.http.post(
                f"{router.url}/v1/completions", json=body, headers={"traceparent": given}
            ) as answer:
                assert answer.status == 200
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            request = inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingOptions(max_tokens=1))
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=(("traceparent", CONTEXT),))
            assert [response async for response in call]
        assert [submit.traceparent for submit in node.submits] == [CONTEXT, "", "", CONTEXT]
