"""F25: a node whose engine thread hangs in a step. Everything is real but the model: thread, health, HTTP, gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio
from engine_world import submit_of
from fake_runner import FakeRunner, FakeStep
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.config import EngineConfig
from engine.loop import Engine
from engine.step import StepPlan, StepResult
from foundation.health import Health
from foundation.metrics import NodeMetrics
from node.engine_feed import EngineFeed
from node.engine_link import EngineLink
from node.grpc_endpoint import GrpcEndpoint
from node.health import EngineProgress
from node.http_endpoint import HttpEndpoint

pytestmark = pytest.mark.sockets

CONFIG = EngineConfig(4, 16, 4, 16, 64, overlap=True)
STEP_LIMIT_S = 0.2
WAIT_S = 10.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class HangingRunner(FakeRunner):
    """A fake runner whose steps end only while the gate is open."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.gate = threading.Event()
        self.reached = threading.Event()

    def launch(self, plan: StepPlan) -> FakeStep:
        super().launch(plan)
        return HangingStep(self, plan.number)


class HangingStep(FakeStep):
    def result(self) -> StepResult:
        runner = self.runner
        assert isinstance(runner, HangingRunner)
        runner.reached.set()
        assert runner.gate.wait(WAIT_S)
        return super().result()


class Node:
    """The parts of a node between its engine and those who ask how it is."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.runner = HangingRunner()
        self.engine = EngineLink(Engine(CONFIG, self.runner, self.runner.owner_words), loop)
        self.health = Health(loop.time)
        progress = EngineProgress(loop.time, STEP_LIMIT_S)
        status = self.engine.status
        self.health.add(lambda: progress.observe(status().steps, status().has_work))
        self.metrics = NodeMetrics()
        self.feed = EngineFeed(status, self.metrics)
        self.http = HttpEndpoint(self.health, lambda: (b"", "text/plain"))
        self.grpc = GrpcEndpoint()

    async def start(self) -> None:
        self.engine.start(lambda events: None)
        self.url = f"http://127.0.0.1:{await self.http.start('127.0.0.1', 0)}"
        self.address = f"127.0.0.1:{await self.grpc.start('127.0.0.1', 0)}"

    async def stop(self) -> None:
        self.runner.gate.set()
        await self.engine.stop()
        await self.grpc.stop(0)
        await self.http.stop()

    async def get(self, path: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def serving(self, service: str) -> int:
        await self.grpc.set_ready(not self.health.problems())
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def test_f25_a_stuck_engine_thread_is_named_with_its_age_while_liveness_stays(node: Node) -> None:
    assert await node.get("/health") == (200, {"status": "ready", "reasons": [], "parts": {}})
    node.engine.post(submit_of("r", (1, 2, 3, 4, 5)))
    assert await asyncio.to_thread(node.runner.reached.wait, WAIT_S)

    ages: list[float] = []
    async with asyncio.timeout(WAIT_S):
        while len(ages) < 3:
            status, body = await node.get("/health")
            if status == 503:
                (reason,) = body["reasons"]
                assert (reason["reason"], reason["detail"]) == ("engine_stalled", "no step after step 0")
                ages.append(reason["since_s"])
            await asyncio.sleep(0.05)
    assert ages[0] > STEP_LIMIT_S, "the age counts from the last step, not from when somebody looked"
    assert ages == sorted(ages)
    assert ages[-1] > ages[0]
    assert (await node.get("/live"))[0] == 200
    assert await node.serving("liveness") == SERVING
    assert await node.serving("readiness") == await node.serving("") == NOT_SERVING

    said = node.feed.node_status(node.health.problems(), draining=False, epoch=0)
    assert (said.ready, said.serves_alone, list(said.not_ready_reasons)) == (False, False, ["engine_stalled"])

    node.runner.gate.set()
    async with asyncio.timeout(WAIT_S):
        while (await node.get("/health"))[0] != 200 or await node.serving("readiness") != SERVING:
            await asyncio.sleep(0.02)
