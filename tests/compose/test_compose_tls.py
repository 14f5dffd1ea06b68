"""docker-compose.yml under deploy/compose/tls.yml: TLS and API keys in front, mutual TLS between the router and its nodes.

One router, one prefill node and one decode node have certificates. `decode-1` comes without one first: a stranger, listed by the
registry like the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import openai
import pytest
from certificates import SERVER_NAME, Authority
from compose_engine import Engine
from compose_images import Built
from compose_project import SILENCE_LIMIT_S, WHOLE_LIMIT_S, Project, condition, tell, usable
from compose_versions import COMPOSE_1
from pd_nodes import Metrics
from references import all_references, near_tie_or_none

from bench.ports import free_ports
from decant.client import ApiError, AsyncClient, Tls
from decant.default_model import cache_root, ensure_default_model
from foundation.api_keys import Scope, add_api_key

pytestmark = [
    pytest.mark.docker,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

MEMBERS = {"prefill-0", "decode-0"}
STRANGER = "decode-1"
TLS = "deploy/compose/tls.yml"
USER = 10001
REFUSED_HANDSHAKES = 3


class Guarded(Project):
    def __init__(self, engine: Engine, folder: Path, tool: str) -> None:
        internal, front = Authority(folder), Authority(folder / "front")
        self.member = internal.issue("node")
        public = front.issue("public")
        public.certificate.rename(folder / "public.pem")
        public.private_key.rename(folder / "public.key")
        self.api_key = add_api_key(folder / "api-keys", "test", Scope.INFERENCE)
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER)
        self.front = front.file
        self.http_port, self.grpc_port = free_ports(2)
        environment = {"HTTP_PORT": str(self.http_port), "GRPC_PORT": str(self.grpc_port), "TLS_FOLDER": str(folder)}
        environment |= {"MODELS": str(cache_root()), "DTYPE": "float32", "KV_CACHE_MEMORY": "192MiB"}
        environment |= {"SILENCE_LIMIT": str(SILENCE_LIMIT_S)}
        super().__init__(engine, "decant", ("docker-compose.yml", "tests/compose/small.yml"), environment, tool)

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.front))

    def status_and_body(self, path: str) -> tuple[int, str]:
        """Of the router over HTTPS, without a key; 0 when nobody answers."""
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.trust()))
        try:
            with urllib.request.build_opener(*handlers).open(
                f"https://127.0.0.1:{self.http_port}{path}", timeout=3
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    async def health(self) -> str:
        return (await asyncio.to_thread(self.status_and_body, "/health"))[1]

    async def router_metrics(self) -> Metrics:
        return Metrics((await asyncio.to_thread(self.status_and_body, "/metrics"))[1])

    async def whole(self, nodes: set[str]) -> float:
        async def all_usable() -> bool:
            return usable(await self.health()) == nodes

        return await condition(all_usable, WHOLE_LIMIT_S, lambda: f"the router gives work to {nodes}:\n{self.story()}")

    def story(self) -> str:
        return "\n".join(f"--- {one}\n{self.logs(one, 15)}" for one in ("router", *sorted(MEMBERS)))

    def client(self, api_key: str | None, *, tls: bool = True) -> AsyncClient:
        return AsyncClient(f"127.0.0.1:{self.grpc_port}", api_key=api_key, tls=Tls(ca_file=self.front) if tls else None)

    async def exact_answer(self) -> None:
        reference = next(one for one in all_references() if one.name == "plain-02")
        async with self.client(self.api_key) as client:
            answer = await client.complete(reference.prompt_ids, max_tokens=32, temperature=0.0)
        near_tie_or_none(answer.token_ids, reference)


@pytest.fixture(scope="module")
def guarded(
    engine: Engine, built: Built, tmp_path_factory: pytest.TempPathFactory, newer_compose: str | None
) -> Iterator[Guarded]:
    """By Compose 2 where it can be had: all other tests here use 1.29."""
    ensure_default_model()
    project = Guarded(engine, tmp_path_factory.mktemp("tls"), newer_compose or COMPOSE_1)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


async def test_with_certificates_the_router_finds_its_nodes(guarded: Guarded) -> None:
    begun = time.monotonic()
    services = ("redis", "router", *sorted(MEMBERS))
    await asyncio.to_thread(guarded.compose, "up", "--detach", "--no-build", *services, also=[TLS])
    await guarded.whole(MEMBERS)
    tell(f"under TLS ready {time.monotonic() - begun:.0f} s after `up` of {guarded.tool}")


async def test_answers_over_https_and_grpc_are_the_references_and_their_kv_travels(guarded: Guarded) -> None:
    reference = next(one for one in all_references() if one.name == "chat-08")
    assert reference.text is not None
    async with openai.AsyncOpenAI(
        base_url=f"https://127.0.0.1:{guarded.http_port}/v1",
        api_key=guarded.api_key,
        http_client=openai.DefaultAsyncHttpxClient(verify=guarded.trust(), trust_env=False),
    ) as client:
        answer = await client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": reference.text}],
            temperature=0.0,
            max_tokens=32,
        )
    assert answer.choices[0].message.content == reference.output_text

    async def kv_travels_with_an_answer() -> bool:
        await guarded.exact_answer()
        return (await guarded.metrics("decode-0")).value("kv_transfer_bytes_total") > 0

    await condition(kv_travels_with_an_answer, WHOLE_LIMIT_S, lambda: f"KV travels\n{guarded.story()}")


async def test_a_client_without_a_key_or_without_tls_is_refused(guarded: Guarded) -> None:
    assert (await asyncio.to_thread(guarded.status_and_body, "/v1/models"))[0] == 401
    for api_key, tls, status in (
        (None, True, grpc.StatusCode.UNAUTHENTICATED),
        (guarded.api_key, False, grpc.StatusCode.UNAVAILABLE),
    ):
        async with guarded.client(api_key, tls=tls) as client:
            with pytest.raises(ApiError) as caught:
                await client.complete("x", max_tokens=1)
            assert caught.value.status is status


async def test_a_nodes_control_port_answers_only_whoever_shows_a_certificate(guarded: Guarded) -> None:
    address = f"{guarded.address('prefill-0')}:7100"
    files = (guarded.member.authority, guarded.member.private_key, guarded.member.certificate)
    authority, private_key, certificate = (path.read_bytes() for path in files)
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0))

    async def said_to(credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
        opened = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
        )
        async with opened as channel:
            ask: Any = channel.unary_unary("/decant.v1.Nothing/Nothing")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(b"", timeout=15)
            return caught.value.code()

    assert await said_to(None) is grpc.StatusCode.UNAVAILABLE
    assert await said_to(grpc.ssl_channel_credentials(authority)) is grpc.StatusCode.UNAVAILABLE
    member = grpc.ssl_channel_credentials(authority, private_key, certificate)
    assert await said_to(member) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_node_without_a_certificate_gets_no_work_until_it_has_one(guarded: Guarded) -> None:
    async def failed() -> float:
        return sum((await guarded.router_metrics()).nonzero("tls_failures_total").values())

    before = await failed()
    await asyncio.to_thread(guarded.compose, "up", "--detach", "--no-build", "--no-deps", STRANGER)

    async def refused_again_and_again() -> bool:
        return await failed() >= before + REFUSED_HANDSHAKES

    await condition(refused_again_and_again, WHOLE_LIMIT_S, lambda: f"handshakes fail:\n{guarded.logs(STRANGER)}")
    assert STRANGER in {node["node"] for node in json.loads(await guarded.health())["nodes"]}, (
        "it stands in the registry"
    )
    assert usable(await guarded.health()) == MEMBERS
    await guarded.exact_answer()
    await asyncio.to_thread(guarded.compose, "up", "--detach", "--no-build", "--no-deps", STRANGER, also=[TLS])
    await guarded.whole(MEMBERS | {STRANGER})
    await guarded.exact_answer()
