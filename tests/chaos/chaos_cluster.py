"""One router, two prefill nodes and two decode nodes as real processes, each on a host of its own where the machine allows it.

A member keeps its name and ports through its lives; every start is another life. Without network namespaces all of them share
the loopback interface, and links cannot be harmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import grpc.aio
from chaos_network import Network
from pd_nodes import Metrics, json_lines

from bench.ports import free_ports
from foundation.keys import draw_master_keys, write_key_file

ROUTER = "router"
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
NODES = (*PREFILL, *DECODE)
MEMBERS = (ROUTER, *NODES)
SILENCE_LIMIT_S = 2.0
START_LIMIT_S = 240.0
REST_LIMIT_S = 30.0
SHARED_ADDRESS = "127.0.0.1"


@dataclass
class Member:
    name: str
    address: str
    ports: Mapping[str, int]
    command: list[str]
    log_path: Path
    lives: int = 0
    fds_at_rest: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log: IO[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    def start(self, faults: str = "") -> None:
        """`faults`: see kv_transfer/faults.py."""
        environment = {key: value for key, value in os.environ.items() if not _is_ours(key)}
        environment |= {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp"}
        if self.address != SHARED_ADDRESS:
            environment["UCX_NET_DEVICES"] = "eth0"
        command = self.command
        if faults:
            environment["DECANT_TEST_FAULTS"] = faults
            command = [*command, "--enable-test-faults"]
        if self._log is None:
            self._log = self.log_path.open("ab")
        self.lives += 1
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, env=environment
        )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def returncode(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def state(self) -> str:
        """The kernel's letter for the process: R, S, T (stopped), Z (dead, not reaped)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def descriptors(self) -> Counter[str]:
        """Open file descriptors by kind: sockets by the address at their other end, pipes, event and poll descriptors."""
        remotes = self._remotes()
        kinds: Counter[str] = Counter()
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                target = str(link.readlink())
                kind = "file" if target.startswith("/") else target.partition(":[")[0]
                kinds[f"socket {remotes[target]}" if target in remotes else kind] += 1
        return kinds

    def _remotes(self) -> dict[str, str]:
        """`socket:[inode]` -> the address at the other end, of the TCP sockets of its host."""
        found = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address = bytes.fromhex(fields[2].partition(":")[0])[-4:][::-1]
                found[f"socket:[{fields[9]}]"] = ".".join(map(str, address))
        return found

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def get(self, path: str) -> str:
        """The body, whatever the status; empty when nobody answers."""
        return await asyncio.to_thread(_get, f"http://{self.address}:{self.ports['http']}{path}")

    async def metrics(self) -> Metrics:
        body = await self.get("/metrics")
        assert body, f"{self.name} gives no metrics"
        return Metrics(body)

    def lines_since(self, offset: int) -> Iterator[dict[str, Any]]:
        yield from json_lines(self.log_path, offset)

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
        if self._log is not None:
            self._log.close()


def _is_ours(variable: str) -> bool:
    return variable.startswith("DECANT_") or variable.lower().endswith("_proxy")


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as refused:
        return str(refused.read().decode())
    except OSError:
        return ""


class Cluster:
    """A context manager. `node_options`: of every node, `role_options`: by role ("prefill", "decode")."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        network: Network | None,
        node_options: tuple[str, ...],
        role_options: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.network = network
        self._key_file = folder / "keys"
        write_key_file(self._key_file, draw_master_keys())
        self._model = model
        self._folder = folder
        self.members: dict[str, Member] = {}
        router = self._add(ROUTER, ("http", "grpc"), ())
        self.grpc_address = f"{router.address}:{router.ports['grpc']}"
        for node in NODES:
            role = node.partition("-")[0]
            own = (f"--registry={self.grpc_address}", f"--node-id={node}", *node_options, *role_options[role])
            self._add(node, ("http", "control", "data"), own)

    def _add(self, name: str, port_names: tuple[str, ...], options: tuple[str, ...]) -> Member:
        if self.network is None:
            address, ports, before = SHARED_ADDRESS, free_ports(len(port_names)), []
        else:
            address, before = self.network.address(name), self.network.command(name)
            ports = [7100 + index for index in range(len(port_names))]
        by_name = dict(zip(port_names, ports, strict=True))
        role = name.partition("-")[0]
        command = [*before, sys.executable, "-m", "decant", role, f"--model={self._model}"]
        command += [f"--host={address}", "--log-format=json"]
        if role != "decode":  # which signs and checks no ticket
            command.append(f"--key-file={self._key_file}")
        command += [f"--silence-limit-s={SILENCE_LIMIT_S}"]
        command += [f"--{port}-port={number}" for port, number in by_name.items()]
        member = Member(name, address, by_name, [*command, *options], self._folder / f"{name}.log")
        self.members[name] = member
        return member

    def __enter__(self) -> Cluster:
        for member in self.members.values():
            member.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            member.end()

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.grpc_address, options=(("grpc.enable_http_proxy", 0),))

    async def usable(self) -> set[str]:
        """Nodes to which the router gives work now."""
        body = await self[ROUTER].get("/health")
        return {node["node"] for node in json.loads(body)["nodes"] if node["refusal"] is None} if body else set()

    async def whole(self) -> None:
        """Waits until the router gives work to every node. Raises AssertionError for a process that ended by itself."""

        async def all_usable() -> bool:
            for member in self.members.values():
                assert member.returncode() is None, (
                    f"{member.name} has ended with {member.returncode()}:\n{self.tail(member)}"
                )
            return await self.usable() == set(NODES)

        await condition(all_usable, START_LIMIT_S, "the router gives work to every node")

    @staticmethod
    def tail(member: Member) -> str:
        return member.log_path.read_text(errors="replace")[-3000:]

    async def pairs(self) -> set[tuple[str, str]]:
        """(decode node, prefill node) of every pair that has had a session in the decode node's present life."""
        found = set()
        for name in DECODE:
            body = await self[name].get("/metrics")
            lanes = [line for line in body.splitlines() if line.startswith("decant_kv_lane_gigabytes_per_second{")]
            found |= {(name, peer) for peer in PREFILL if any(f'peer="{peer}"' in line for line in lanes)}
        return found

    async def leftovers(self) -> list[str]:
        """What is still held anywhere: blocks, slots, credits (a granted credit keeps its slot posted), requests."""
        found = []
        for name in NODES:
            metrics = await self[name].metrics()
            counts = {f"blocks {state}": n for state, n in metrics.blocks().items() if state == "in_use"}
            counts |= {f"slots {state}": n for state, n in metrics.nonzero("staging_slots").items() if state != "free"}
            counts |= {kind: metrics.value(f"requests_{kind}") for kind in ("running", "waiting")}
            found += [f"{name}: {what} {n:.0f}" for what, n in counts.items() if n]
        metrics = await self[ROUTER].metrics()
        found += [f"{ROUTER}: {kind}" for kind in ("running", "waiting") if metrics.value(f"requests_{kind}")]
        return found

    async def rest(self) -> list[str]:
        """Waits until nothing is held any more; what is left over when the time is up."""
        left: list[str] = []

        async def nothing_left() -> bool:
            left[:] = await self.leftovers()
            return not left

        try:
            await condition(nothing_left, REST_LIMIT_S, "rest")
        except AssertionError:
            return left
        return []

    def log_sizes(self) -> dict[str, int]:
        return {name: member.log_size() for name, member in self.members.items()}

    def noticed(self, offsets: Mapping[str, int], since: float, until: float) -> dict[tuple[str, str], float]:
        """(observer, subject) -> seconds from `since` until the observer's log first said that it had lost the subject.

        Both times by time.time(); `offsets`: how long each log was before.
        """
        found: dict[tuple[str, str], float] = {}
        for observer, offset in offsets.items():
            for line in self[observer].lines_since(offset):
                subject = _subject(observer, line)
                at = datetime.fromisoformat(line["timestamp"]).timestamp() if subject else 0.0
                if since <= at <= until:
                    found.setdefault((observer, subject), at - since)
        return found


def _subject(observer: str, line: dict[str, Any]) -> str:
    """Whom the observer has lost, as this line of its log says; "" when it says nothing of the kind."""
    match line.get("event"):
        case "node lost" if observer == ROUTER:
            return str(line["node"])
        case "router detached":
            return ROUTER
        case "control stream ended" | "session closed":
            return str(line["peer"])
        case _:
            return ""


async def condition(holds: Callable[[], Any], within_s: float, what: str) -> None:
    """Waits until `await holds()`; raises AssertionError by name."""
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        await asyncio.sleep(0.05)
