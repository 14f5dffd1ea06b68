"""docker-compose.yml under deploy/compose/tls.yml: TLS and API keys in front, mutual TLS between the router and its nodes.

One router, one prefill node and one decode node have certificates. `decode-1` comes without one first: a stranger, listed by the
registry like the others. What is harmed under load: test_compose_tls_chaos.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import grpc
import openai
import pytest
from chaos_models import ServedModel, served_model
from compose_certificates import Certificates, refusal_over_grpc, said_to, status_over_https
from compose_deployed import FILES, Deployed
from compose_engine import Engine
from compose_harms import UP
from compose_images import Built
from compose_project import WHOLE_LIMIT_S, Project, condition, tell
from compose_versions import COMPOSE_1
from references import all_references, near_tie_or_none

from decant.client import AsyncClient
from decant.default_model import cache_root

pytestmark = [
    pytest.mark.docker,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

MEMBERS = {"prefill-0", "decode-0"}
STRANGER = "decode-1"
REFUSED_HANDSHAKES = 3


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model("real", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def guarded(
    engine: Engine, built: Built, model: ServedModel, certificates: Certificates, newer_compose: str | None
) -> Iterator[Deployed]:
    """By Compose 2 where it can be had: all other tests here use 1.29."""
    project = Deployed(engine, model, certificates, newer_compose or COMPOSE_1)
    project.environment["MODELS"] = str(cache_root())
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


async def exact_over_grpc(guarded: Deployed, certificates: Certificates) -> None:
    reference = next(one for one in all_references() if one.name == "plain-02")
    async with AsyncClient(guarded.grpc["router"], api_key=certificates.api_key, tls=certificates.tls()) as client:
        answer = await client.complete(reference.prompt_ids, max_tokens=32, temperature=0.0)
    near_tie_or_none(answer.token_ids, reference)


async def exact_over_https(guarded: Deployed, certificates: Certificates) -> None:
    reference = next(one for one in all_references() if one.name == "chat-08")
    assert reference.text is not None
    async with openai.AsyncOpenAI(
        base_url=f"{guarded.http['router']}/v1",
        api_key=certificates.api_key,
        http_client=openai.DefaultAsyncHttpxClient(verify=certificates.trust(), trust_env=False),
    ) as client:
        answer = await client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": reference.text}],
            temperature=0.0,
            max_tokens=32,
        )
    assert answer.choices[0].message.content == reference.output_text


async def test_with_certificates_the_router_finds_its_nodes(guarded: Deployed) -> None:
    begun = time.monotonic()
    services = ("redis", "router", *sorted(MEMBERS))
    await asyncio.to_thread(guarded.compose, "up", "--detach", "--no-build", *services)
    await guarded.whole(MEMBERS, ["router"])
    tell(f"under TLS ready {time.monotonic() - begun:.0f} s after `up` of {guarded.tool}")


async def test_answers_over_https_and_grpc_are_the_references_and_their_kv_travels(
    guarded: Deployed, certificates: Certificates
) -> None:
    await exact_over_https(guarded, certificates)

    async def kv_travels_with_an_answer() -> bool:
        await exact_over_grpc(guarded, certificates)
        return (await guarded.metrics("decode-0")).value("kv_transfer_bytes_total") > 0

    await condition(kv_travels_with_an_answer, WHOLE_LIMIT_S, lambda: f"KV travels\n{guarded.logs('decode-0')}")


async def test_a_client_without_a_key_or_without_tls_is_refused(guarded: Deployed, certificates: Certificates) -> None:
    models = f"{guarded.http['router']}/v1/models"
    assert await asyncio.to_thread(status_over_https, models, certificates, certificate=False) == 401
    encrypted, router = certificates.tls(certificate=False), guarded.grpc["router"]
    assert await refusal_over_grpc(router, None, encrypted) is grpc.StatusCode.UNAUTHENTICATED
    assert await refusal_over_grpc(router, certificates.api_key, None) is grpc.StatusCode.UNAVAILABLE


async def test_a_nodes_control_port_answers_only_whoever_shows_a_certificate(
    guarded: Deployed, certificates: Certificates
) -> None:
    control = f"{guarded.address('prefill-0')}:7100"
    assert await said_to(control, None) is grpc.StatusCode.UNAVAILABLE
    assert await said_to(control, certificates.internal(certificate=False)) is grpc.StatusCode.UNAVAILABLE
    assert await said_to(control, certificates.internal(certificate=True)) is grpc.StatusCode.UNIMPLEMENTED


async def failed_handshakes(guarded: Deployed) -> dict[str, float]:
    return (await guarded.metrics("router")).nonzero("tls_failures_total")


async def test_a_node_without_a_certificate_gets_no_work_until_it_has_one(
    guarded: Deployed, certificates: Certificates
) -> None:
    before = sum((await failed_handshakes(guarded)).values())
    in_the_clear = Project(guarded.engine, guarded.name, FILES, guarded.environment, guarded.tool)
    await asyncio.to_thread(in_the_clear.compose, *UP, STRANGER)

    async def refused_again_and_again() -> bool:
        return sum((await failed_handshakes(guarded)).values()) >= before + REFUSED_HANDSHAKES

    await condition(refused_again_and_again, WHOLE_LIMIT_S, lambda: f"handshakes fail:\n{guarded.logs(STRANGER)}")
    listed = {node["node"] for node in json.loads(await guarded.get("router", "/health"))["nodes"]}
    assert STRANGER in listed, "it stands in the registry"
    assert await guarded.usable() == MEMBERS
    await exact_over_grpc(guarded, certificates)
    await asyncio.to_thread(guarded.compose, *UP, STRANGER)
    await guarded.whole(MEMBERS | {STRANGER}, ["router"])
    await exact_over_grpc(guarded, certificates)
