"""Real prefill and decode nodes for tests: processes on free ports, stopped by pid; forked, or begun with `python -m decant`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forked_decant import ForkedDecant
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually as eventually

from bench.ports import free_ports

START_WITHIN_S = 100.0


class Running(Protocol):
    """What `subprocess.Popen` and `ForkedDecant` share."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str], Path], Running]
"""Starts `decant ARGUMENTS` with this environment and log."""


def fresh_interpreter(
    arguments: Sequence[str], environment: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "decant", *arguments]
    with log_path.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


class Ports(NamedTuple):
    control: int
    data: int
    http: int


@dataclass
class NodeProcess:
    name: str
    process: Running
    ports: Ports
    log_path: Path

    @property
    def control_address(self) -> str:
        return f"127.0.0.1:{self.ports.control}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    async def health(self) -> tuple[int, list[str]]:
        status, body = await asyncio.to_thread(self.get, "/health")
        return status, [reason["reason"] for reason in json.loads(body)["reasons"]] if body else []

    async def metrics(self) -> Metrics:
        status, body = await asyncio.to_thread(self.get, "/metrics")
        assert status == 200, f"{self.name} gave no metrics: {self.log()[-3000:]}"
        return Metrics(body)

    def state(self) -> str:
        """The kernel's letter for the process: R, S, T (stopped), Z (dead, not reaped)."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self, within_s: float) -> int:
        async with asyncio.timeout(within_s):
            return await asyncio.to_thread(self.process.wait, within_s)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class Metrics:
    def __init__(self, exposition: str) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                self._values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def value(self, name: str, **labels: str) -> float:
        return self._values[f"decant_{name}", tuple(sorted(labels.items()))]

    def nonzero(self, name: str) -> dict[str, float]:
        """label value -> amount, of a metric with one label."""
        found = {key: value for key, value in self._values.items() if key[0] == f"decant_{name}" and value}
        return {labels[0][1]: value for (_, labels), value in found.items()}

    def blocks(self) -> dict[str, float]:
        return {state: self.value("kv_blocks", state=state) for state in ("free", "cached", "in_use")}


def start_node(
    role: str,
    folder: Path,
    model: Path,
    key_file: Path,
    *options: str,
    faults: str = "",
    ports: Ports | None = None,
    lanes: str | None = None,
    start: Start = ForkedDecant,
) -> NodeProcess:
    """`role` is prefill or decode. No registry answers: a node serves without one. `faults`: see kv_transfer/faults.py;
    `lanes`: UCX_TLS."""
    ports = ports or Ports(*free_ports(3))
    (registry_port,) = free_ports(1)
    name = f"{role}-{ports.control}"
    log_path = folder / f"{name}.log"
    settings = {
        "model": model,
        "node-id": name,
        "control-port": ports.control,
        "data-port": ports.data,
        "http-port": ports.http,
        "registry": f"127.0.0.1:{registry_port}",
        "log-format": "json",
    }
    if role == "prefill":
        settings["key-file"] = key_file
    arguments = [role, *(f"--{key}={value}" for key, value in settings.items()), *options]
    environment = inherited() | {"OMP_NUM_THREADS": "1"}
    if faults:
        arguments.append("--enable-test-faults")
        environment["DECANT_TEST_FAULTS"] = faults
    if lanes is not None:
        environment["UCX_TLS"] = lanes
    return NodeProcess(name, start(arguments, environment, log_path), ports, log_path)


def json_lines(log: Path, offset: int = 0) -> list[dict[str, Any]]:
    """What a process has logged in JSON, from this byte on. A line that is not whole, for its process writes it just now or was
    killed over it, is none."""
    found = []
    with log.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
    return found


def transfer_ends(node: NodeProcess, request_id: str) -> list[str]:
    """Reasons with which D's log says that a transfer of this request ended."""
    lines = json_lines(node.log_path)
    return [line["reason"] for line in lines if line["event"] == "transfer ended" and line["request"] == request_id]


def inherited() -> dict[str, str]:
    """This process's environment without settings of Decant's."""
    return {key: value for key, value in os.environ.items() if not key.startswith("DECANT_")}


async def until_ready(*nodes: NodeProcess) -> None:
    async with asyncio.timeout(START_WITHIN_S):
        for node in nodes:
            while (await node.health())[0] != 200:
                assert node.process.poll() is None, f"{node.name} ended while starting:\n{node.log()[-4000:]}"
                await asyncio.sleep(0.1)


async def all_blocks_are_back(node: NodeProcess, total: int, within_s: float = 5.0) -> None:
    async def back() -> bool:
        blocks = (await node.metrics()).blocks()
        return blocks["in_use"] == 0 and blocks["free"] + blocks["cached"] == total

    await eventually(back, within_s, f"free + cached = {total} on {node.name}")
