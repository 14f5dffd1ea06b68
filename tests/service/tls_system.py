"""A router, a prefill and a decode node of the toy model as processes, under mutual TLS between them and in front, where clients
show API keys, too. They send their traces to a collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from certificates import Authority, Files
from pd_nodes import NodeProcess, Ports, eventually, fresh_interpreter, start_node, until_ready
from trace_collector import Collector

from bench.ports import free_ports
from decant.client import AsyncClient, Tls
from engine.model.toy import write_toy_folder
from foundation.api_keys import Scope, add_api_key
from foundation.keys import MasterKeys, draw_master_keys, write_key_file
from net.grpc_plane import GrpcPlane, internal_plane

START_LIMIT_S = 100.0
SMALL = ("--num-gpu-blocks-override=256", "--max-num-seqs=8", "--slot-bytes=16KiB", "--staging-bytes=512KiB")
PATIENT = "--silence-limit-s=20"
"""A busy machine is no fault here."""


@dataclass
class System:
    folder: Path
    keys: MasterKeys
    internal: Authority
    member: Files
    stranger: Files
    front: Authority
    customer: Files
    api_keys: dict[Scope, str]
    prefill: NodeProcess
    decode: NodeProcess
    router: subprocess.Popen[bytes]
    ports: dict[str, int]
    log: Path
    traces: Collector
    start: Callable[[str, Ports], NodeProcess]
    """A node of this role again, on these ports."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports['http']}"

    def plane(self, files: Files | None = None) -> GrpcPlane:
        chosen = files or self.member
        return internal_plane(str(chosen.certificate), str(chosen.private_key), str(chosen.authority))

    def trust(self) -> ssl.SSLContext:
        """A client's, who shows a certificate."""
        context = ssl.create_default_context(cafile=str(self.front.file))
        context.load_cert_chain(self.customer.certificate, self.customer.private_key)
        return context

    @contextlib.asynccontextmanager
    async def opened(self, path: str, scope: Scope | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {} if scope is None else {"Authorization": f"Bearer {self.api_keys[scope]}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(self.url + path, ssl=self.trust()) as answer,
        ):
            yield answer

    async def get(self, path: str) -> tuple[int, str]:
        async with self.opened(path) as answer:
            return answer.status, await answer.text()

    def tls(self) -> Tls:
        return Tls(self.front.file, self.customer.certificate, self.customer.private_key)

    def client(self, scope: Scope = Scope.INFERENCE) -> AsyncClient:
        return AsyncClient(f"127.0.0.1:{self.ports['grpc']}", api_key=self.api_keys[scope], tls=self.tls())


@contextlib.contextmanager
def tls_system(folder: Path) -> Iterator[System]:
    """The nodes are started first, the router last."""
    model, key_file, keys = write_toy_folder(folder / "toy"), folder / "master.key", draw_master_keys()
    write_key_file(key_file, keys)
    internal, front = Authority(folder / "internal"), Authority(folder / "front")
    member = internal.issue("member")
    foreign = Authority(folder / "foreign").issue("stranger")
    stranger = Files(foreign.certificate, foreign.private_key, internal.file)
    certificate, customer = front.issue("router"), front.issue("customer", "customer")
    api_keys = {scope: add_api_key(folder / "api-keys", scope.value, scope) for scope in Scope}
    ports = dict(zip(("http", "grpc", "registry"), free_ports(3), strict=True))
    traces, monkeypatch = Collector(), pytest.MonkeyPatch()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    of_all = (*member.arguments(), f"--otlp-traces-endpoint=http://127.0.0.1:{traces.port}", PATIENT)
    options = (*SMALL, *of_all, f"--registry=127.0.0.1:{ports['registry']}")

    def start(role: str, ports: Ports) -> NodeProcess:
        return start_node(role, folder, model, key_file, *options, ports=ports, start=fresh_interpreter)

    prefill, decode = (start(role, Ports(*free_ports(3))) for role in ("prefill", "decode"))
    command = [
        *(sys.executable, "-m", "decant", "router", "--log-format=json", f"--model={model}", f"--key-file={key_file}"),
        *(f"--{name}-port={port}" for name, port in ports.items()),
        *of_all,
        f"--ssl-certfile={certificate.certificate}",
        f"--ssl-keyfile={certificate.private_key}",
        f"--ssl-ca-certs={front.file}",
        f"--api-key-file={folder / 'api-keys'}",
    ]
    router, found = None, None
    try:
        asyncio.run(until_ready(prefill, decode))
        with (folder / "router.log").open("wb") as log:
            router = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_environment())
        found = System(
            folder,
            keys,
            internal,
            member,
            stranger,
            front,
            customer,
            api_keys,
            prefill,
            decode,
            router,
            ports,
            folder / "router.log",
            traces,
            start,
        )
        asyncio.run(until_usable(found))
        yield found
    finally:
        if router is not None:
            router.kill()
            router.wait(10)
        for node in (found.prefill if found else prefill, decode):
            node.end()
        traces.stop()
        monkeypatch.undo()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("DECANT_")}


async def until_usable(system: System) -> None:
    async def usable() -> bool:
        assert system.router.poll() is None, system.log.read_text()[-3000:]
        try:
            status, body = await system.get("/health")
        except aiohttp.ClientConnectionError:
            return False
        return status == 200 and body.count('"refusal": null') == 2

    await eventually(usable, START_LIMIT_S, "the router uses both nodes, which were there before it")
