"""deploy/compose/host-*.yml as three projects on three machines: each a Docker engine in a network namespace of its own, where
`network_mode: host` is that machine's network. UCX carries KV between their addresses, without NAT. In the clear first, and
once more under TLS.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from chaos_load import Load, draw_questions
from chaos_models import ServedModel, served_model
from chaos_network import Network, free_number
from compose_certificates import USER, Certificates, said_to
from compose_engine import Engine
from compose_images import Built
from compose_load import all_is_well
from compose_project import SILENCE_LIMIT_S, WHOLE_LIMIT_S, Project, body_of, condition, tell, usable
from pd_nodes import Metrics
from references import all_references, near_tie_or_none

from decant.client import ApiError, AsyncClient
from decant.default_model import cache_root, ensure_default_model
from decant.new_key import command as new_key

pytestmark = [
    pytest.mark.docker,
    pytest.mark.netns,
    pytest.mark.model,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

ROLES = ("router", "prefill", "decode")
TLS_FILES = {"router": "deploy/compose/host-router-tls.yml"} | dict.fromkeys(
    ("prefill", "decode"), "deploy/compose/host-node-tls.yml"
)
QUESTIONS, STREAMS = 6, 2


class Hosts:
    """One project a machine. `projects` by role. `tls`: what the machines have under TLS."""

    def __init__(
        self, network: Network, engines: dict[str, Engine], key_file: Path, tls: Certificates | None = None
    ) -> None:
        self.network = network
        self.engines = engines
        self.key_file = key_file
        self.tls = tls
        registry = f"{network.address('router')}:{9001 if tls else 9000}"
        common = {} if tls is None else {"TLS_FOLDER": str(tls.folder)}
        common |= {
            "REGISTRY": registry,
            "KEY_FILE": str(key_file),
            "MODELS": str(cache_root()),
            "INTERFACE": "eth0",
            "DTYPE": "float32",
            "KV_CACHE_MEMORY": "192MiB",
            "SILENCE_LIMIT": str(SILENCE_LIMIT_S),
        }
        self.projects = {
            role: Project(
                engines[role],
                "decant",
                (f"deploy/compose/host-{role}.yml", *([] if tls is None else [TLS_FILES[role]])),
                common | {"ADDRESS": network.address(role)} | ({"REGISTRY": "embedded"} if role == "router" else {}),
            )
            for role in ROLES
        }

    def url(self, role: str, path: str) -> str:
        port = 8000 if role == "router" else 7102
        scheme = "https" if role == "router" and self.tls is not None else "http"
        return f"{scheme}://{self.network.address(role)}:{port}{path}"

    async def get(self, role: str, path: str) -> str:
        return await asyncio.to_thread(body_of, self.url(role, path), None if self.tls is None else self.tls.trust())

    async def metrics(self, role: str) -> Metrics:
        body = await self.get(role, "/metrics")
        assert body, f"{role} gives no metrics:\n{self.story()}"
        return Metrics(body)

    async def usable(self) -> set[str]:
        return usable(await self.get("router", "/health"))

    async def whole(self) -> None:
        async def both() -> bool:
            return len(await self.usable()) == 2

        await condition(both, WHOLE_LIMIT_S, lambda: f"the router gives work to both nodes\n{self.story()}")

    def sent_bytes(self, role: str) -> int:
        """What has left the machine's one interface."""
        command = [*self.network.command(role), "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)

    def story(self) -> str:
        service = {"router": "router", "prefill": "node", "decode": "node"}
        return "\n".join(f"--- {role}\n{self.projects[role].logs(service[role], 15)}" for role in ROLES)


@pytest.fixture(scope="module")
def hosts(engine: Engine, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    ensure_default_model()
    key_file = tmp_path_factory.mktemp("keys") / "decant.key"
    assert new_key([str(key_file)], {}) == 0
    os.chown(key_file, USER, USER)
    with ExitStack() as stack:
        network = stack.enter_context(Network(ROLES, free_number()))
        namespaces = {role: network.command(role)[-1] for role in ROLES}
        engines = {role: stack.enter_context(Engine(namespaces[role], images_of=engine)) for role in ROLES}
        found = Hosts(network, engines, key_file)
        for project in found.projects.values():
            stack.callback(project.compose, "down", "--volumes", "--timeout", "5", check=False)
        yield found


@pytest.fixture(scope="module")
def guarded(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The same machines under TLS, after everything else has been taken down."""
    certificates = Certificates(tmp_path_factory.mktemp("tls"), hosts.network.address("router"))
    with ExitStack() as stack:
        found = Hosts(hosts.network, hosts.engines, hosts.key_file, certificates)
        for project in found.projects.values():
            stack.callback(project.compose, "down", "--volumes", "--timeout", "5", check=False)
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model("real", tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(hosts: Hosts, model: ServedModel) -> AsyncIterator[Load]:
    address = f"{hosts.network.address('router')}:9000"
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        asked = Load(model, channel, draw_questions(model, QUESTIONS, random.Random(3)), 3)
        await asked.learn()
        asked.start(STREAMS)
        yield asked
        await asked.stop()


async def received(hosts: Hosts) -> float:
    return (await hosts.metrics("decode")).value("kv_transfer_bytes_total")


async def more_kv(hosts: Hosts) -> None:
    before = await received(hosts)

    async def more() -> bool:
        return await received(hosts) > before

    await condition(more, WHOLE_LIMIT_S, lambda: f"KV travels\n{hosts.story()}")


async def test_three_machines_find_each_other_in_whatever_order_they_start(hosts: Hosts) -> None:
    begun = time.monotonic()
    for role in ("decode", "prefill", "router"):
        await asyncio.to_thread(hosts.projects[role].compose, "up", "--detach", "--no-build")
    await hosts.whole()
    tell(f"three machines ready {time.monotonic() - begun:.0f} s after the first `up`")


async def test_kv_travels_from_machine_to_machine_over_the_pinned_interface(hosts: Hosts, load: Load) -> None:
    carried_before, kv_before = await asyncio.to_thread(hosts.sent_bytes, "prefill"), await received(hosts)
    await more_kv(hosts)
    await all_is_well(load)
    kv = await received(hosts) - kv_before
    assert await asyncio.to_thread(hosts.sent_bytes, "prefill") - carried_before >= kv > 0
    exposition = await asyncio.to_thread(body_of, hosts.url("decode", "/metrics"))
    assert 'lane="tcp"' in exposition


async def test_f32_a_second_node_on_the_same_ports_ends_by_name(hosts: Hosts) -> None:
    first = hosts.projects["prefill"]
    second = Project(first.engine, "second", first.files, first.environment)
    await asyncio.to_thread(second.compose, "up", "--detach", "--no-build", "--no-deps", "node")
    try:

        async def ended() -> bool:
            return bool(second.state("node")["ExitCode"] == 2)

        await condition(ended, WHOLE_LIMIT_S, lambda: f"the second node ends\n{second.logs('node')}")
        assert f"--control-port: {hosts.network.address('prefill')}:7100 is in use" in second.logs("node")
    finally:
        await asyncio.to_thread(second.compose, "down", "--volumes", "--timeout", "5")
    await hosts.whole()


async def test_f22_the_prefill_machines_node_is_killed_under_load_and_started_again(hosts: Hosts, load: Load) -> None:
    project = hosts.projects["prefill"]
    await more_kv(hosts)
    await asyncio.to_thread(project.engine.docker, "kill", project.container("node"))
    assert project.state("node")["ExitCode"] == 128 + signal.SIGKILL
    await all_is_well(load)
    await asyncio.to_thread(project.engine.docker, "start", project.container("node"))
    await hosts.whole()
    await more_kv(hosts)
    await all_is_well(load)


async def test_down_leaves_nothing_on_any_machine(hosts: Hosts, load: Load) -> None:
    await load.stop()
    assert load.verdict.errors == []
    assert load.verdict.wrong == []
    for project in hosts.projects.values():
        await asyncio.to_thread(project.compose, "down", "--volumes")
        assert project.engine.docker("ps", "-aq") == ""
        assert project.engine.docker("volume", "ls", "-q") == ""


async def test_under_tls_the_machines_find_each_other_and_kv_travels(guarded: Hosts) -> None:
    begun = time.monotonic()
    for role in ROLES:
        await asyncio.to_thread(guarded.projects[role].compose, "up", "--detach", "--no-build")
    await guarded.whole()
    reference = next(one for one in all_references() if one.name == "plain-02")
    certificates, address = guarded.tls, f"{guarded.network.address('router')}:9000"
    assert certificates is not None

    async def kv_travels_with_an_answer() -> bool:
        async with AsyncClient(address, api_key=certificates.api_key, tls=certificates.tls()) as client:
            answer = await client.complete(reference.prompt_ids, max_tokens=32, temperature=0.0)
        near_tie_or_none(answer.token_ids, reference)
        return await received(guarded) > 0

    await condition(kv_travels_with_an_answer, WHOLE_LIMIT_S, lambda: f"KV travels\n{guarded.story()}")
    tell(f"three machines under TLS served {time.monotonic() - begun:.0f} s after the first `up`")


async def test_under_tls_no_machine_lets_in_who_shows_nothing(guarded: Hosts) -> None:
    assert guarded.tls is not None
    router = f"{guarded.network.address('router')}:9000"
    for api_key, tls, status in (
        (None, guarded.tls.tls(), grpc.StatusCode.UNAUTHENTICATED),
        (guarded.tls.api_key, None, grpc.StatusCode.UNAVAILABLE),
    ):
        async with AsyncClient(router, api_key=api_key, tls=tls) as client:
            with pytest.raises(ApiError) as caught:
                await client.complete("x", max_tokens=1)
            assert caught.value.status is status
    for role, port in (("router", 9001), ("prefill", 7100), ("decode", 7100)):
        address = f"{guarded.network.address(role)}:{port}"
        assert await said_to(address, guarded.tls.internal(certificate=False)) is grpc.StatusCode.UNAVAILABLE
        assert await said_to(address, guarded.tls.internal(certificate=True)) is grpc.StatusCode.UNIMPLEMENTED
