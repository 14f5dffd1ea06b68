"""A compose project as its operator handles it, and what its containers say of themselves."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compose_engine import Engine
from compose_images import ROOT
from compose_versions import COMPOSE_1
from pd_nodes import Metrics

TIMES_ARE_TOLD = os.environ.get("DECANT_TIMES") == "told"
"""On a machine that others use at the same time, times are told and not judged, and everything is waited for longer."""
COMPOSE_LIMIT_S = 400.0
WHOLE_LIMIT_S = 600.0 if TIMES_ARE_TOLD else 120.0
SILENCE_LIMIT_S = 15.0 if TIMES_ARE_TOLD else 2.0
HTTP_PORTS = {"prefill": 7102, "decode": 7102, "router": 8000, "node": 7102}


class Project:
    """`files` of the repository, `environment` what an operator sets, `tool` the Compose that he has."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        files: Sequence[str],
        environment: Mapping[str, str],
        tool: str = COMPOSE_1,
    ) -> None:
        self.engine = engine
        self.tool = tool
        self.name = name
        self.files = tuple(files)
        self.environment = dict(environment)

    def compose(
        self, *arguments: str, also: Sequence[str] = (), check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs Compose; `also`: files on top. Raises AssertionError with its complaint when it fails."""
        files = [part for file in (*self.files, *also) for part in ("-f", str(ROOT / file))]
        done = subprocess.run(
            [self.tool, "-p", self.name, *files, *arguments],
            cwd=ROOT,
            env=self.engine.environment | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPOSE_LIMIT_S,
        )
        assert not check or done.returncode == 0, f"{self.tool} {' '.join(arguments)}:\n{done.stderr[-4000:]}"
        return done

    def container(self, service: str) -> str:
        """The id of the service's container, running or not."""
        filters = [f"label=com.docker.compose.project={self.name}", f"label=com.docker.compose.service={service}"]
        found = self.engine.docker("ps", "-aq", *(part for one in filters for part in ("--filter", one))).split()
        assert len(found) == 1, f"{service} has {len(found)} containers"
        return found[0]

    def state(self, service: str) -> dict[str, Any]:
        return dict(self.engine.inspect(self.container(service))["State"])

    def address(self, service: str) -> str:
        networks = self.engine.inspect(self.container(service))["NetworkSettings"]["Networks"]
        return str(networks[f"{self.name}_inner"]["IPAddress"])

    def process(self, service: str) -> int:
        """The pid, on this machine, of the process that the container's init started."""
        init = self.state(service)["Pid"]
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        assert len(children) == 1, f"the init of {service} has children {children}"
        return int(children[0])

    def logs(self, service: str, lines: int = 60) -> str:
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), self.container(service)],
            env=self.engine.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

    async def get(self, service: str, path: str) -> str:
        """The body, whatever the status; empty when nobody answers."""
        url = f"http://{await asyncio.to_thread(self.address, service)}:{HTTP_PORTS[service.partition('-')[0]]}{path}"
        return await asyncio.to_thread(body_of, url)

    async def metrics(self, service: str) -> Metrics:
        body = await self.get(service, "/metrics")
        assert body, f"{service} gives no metrics:\n{self.logs(service)}"
        return Metrics(body)

    async def receives_kv(self, decode: str) -> None:
        """Waits until more KV has reached that decode node."""
        before = (await self.metrics(decode)).value("kv_transfer_bytes_total")

        async def more() -> bool:
            return (await self.metrics(decode)).value("kv_transfer_bytes_total") > before

        await condition(more, WHOLE_LIMIT_S, lambda: f"KV reaches {decode}:\n{self.logs(decode)}")


def body_of(url: str, trust: ssl.SSLContext | None = None) -> str:
    """Whatever the status; empty when nobody answers. `trust`: for https."""
    handlers = (urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=trust)] if trust else []))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=3) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as refused:
        return str(refused.read().decode())
    except OSError:
        return ""


def usable(health_body: str) -> set[str]:
    """Names of the nodes to which a router gives work, by its /health."""
    return (
        {node["node"] for node in json.loads(health_body)["nodes"] if node["refusal"] is None} if health_body else set()
    )


def process_state(pid: int) -> str:
    """The kernel's letter: R, S, T (stopped), Z (dead, not reaped); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def condition(holds: Callable[[], Awaitable[Any]], within_s: float, what: Callable[[], str] | str) -> float:
    """Seconds until `await holds()`; raises AssertionError by name."""
    begun = time.monotonic()
    while not await holds():
        seconds = time.monotonic() - begun
        assert seconds < within_s, f"not within {within_s:.0f} s: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


def tell(line: str) -> None:
    print(f"\ncompose: {line}", flush=True)  # noqa: T201 - figures for the log


def processors() -> float:
    return float(len(os.sched_getaffinity(0)))
