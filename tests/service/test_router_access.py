"""Who is let in by a router, and how much one client may take of it, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
import pytest_asyncio
from decant_proto.v1 import admin_pb2, inference_pb2, registry_pb2, registry_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until

from decant.client import ApiError, AsyncClient
from foundation.api_keys import Scope, add_api_key, remove_api_key
from foundation.registry_entry import Role
from node.announcer import open_registry
from router.access import OPEN_PATHS
from router.registry import entry_to_proto

pytestmark = pytest.mark.sockets

READ_TIMEOUT_S = 0.3
BODY = {"model": "tiny-model", "prompt": "x", "max_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")


class Guarded:
    """A router that asks for keys, and one key of each scope."""

    def __init__(self, router: RouterUnderTest, key_file: Path) -> None:
        self.router = router
        self.key_file = key_file
        self.keys = {scope: add_api_key(key_file, scope.value, scope) for scope in Scope}

    async def ask(self, path: str, authorization: str | None, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        headers = {} if authorization is None else {"Authorization": authorization}
        method = "GET" if body is None else "POST"
        async with self.router.http.request(method, self.router.url + path, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text, dict(response.headers)


@pytest_asyncio.fixture
async def guarded(folder: Path, tmp_path: Path) -> AsyncIterator[Guarded]:
    key_file = tmp_path / "api-keys"
    key_file.touch(mode=0o600)
    async with router_with(folder, FakeNode("d0"), api_key_file=str(key_file)) as router:
        yield Guarded(router, key_file)


async def test_without_a_good_key_nothing_is_answered_but_probes(guarded: Guarded) -> None:
    key = guarded.keys[Scope.INFERENCE]
    for path in ("/live", "/health", "/metrics"):
        assert (await guarded.ask(path, None))[0] == 200
    wrong = [None, "Bearer decant-wrong", "Bearer", f"Bearer {key}x", f"Token {key}", "Basic !", f"Basic {key}"]
    for authorization in wrong:
        for path, body in (("/v1/completions", BODY), ("/v1/models", None), ("/waiting", None), ("/nowhere", None)):
            status, found, headers = await guarded.ask(path, authorization, body)
            assert status == 401, (path, authorization)
            assert found["error"]["type"] == "invalid_request_error"
            assert found["error"]["code"] == ("missing_api_key" if authorization is None else "invalid_api_key")
            assert headers["WWW-Authenticate"].startswith("Bearer")
            assert "decant-wrong" not in json.dumps(found)
    refused = guarded.router.router.metrics.requests_refused_total
    assert refused._children["missing_api_key"]._value.get() == 4
    assert refused._children["invalid_api_key"]._value.get() == 4 * (len(wrong) - 1)
    assert (await guarded.ask("/v1/completions", f"Bearer {key}", BODY))[0] == 200
    assert (await guarded.ask("/v1/completions", f"bearer  {key} ", BODY))[0] == 200


async def test_no_path_and_no_method_is_open_by_accident(guarded: Guarded) -> None:
    """Whatever is added to the router later is guarded, too."""
    application = guarded.router.router._http._runner.app
    routes = {(route.method, route.resource.canonical) for route in application.router.routes() if route.resource}
    assert len(routes) > 10
    for method, path in routes:
        url = guarded.router.url + path.replace("{model:.+}", "x").replace("{name}", "x")
        async with guarded.router.http.request(method, url) as response:
            assert response.status == (200 if path in OPEN_PATHS else 401), (method, path)
    names = [
        f"/{service.full_name}/{method.name}"
        for module in (admin_pb2, inference_pb2, registry_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(names) > 5
    async with grpc.aio.insecure_channel(guarded.router.grpc_address) as channel:
        for name in (*names, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/made.up/Method"):
            call: Any = channel.unary_unary(name)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name


async def test_the_openai_client_takes_a_key_and_names_a_wrong_one(guarded: Guarded) -> None:
    good, wrong = (
        openai.AsyncOpenAI(base_url=f"{guarded.router.url}/v1", api_key=key, max_retries=0)
        for key in (guarded.keys[Scope.INFERENCE], "sk-wrong")
    )
    guarded.router.clients += [good, wrong]
    answer = await good.completions.create(model="tiny-model", prompt="x", max_tokens=3)
    assert answer.usage is not None
    with pytest.raises(openai.AuthenticationError, match="not known here"):
        await wrong.completions.create(model="tiny-model", prompt="x", max_tokens=3)


async def test_scopes_part_those_who_ask_from_those_who_look(guarded: Guarded) -> None:
    inference, admin = guarded.keys[Scope.INFERENCE], guarded.keys[Scope.ADMIN]
    status, found, _ = await guarded.ask("/waiting", f"Bearer {inference}")
    assert (status, found["error"]["code"]) == (403, "insufficient_scope")
    assert (await guarded.ask("/waiting", f"Bearer {admin}"))[0] == 200
    assert (await guarded.ask("/v1/completions", f"Bearer {admin}", BODY))[0] == 200
    assert (await guarded.ask("/v1/completions", f"Bearer {guarded.keys[Scope.NODE]}", BODY))[0] == 403


async def test_a_browser_may_give_the_key_as_a_password(guarded: Guarded) -> None:
    async with guarded.router.http.get(f"{guarded.router.url}/waiting", headers={"Accept": "text/html"}) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Basic")
    password = base64.b64encode(f"me:{guarded.keys[Scope.ADMIN]}".encode()).decode()
    assert (await guarded.ask("/waiting", f"Basic {password}"))[0] == 200


async def test_keys_come_and_go_while_the_router_serves(guarded: Guarded) -> None:
    new = add_api_key(guarded.key_file, "new", Scope.INFERENCE)
    assert (await guarded.ask("/v1/completions", f"Bearer {new}", BODY))[0] == 200
    remove_api_key(guarded.key_file, "new")
    assert (await guarded.ask("/v1/completions", f"Bearer {new}", BODY))[0] == 401


async def test_grpc_asks_for_the_same_keys(guarded: Guarded) -> None:
    address = guarded.router.grpc_address
    for key, code in ((None, "missing_api_key"), ("wrong", "invalid_api_key")):
        async with AsyncClient(address, api_key=key) as client:
            with pytest.raises(ApiError) as caught:
                await client.complete("x", max_tokens=3)
            assert (caught.value.status, caught.value.code) == (grpc.StatusCode.UNAUTHENTICATED, code)
            assert not caught.value.retryable
            with pytest.raises(ApiError):
                await client.nodes()
    async with AsyncClient(address, api_key=guarded.keys[Scope.INFERENCE]) as client:
        assert len((await client.complete("x", max_tokens=3)).token_ids) == 3
        with pytest.raises(ApiError, match="scope admin") as caught:
            await client.drain("d0")
        assert caught.value.status is grpc.StatusCode.PERMISSION_DENIED
    async with AsyncClient(address, api_key=guarded.keys[Scope.ADMIN]) as client:
        assert [node.node_id for node in await client.nodes()] == ["d0"]
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_stranger_cannot_announce_a_node_and_a_node_with_a_key_can(guarded: Guarded) -> None:
    stranger = FakeNode("stranger")
    announcement = registry_pb2.AnnounceRequest(entry=entry_to_proto(stranger.entry), lease_ms=60_000)
    async with grpc.aio.insecure_channel(guarded.router.grpc_address) as channel:
        for metadata in ((), (("authorization", f"Bearer {guarded.keys[Scope.INFERENCE]}"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await registry_pb2_grpc.RegistryStub(channel).Announce(announcement, metadata=metadata)
            expected = grpc.StatusCode.PERMISSION_DENIED if metadata else grpc.StatusCode.UNAUTHENTICATED
            assert caught.value.code() is expected
    (known,) = guarded.router.router.fleet.links(Role.DECODE)
    assert known.hello is not None
    node = FakeNode("d1", tokenizer=known.hello.fingerprint.tokenizer)
    await node.start()
    registry = open_registry(guarded.router.grpc_address, api_key=guarded.keys[Scope.NODE])
    await registry.announce(node.entry, 60.0)
    await until(lambda: guarded.router.router.fleet.connected_by_role()["decode"] == 2)
    await registry.close()
    await node.kill()


# --- how much one client may take


async def connected(router: RouterUnderTest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))


async def test_a_body_that_trickles_is_refused_in_time(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0"), request_read_timeout_s=READ_TIMEOUT_S) as router:
        reader, writer = await connected(router)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"mod')
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 408 ")
        body = json.loads(await asyncio.wait_for(reader.read(), 5))
        assert body["error"]["code"] == "body_too_slow"
        writer.close()
        assert (await router.post("/v1/completions", BODY))[0] == 200


async def test_a_head_that_trickles_and_a_silent_connection_are_hung_up_on(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0"), timeout_keep_alive_s=1.0) as router:
        for beginning in (b"", b"GET /live HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"):
            reader, writer = await connected(router)
            writer.write(beginning)
            trickling = asyncio.create_task(trickle(writer))
            await asyncio.wait_for(reader.read(), 5)  # ends only when the router hangs up
            trickling.cancel()
            writer.close()


async def trickle(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.1)


async def test_heads_are_bounded(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0"), max_header_bytes=1024) as router:
        for headers in ({"X-Long": "x" * 5000}, {f"X-{number}": "x" for number in range(200)}):
            async with router.http.get(f"{router.url}/live", headers=headers) as response:
                assert response.status == 400
        async with AsyncClient(router.grpc_address, api_key="k" * 5000) as client:
            with pytest.raises(ApiError) as caught:
                await client.nodes()
            assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await router.get("/live"))[0] == 200


async def test_connections_beyond_the_limit_are_told_when_to_come_again(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0"), max_connections=3) as router:
        held = [await connected(router) for _ in range(3)]
        for reader, writer in held:
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        reader, writer = await connected(router)
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        for _, one in [*held, (reader, writer)]:
            one.close()

        async def served_again() -> bool:
            async with router.http.get(f"{router.url}/live") as response:
                return response.status == 200

        async with asyncio.timeout(5):
            while not await served_again():
                await asyncio.sleep(0.02)
        assert await router.metric('decant_requests_refused_total{reason="too_many_connections"}') >= 1


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ("job-17/ä".encode(), None),
        (b"tab\there", None),
        (b"\x1b[31mred", None),
        (b"x" * 5000, "x" * 128),
        (b"plain 17", "plain 17"),
        (b"", None),
    ],
)
async def test_a_strange_request_id_is_never_given_back_or_logged(
    folder: Path,
    given: bytes,
    returned: str | None,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        reader, writer = await connected(router)
        body = json.dumps(BODY).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: "
            + given
            + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")[0].decode("latin-1")
        writer.close()
        assert head.split()[1] in ("200", "400")
        found = [line.partition(": ")[2] for line in head.splitlines() if line.lower().startswith("x-request-id")]
        assert found == ([] if returned is None else [returned])
        malformed = await router.metric('decant_requests_refused_total{reason="malformed_http"}')
        assert malformed == (head.split()[1] == "400")
    assert "\x1b[31mred" not in capfd.readouterr().err + caplog.text
