"""A router, a prefill and a decode node under mutual TLS and API keys, as processes: everything works, and strangers get nowhere.

Clients show certificates, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from certificates import Authority, Files
from decant_proto.v1 import node_pb2, node_pb2_grpc, registry_pb2, registry_pb2_grpc
from pd_nodes import Metrics, NodeProcess, eventually, until_ready
from pd_router_client import attached_over, greedy, prefill_choice
from router_under_test import router_with, until
from tls_system import System, tls_system, until_usable
from trace_collector import SPANS

from bench.ports import free_ports
from decant.client import ApiError, AsyncClient, Tls
from foundation.api_keys import Scope
from foundation.ids import Incarnation, NodeId
from foundation.keys import MasterKeys
from foundation.registry_entry import NodeEntry, Role
from foundation.registry_redis import RegistryUnavailable
from kv_transfer.control_client import ControlClient
from kv_transfer.control_stream import METHOD
from kv_transfer.transport.rendezvous import MAGIC
from net.grpc_plane import internal_plane
from node.announcer import open_registry

pytestmark = [pytest.mark.sockets, pytest.mark.timeout(240)]

HEALTHCHECK = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
PLANES = ("front", "internal")
PROMPT = "a prompt that fills a few blocks; " * 4


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with tls_system(tmp_path_factory.mktemp("tls")) as started:
        yield started


async def test_answers_come_over_https_and_grpc_and_their_kv_from_the_prefill_node(system: System) -> None:
    before = (await system.decode.metrics()).value("kv_transfer_bytes_total")
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {system.api_keys[Scope.INFERENCE]}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{system.url}/v1/completions", json=body, headers=headers, ssl=system.trust()) as answer,
    ):
        over_https = await answer.json()
        assert answer.status == 200, over_https
    async with system.client() as client:
        over_grpc = await client.complete(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert over_https["choices"][0]["text"] == over_grpc.text
    assert (await system.decode.metrics()).value("kv_transfer_bytes_total") > before


async def test_the_front_asks_for_tls_and_a_key(system: System) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", system.ports["http"])
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" not in await asyncio.wait_for(reader.read(), 10)
    writer.close()
    _, metrics = await system.get("/metrics")
    assert 'decant_tls_failures_total{reason="not_tls"} 0' not in metrics
    expiries = {plane: Metrics(metrics).value("tls_certificate_not_after_seconds", plane=plane) for plane in PLANES}
    assert min(expiries.values()) > time.time()
    assert (await system.get("/v1/models"))[0] == 401
    async with AsyncClient(f"127.0.0.1:{system.ports['grpc']}", tls=system.tls()) as client:
        with pytest.raises(ApiError) as caught:
            await client.complete("x")
        assert caught.value.status is grpc.StatusCode.UNAUTHENTICATED
    in_the_clear = AsyncClient(f"127.0.0.1:{system.ports['grpc']}", api_key=system.api_keys[Scope.INFERENCE])
    async with in_the_clear as client:
        with pytest.raises(ApiError) as caught:
            await client.complete("x")
        assert caught.value.status is grpc.StatusCode.UNAVAILABLE


async def test_the_front_lets_in_only_clients_that_show_a_certificate_of_their_authority(system: System) -> None:
    async def refused(reason: str) -> float:
        return Metrics((await system.get("/metrics"))[1]).value("tls_failures_total", reason=reason)

    for reason, shown in (("no_certificate", None), ("untrusted_certificate", system.member)):
        before = await refused(reason)
        context = ssl.create_default_context(cafile=str(system.front.file))
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.private_key)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{system.url}/live", ssl=context)
        assert await refused(reason) > before
        files = (None, None) if shown is None else (shown.certificate, shown.private_key)
        tls, key = Tls(system.front.file, *files), system.api_keys[Scope.INFERENCE]
        async with AsyncClient(f"127.0.0.1:{system.ports['grpc']}", api_key=key, tls=tls) as client:
            with pytest.raises(ApiError) as caught:
                await client.complete("x")
            assert caught.value.status is grpc.StatusCode.UNAVAILABLE


async def test_the_health_check_of_containers_may_show_a_certificate(system: System) -> None:
    async def exit_code(*shown: Path) -> int:
        command = (sys.executable, "-ISs", str(HEALTHCHECK), f"{system.url}/health", *map(str, shown))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        return await asyncio.wait_for(process.wait(), 15)

    assert await exit_code(system.customer.certificate, system.customer.private_key) == 0
    assert await exit_code() == 1


async def test_the_live_page_shows_over_https_what_nodes_say_under_mutual_tls(system: System) -> None:
    async with system.opened("/ui", Scope.ADMIN) as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")
    async with system.opened("/ui/events", Scope.INFERENCE) as answer:
        assert answer.status == 403
    async with system.opened("/ui/events", Scope.ADMIN) as answer, asyncio.timeout(15):
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        rows: dict[str, Any] = {}
        while {name for name, row in rows.items() if row["detail"]} != {system.prefill.name, system.decode.name}:
            event = (await answer.content.readuntil(b"\n\n")).decode()
            if event.startswith("event: snapshot\n"):
                rows = {row["node"]: row for row in json.loads(event.partition("data: ")[2])["nodes"]}
        assert {row["condition"] for row in rows.values()} == {"good"}


async def test_one_request_s_spans_are_one_tree_under_mutual_tls(system: System) -> None:
    async with system.client() as client:
        answer = await client.complete(f"traced: {PROMPT}", max_tokens=4, temperature=0.0, ignore_eos=True)
    names = ("text_completion toy", *SPANS)
    spans = await system.traces.trace_with(*names, attribute=("gen_ai.request.id", answer.request_id))
    chain = [spans[name] for name in names]
    assert [child.parent for child in chain[1:]] == [parent.id for parent in chain[:-1]]
    assert len({span.trace for span in chain}) == 1
    assert [span.service.removeprefix("decant-") for span in chain] == [
        *("router", "router", "decode", "decode", "prefill"),
    ]
    transfer = spans["transfer"].attributes
    assert transfer["decant.transfer.lane"]
    assert transfer["decant.transfer.bytes"] > 0


def strangers(system: System) -> dict[str, grpc.ChannelCredentials | None]:
    expired = system.internal.issue("expired", not_after=datetime.now(UTC) - timedelta(days=1))
    authority = system.internal.file.read_bytes()

    def shows(files: Files) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(authority, files.private_key.read_bytes(), files.certificate.read_bytes())

    return {
        "in the clear": None,
        "no certificate": grpc.ssl_channel_credentials(authority),
        "another authority": shows(system.stranger),
        "expired": shows(expired),
    }


async def test_a_stranger_gets_no_further_than_the_handshake_of_any_internal_port(system: System) -> None:
    for who, credentials in strangers(system).items():
        for port in (system.prefill.ports.control, system.decode.ports.control, system.ports["registry"]):
            address = f"127.0.0.1:{port}"
            opened: Any = (
                grpc.aio.insecure_channel(address)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials)
            )
            async with opened as channel:
                for call in (attach(channel), transfer(channel), announce(channel)):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await asyncio.wait_for(call, 15)
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, (who, port, caught.value.details())
    async with system.client() as client:
        assert (await client.complete("still there", max_tokens=2)).token_ids
    assert system.prefill.process.poll() is None
    assert system.decode.process.poll() is None


async def attach(channel: grpc.aio.Channel) -> object:
    call: Any = node_pb2_grpc.NodeStub(channel).Attach()
    return await first_of(call, node_pb2.RouterMessage(hello=node_pb2.RouterHello(router_id="stranger", lease_ms=5000)))


async def transfer(channel: grpc.aio.Channel) -> object:
    return await first_of(channel.stream_stream(METHOD)(), b"")


async def announce(channel: grpc.aio.Channel) -> object:
    return await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest())


async def first_of(call: Any, message: Any) -> object:
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(message)
    return await call.read()


async def test_a_router_of_another_authority_reaches_no_node_and_says_why(system: System) -> None:
    (registry_port,) = free_ports(1)
    foreign = Authority(system.folder / "foreign-router").issue("router")
    options: dict[str, Any] = {**foreign.tls_options(), "registry_port": registry_port}
    async with router_with(system.folder / "toy", wait_ready=False, silence_limit_s=2.0, **options) as router:
        embedded = router.router.embedded
        assert embedded is not None
        await embedded.announce(
            NodeEntry(NodeId(system.decode.name), Role.DECODE, system.decode.control_address, Incarnation(1)), 60.0
        )
        failures = router.router.metrics.tls_failures_total._children
        await until(lambda: failures["untrusted_certificate"]._value.get() > 0)
        assert router.router.fleet.not_ready_reasons()


async def test_a_node_of_another_authority_is_never_announced_and_pairs_with_nobody(system: System) -> None:
    foreign = Authority(system.folder / "foreign-node").issue("node")
    failed: list[str] = []
    plane = internal_plane(
        str(foreign.certificate), str(foreign.private_key), str(foreign.authority), failed=failed.append
    )
    registry = open_registry(f"127.0.0.1:{system.ports['registry']}", plane)
    with pytest.raises(RegistryUnavailable):
        await registry.announce(NodeEntry(NodeId("x"), Role.DECODE, "127.0.0.1:1", Incarnation(1)), 60.0)
    await registry.close()
    assert set(failed) == {"untrusted_certificate"}
    before = len(failed)
    events: list[object] = []
    client = ControlClient(events.append, lambda peer, reason: None, 5.0, plane)
    client.open(NodeId(system.prefill.name), system.prefill.control_address)
    await until(lambda: len(failed) > before)
    await client.close_all()
    assert set(failed) == {"untrusted_certificate"}
    assert '"x"' not in (await system.get("/health"))[1]


async def test_f18_a_member_without_the_master_key_gets_no_kv_and_the_refusal_is_counted(system: System) -> None:
    async def refused() -> float:
        return (await system.prefill.metrics()).value("dropped_total", reason="ticket_forged")

    before = await refused()
    async with attached(system, system.prefill) as prefill, attached(system, system.decode) as decode:
        prompt = list(range(100))
        ((kid, _),) = system.keys.secrets
        forged = prefill_choice(MasterKeys(((kid, bytes(32)),)), decode, prefill, "forged-1", prompt)
        answer = await decode.submit(prompt, greedy(2), choices=[forged], request_id="forged-1").end()
        assert len(answer.tokens) == 2, "it is computed by the decode node alone"
    assert await refused() == before + 1


async def test_f34_a_stranger_on_the_data_port_is_hung_up_on_and_counted(system: System) -> None:
    async def refusals() -> float:
        return (await system.prefill.metrics()).value("data_port_refusals")

    before = await refusals()
    guess = struct.pack("<8sQQI", MAGIC, 12345, 2, 4) + b"addr"
    for said in (guess, b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", system.prefill.ports.data)
        writer.write(said)
        if not said:
            writer.close()
        heard = await asyncio.wait_for(reader.read(), 10)
        assert heard in (b"", struct.pack("<BI", 0, 0)), "no worker address is given away"
        writer.close()

    async def counted() -> bool:
        return await refusals() == before + 3

    await eventually(counted, 10, "three strangers are counted")


def attached(system: System, node: NodeProcess) -> Any:
    return attached_over(system.plane().channel(node.control_address))


async def test_a_renewed_certificate_is_shown_to_whoever_comes_next(system: System) -> None:
    def shown() -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", system.ports["http"])).encode()

    before = await asyncio.to_thread(shown)
    system.front.issue("router")
    system.internal.issue("member")
    after = await asyncio.to_thread(shown)
    assert after != before
    async with system.client() as client:
        assert (await client.complete("still there", max_tokens=2)).token_ids
    async with attached(system, system.decode) as client:
        assert client.hello.entry.node_id == system.decode.name


async def test_f01_f22_a_killed_prefill_node_costs_no_answer_and_comes_back_under_its_address(system: System) -> None:
    prompts = [f"{number}: {PROMPT}" for number in range(3)]

    async def answer(prompt: str) -> str:
        async with system.client() as client:
            return (await client.complete(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)).text

    async def moved() -> float:
        return (await system.decode.metrics()).value("kv_transfer_bytes_total")

    system.prefill.process.kill()
    system.prefill.process.wait(10)
    before = await moved()
    alone = [await answer(prompt) for prompt in prompts]
    assert await moved() == before
    system.prefill = system.start("prefill", system.prefill.ports)
    await until_ready(system.prefill)
    await until_usable(system)

    async def disaggregated() -> bool:
        await answer(f"{time.time()}: {PROMPT}")
        return await moved() > before

    await eventually(disaggregated, 20, "KV comes from the prefill node again")
    assert [await answer(prompt) for prompt in prompts] == alone


def test_no_log_and_no_process_list_holds_a_secret(system: System) -> None:
    """The last test: it looks at what all others have left."""
    secrets = [*system.api_keys.values(), *(file.read_text().split()[2] for file in [system.folder / "master.key"])]
    secrets += ["PRIVATE KEY", *_lines_of_keys(system)]
    logs = {path.name: path.read_text(errors="replace") for path in system.folder.glob("*.log")}
    assert len(logs) == 3
    processes = (system.router, system.prefill.process, system.decode.process)
    seen = logs | {f"cmdline {one.pid}": Path(f"/proc/{one.pid}/cmdline").read_text() for one in processes}
    found = [(where, secret) for where, text in seen.items() for secret in secrets if secret in text]
    assert found == []


def _lines_of_keys(system: System) -> list[str]:
    files = [path for path in system.folder.rglob("*.key") if path.name != "master.key"]
    assert files
    return [line for path in files for line in path.read_text().splitlines() if len(line) > 40]
