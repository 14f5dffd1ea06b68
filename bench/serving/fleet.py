"""One router and its nodes as processes: for each device what it computes when prefill and decode are apart, and when colocated.

    device of a prefill node:   prefill-i, and decode-i beside it, which only computes while the system is colocated
    device of a decode node:    decode-j

Both systems are the same processes behind the same router, which is told whom to give no work; an idle process on a GPU costs
only its memory. So each start is paid once, and both systems see the same machine.

Must not know: what is measured.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import grpc
from decant_proto.v1 import admin_pb2, admin_pb2_grpc

from bench.ports import free_port
from bench.processes import System, system
from foundation.keys import draw_master_keys, write_key_file

MODEL_NAME = "m"
FEW_CORES = 8
"""With fewer, everything may run everywhere."""


class Arrangement(Enum):
    APART = "P/D"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started. Without `twins` the prefill nodes' devices take no part in a colocated system."""

    model: Path
    prefill_devices: tuple[str, ...]
    decode_devices: tuple[str, ...]
    twins: bool
    shared_options: tuple[str, ...]
    prefill_options: tuple[str, ...]
    decode_options: tuple[str, ...]
    start_limit_s: float


@dataclass(slots=True)
class Node:
    name: str
    role: str
    device: str
    http_url: str
    events_file: Path
    command: list[str]
    cores: str
    twin: bool = False
    """Decodes only while the system is colocated."""


@dataclass(slots=True)
class Fleet:
    url: str
    admin_address: str
    system: System
    nodes: dict[str, Node] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    """From each process's start until it was ready."""

    def of_role(self, role: str, *, twins: bool = True) -> list[Node]:
        return [node for node in self.nodes.values() if node.role == role and (twins or not node.twin)]

    def waves(self) -> list[list[Node]]:
        """At most one node of each GPU in each: warm-up measures steps, and two would measure each other."""
        waves: list[list[Node]] = []
        for node in self.nodes.values():
            free = (
                wave for wave in waves if node.device == "cpu" or all(node.device != other.device for other in wave)
            )
            wave = next(free, None)
            if wave is None:
                waves.append([node])
            else:
                wave.append(node)
        return waves

    def start_wave(self, wave: Sequence[Node], limit_s: float) -> None:
        """Start all of them and wait until each is ready."""
        begun = time.monotonic()
        for node in wave:
            self.system.start(node.name, node.command, node.cores, {})
        for node in wave:
            self.system.await_answer(f"{node.http_url}/health", limit_s)
            self.start_s[node.name] = time.monotonic() - begun

    def arrange(self, arrangement: Arrangement) -> None:
        """Tell the router whom to use from now on. Requests in flight stay where they are."""
        for node in self.nodes.values():
            apart = arrangement is Arrangement.APART
            self.use(node.name, not node.twin if apart else node.role == "decode")

    def use(self, node: str, wanted: bool) -> None:
        """A node that the router has lost and forgotten needs no telling."""
        with grpc.insecure_channel(self.admin_address) as channel:
            try:
                admin_pb2_grpc.AdminStub(channel).Drain(admin_pb2.DrainRequest(node_id=node, resume=wanted), timeout=5)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise

    def metric(self, node: str, name: str, **labels: str) -> float:
        """The sum of a node's samples of that name whose labels agree."""
        with urllib.request.urlopen(f"{self.nodes[node].http_url}/metrics", timeout=5) as answer:
            return sum_of_samples(answer.read().decode(), name, **labels)

    def metric_by(self, node: str, name: str, label: str) -> dict[str, float]:
        """A node's samples of that name, by one label."""
        with urllib.request.urlopen(f"{self.nodes[node].http_url}/metrics", timeout=5) as answer:
            return {labels.get(label, ""): value for labels, value in samples(answer.read().decode(), name)}

    def kill(self, node: str) -> float:
        """SIGKILL; the time at which it was sent (time.perf_counter)."""
        process = self.system.processes.pop(node)
        os.killpg(process.pid, signal.SIGKILL)
        killed_s = time.perf_counter()
        process.wait()
        return killed_s

    def signal(self, node: str, number: signal.Signals) -> None:
        """To the node's own process, which stands in for taskset's after exec."""
        os.kill(self.system.processes[node].pid, number)

    def restart(self, node: str, limit_s: float) -> float:
        """Start a killed node again and wait until the router uses it; the seconds it took."""
        begun = time.monotonic()
        self.system.start(node, self.nodes[node].command, self.nodes[node].cores, {})
        self.await_usable([node], limit_s)
        return time.monotonic() - begun

    def await_usable(self, nodes: Sequence[str], limit_s: float) -> None:
        """Until the router is attached to all of them and each says that it is ready."""

        def all_usable(health: bytes) -> bool:
            seen = {node["node"]: node for node in json.loads(health)["nodes"]}
            return all(
                name in seen and seen[name]["link"] == "ready" and not seen[name]["not_ready_reasons"] for name in nodes
            )

        self.system.await_answer(f"{self.url}/health", limit_s, all_usable)

    def events(self, node: str, what: str, since_s: float = 0.0) -> list[dict[str, float | str]]:
        """What a timed node noted, by time (CLOCK_MONOTONIC)."""
        found = []
        for line in self.nodes[node].events_file.read_text().splitlines():
            event = json.loads(line)
            if event["what"] == what and event["at"] >= since_s:
                found.append(event)
        return found

    def log_tail(self, node: str, lines: int = 15) -> str:
        return "\n".join((self.system.log_folder / f"{node}.log").read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def running_fleet(plan: Plan, folder: Path) -> Iterator[Fleet]:
    """Start all at once; yields when the router can use every node. Raises RuntimeError naming the log of what failed."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "master.key"
    key.unlink(missing_ok=True)
    write_key_file(key, draw_master_keys())
    http_port, grpc_port = free_port(), free_port()
    shared = ["--model", str(plan.model), "--served-model-name", MODEL_NAME]
    names = _node_names(plan)
    cores = _cores(len(names))
    router = [sys.executable, "-m", "decant", "router", *shared, "--key-file", str(key)]
    router += ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--max-body-bytes", "16MiB"]
    with system(folder) as processes:
        fleet = Fleet(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", processes)
        processes.start("router", router, cores[0], {})
        for index, (name, role, device, twin) in enumerate(names):
            node_port = free_port()
            events = folder / f"{name}.events"
            command = [sys.executable, "-m", "bench.serving.timed_node", str(events), role, *shared]
            command += ["--node-id", name, "--control-port", str(free_port()), "--data-port", str(free_port())]
            command += ["--http-port", str(node_port), "--registry", fleet.admin_address]
            command += ["--device", device, *plan.shared_options]
            command += [*plan.prefill_options, "--key-file", str(key)] if role == "prefill" else [*plan.decode_options]
            node = Node(name, role, device, f"http://127.0.0.1:{node_port}", events, command, cores[1 + index], twin)
            fleet.nodes[name] = node
        for wave in fleet.waves():
            fleet.start_wave(wave, plan.start_limit_s)
        fleet.await_usable(list(fleet.nodes), 30.0)
        yield fleet


def _node_names(plan: Plan) -> list[tuple[str, str, str, bool]]:
    """(name, role, device, twin) of every node."""
    prefill, decode = plan.prefill_devices, plan.decode_devices
    names = [(f"prefill-{i}", "prefill", device, False) for i, device in enumerate(prefill)]
    if plan.twins:
        names += [(f"decode-{i}", "decode", device, True) for i, device in enumerate(prefill)]
    return names + [(f"decode-{len(prefill) + i}", "decode", device, False) for i, device in enumerate(decode)]


def _cores(nodes: int) -> list[str]:
    """taskset lists for the router and each node; the first two of many cores are left to the client."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < max(FEW_CORES, 2 * nodes + 4):
        return [",".join(map(str, usable))] * (nodes + 1)
    each = (len(usable) - 4) // nodes
    lists = [usable[2:4]] + [usable[4 + each * i : 4 + each * (i + 1)] for i in range(nodes)]
    return [",".join(map(str, cores)) for cores in lists]


def sum_of_samples(exposition: str, name: str, **labels: str) -> float:
    """Of those whose labels agree."""
    return sum(value for found, value in samples(exposition, name) if labels.items() <= found.items())


def samples(exposition: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """(labels, value), from Prometheus' text format."""
    for sample in re.finditer(rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)", exposition, re.MULTILINE):
        yield dict(re.findall(r'(\w+)="([^"]*)"', sample.group(1) or "")), float(sample.group(2))
