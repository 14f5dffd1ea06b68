"""docker-compose.yml under deploy/compose/tls.yml and tls-clients.yml: everybody shows a certificate, clients, too. They ask over
HTTPS and gRPC without a pause, while what operators and accidents do in the clear (test_compose.py) is done here, with the same
demands. The model has random weights and starts in seconds: certificates do not know the model.

The tests share one project and run in order.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import openai
import pytest
import pytest_asyncio
from chaos_load import draw_questions
from chaos_models import ServedModel, served_model
from compose_certificates import Certificates, refusal_over_grpc, said_to, status_over_https
from compose_deployed import DECODE, NODES, PREFILL, ROUTERS, Deployed
from compose_engine import Engine
from compose_harms import (
    at_rest,
    decode_killed_in_mid_stream,
    node_restarted,
    node_taken_off_the_network,
    prefill_killed_in_mid_transfer,
    redis_restarted,
    second_router_restarted_with_streams,
)
from compose_images import Built
from compose_load import BothWays
from compose_project import WHOLE_LIMIT_S, condition, tell
from compose_versions import COMPOSE_1

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

CLIENTS = "deploy/compose/tls-clients.yml"
QUESTIONS, STREAMS = 12, 3


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model("random", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def mutual(
    engine: Engine, built: Built, model: ServedModel, certificates: Certificates, newer_compose: str | None
) -> Iterator[Deployed]:
    """By Compose 2 where it can be had, as in test_compose_tls.py."""
    project = Deployed(engine, model, certificates, newer_compose or COMPOSE_1)
    project.files += (CLIENTS,)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(mutual: Deployed, certificates: Certificates, model: ServedModel) -> AsyncIterator[BothWays]:
    """Questions through the first router that never stop; their unharmed answers are known."""
    http = openai.DefaultAsyncHttpxClient(verify=certificates.trust(), trust_env=False)
    url, key = f"{mutual.http['router']}/v1", certificates.api_key
    async with (
        mutual.channel("router") as channel,
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client,
    ):
        name = (await client.models.list()).data[0].id
        asked = BothWays(model, channel, client, name, draw_questions(model, QUESTIONS, random.Random(23)), 23)
        await asked.learn()
        asked.start(STREAMS)
        yield asked
        await asked.stop()


async def test_under_mutual_tls_all_are_ready_and_the_health_checks_are_let_in(mutual: Deployed) -> None:
    begun = time.monotonic()
    await asyncio.to_thread(mutual.compose, "up", "--detach", "--no-build")
    await mutual.whole()
    tell(f"under mutual TLS everywhere ready {time.monotonic() - begun:.0f} s after `up`")
    for service in (*ROUTERS, *sorted(NODES)):

        async def healthy(service: str = service) -> bool:
            return bool(mutual.state(service)["Health"]["Status"] == "healthy")

        await condition(healthy, WHOLE_LIMIT_S, f"{service} is healthy")


async def test_whoever_shows_no_certificate_is_let_in_nowhere(mutual: Deployed, certificates: Certificates) -> None:
    key, without = certificates.api_key, certificates.tls(certificate=False)
    for router in ROUTERS:
        live = f"{mutual.http[router]}/live"
        assert await asyncio.to_thread(status_over_https, live, certificates, certificate=True) == 200
        assert await asyncio.to_thread(status_over_https, live, certificates, certificate=False) == 0
        assert "no_certificate" in (await mutual.metrics(router)).nonzero("tls_failures_total")
        assert await refusal_over_grpc(mutual.grpc[router], key, without) is grpc.StatusCode.UNAVAILABLE
        assert await refusal_over_grpc(mutual.grpc[router], key, certificates.tls()) is None
    for node in sorted(NODES):
        control = f"{mutual.address(node)}:7100"
        assert await said_to(control, certificates.internal(certificate=False)) is grpc.StatusCode.UNAVAILABLE
        assert await said_to(control, certificates.internal(certificate=True)) is grpc.StatusCode.UNIMPLEMENTED


async def test_f01_under_mutual_tls_a_prefill_node_killed_in_mid_transfer_costs_nobody_anything(
    mutual: Deployed, load: BothWays
) -> None:
    await prefill_killed_in_mid_transfer(mutual, load)


async def test_f05_f22_under_mutual_tls_a_decode_node_killed_in_mid_stream_moves_its_streams_and_comes_back(
    mutual: Deployed, load: BothWays
) -> None:
    await decode_killed_in_mid_stream(mutual, load)


async def test_under_mutual_tls_a_node_taken_off_the_network_is_missed_by_nobody_and_comes_back(
    mutual: Deployed, load: BothWays
) -> None:
    await node_taken_off_the_network(mutual, load)


async def test_f23_under_mutual_tls_every_node_is_restarted_in_turn(mutual: Deployed, load: BothWays) -> None:
    for node in (*PREFILL, *DECODE):
        await node_restarted(mutual, load, node)


async def test_under_mutual_tls_redis_and_one_of_two_routers_are_restarted(
    mutual: Deployed, load: BothWays, model: ServedModel
) -> None:
    await redis_restarted(mutual, load)
    await second_router_restarted_with_streams(mutual, load, model, answer_tokens=2 * model.answer_tokens[1])


async def test_under_mutual_tls_no_answer_was_wrong_or_missing_and_at_the_end_nothing_is_held(
    mutual: Deployed, load: BothWays
) -> None:
    await load.stop()
    verdict, https = load.verdict, load.over_https
    tell(
        f"under mutual TLS {len(verdict.answers)} answers under harm, {https} of them over HTTPS, "
        f"{len(verdict.errors)} errors, near-ties: {verdict.near_ties or 'none'}"
    )
    assert verdict.errors == []
    assert verdict.wrong == []
    assert https
    await at_rest(mutual)
    await mutual.whole()
