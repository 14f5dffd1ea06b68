"""A small network of our own: each process in a network namespace, all on one bridge, every direction of every pair breakable.

    host (clients, metrics) --- bridge --- veth --- eth0 of a namespace, one for each process

A direction from A to B is cut by pointing A's neighbour entry for B at the *sink*, a namespace that takes such packets and counts
them: nobody is told, nothing is refused, the packets are just gone, and the count proves it. A link is throttled by a token
bucket in both directions, which counts the packets that it held back.

Needs root, network namespaces and iproute2; no packet filter. Where one stands in the way of bridges (Docker's drops what it does
not forward itself), it is told to let this bridge alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SINK = "sink"
BRIDGES_ARE_FILTERED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
COMMAND_LIMIT_S = 30.0
BURST_BYTES = 32 * 1024
QUEUE_DELAY_MS = 400


def free_number() -> int:
    """A number for a `Network` that no other one on this machine has now."""
    links = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    taken = {int(number) for number in re.findall(r": dc(\d+)-br", links.stdout)}
    return next(number for number in random.sample(range(256), 256) if number not in taken)


def why_not_possible() -> str | None:
    """What is missing on this machine, or None when a `Network` can be made."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no iproute2"
    probe = f"decant-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.strip()}"
    try:
        up = ["ip", "netns", "exec", probe, "ip", "link", "set", "lo", "up"]
        entered = subprocess.run(up, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
        return None if entered.returncode == 0 else f"no network namespaces: {entered.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], check=True, timeout=COMMAND_LIMIT_S)


@dataclass(frozen=True, slots=True)
class Direction:
    sender: str
    receiver: str

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}"


class Network:
    """A context manager; hosts are named by the caller. One machine may hold several, told apart by `number` (0 to 255)."""

    def __init__(self, hosts: Sequence[str], number: int) -> None:
        assert SINK not in hosts
        self._prefix = f"dc{number}"
        self._bridge = f"{self._prefix}-br"
        self._subnet = f"10.213.{number}"
        self._numbers = {host: index for index, host in enumerate((*hosts, SINK), start=2)}

    def __enter__(self) -> Network:
        subnet = f"addr add {self._subnet}.1/24 dev {self._bridge}"
        self._run([f"link add {self._bridge} type bridge", subnet, f"link set {self._bridge} up"])
        self._pass_filter("-I")
        try:
            for host in self._numbers:
                self._add(host)
            # Hosts inherit the machine's setting, and a sink that passes on what it gets cuts nothing.
            self._output([*self.command(SINK), "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"])
            for host in self._numbers:
                self._run([self._neighbour(other, other) for other in self._numbers if other != host], host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._numbers:
            subprocess.run(
                ["ip", "netns", "delete", self._namespace(host)], capture_output=True, timeout=COMMAND_LIMIT_S
            )
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, timeout=COMMAND_LIMIT_S)
        self._pass_filter("-D")

    def _pass_filter(self, change: str) -> None:
        """`change`: -I or -D. What crosses a bridge meets the packet filter where the kernel's br_netfilter says so."""
        if not BRIDGES_ARE_FILTERED.exists() or shutil.which("iptables") is None:
            return
        rule = ["iptables", "-w", change, "FORWARD", "-i", self._bridge, "-o", self._bridge, "-j", "ACCEPT"]
        subprocess.run(rule, capture_output=True, timeout=COMMAND_LIMIT_S)

    def address(self, host: str) -> str:
        return f"{self._subnet}.{self._numbers[host]}"

    def command(self, host: str) -> list[str]:
        """What to put before a command so that it runs on that host, under the same pid."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def cut(self, direction: Direction) -> None:
        self._run([self._neighbour(direction.receiver, SINK)], direction.sender)

    def heal(self, direction: Direction) -> None:
        self._run([self._neighbour(direction.receiver, direction.receiver)], direction.sender)

    def swallowed_packets(self) -> int:
        """Packets of cut directions since the network began."""
        table = self._output([*self.command(SINK), "cat", "/proc/net/snmp"]).splitlines()
        names, values = (line.split() for line in table if line.startswith("Ip:"))
        return int(values[names.index("InReceives")])

    def throttle(self, host: str, megabits_per_second: float) -> None:
        bucket = f"tbf rate {megabits_per_second}mbit burst {BURST_BYTES} latency {QUEUE_DELAY_MS}ms"
        self._traffic_control(f"qdisc add dev eth0 root {bucket}", host)
        self._traffic_control(f"qdisc add dev {self._outer(host)} root {bucket}", None)

    def throttled_packets(self, host: str) -> int:
        """How often the token bucket of this link had to hold packets back; ask before `unthrottle`."""
        inside = [*self.command(host), "tc", "-s", "-j", "qdisc", "show", "dev", "eth0", "root"]
        outside = ["tc", "-s", "-j", "qdisc", "show", "dev", self._outer(host), "root"]
        return sum(int(json.loads(self._output(command))[0]["overlimits"]) for command in (inside, outside))

    def unthrottle(self, host: str) -> None:
        self._traffic_control("qdisc delete dev eth0 root", host)
        self._traffic_control(f"qdisc delete dev {self._outer(host)} root", None)

    def _add(self, host: str) -> None:
        namespace, outer, number = self._namespace(host), self._outer(host), self._numbers[host]
        self._run(
            [
                f"netns add {namespace}",
                f"link add {outer} type veth peer name eth0 address {self._link_address(host)} netns {namespace}",
                f"link set {outer} master {self._bridge} up",
            ]
        )
        self._run([f"addr add {self._subnet}.{number}/24 dev eth0", "link set lo up", "link set eth0 up"], host)

    def _neighbour(self, receiver: str, link: str) -> str:
        where = f"{self.address(receiver)} lladdr {self._link_address(link)}"
        return f"neigh replace {where} dev eth0 nud permanent"

    def _link_address(self, host: str) -> str:
        return f"02:dc:00:00:00:{self._numbers[host]:02x}"

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _outer(self, host: str) -> str:
        return f"{self._prefix}-v{self._numbers[host]}"

    def _run(self, commands: Sequence[str], host: str | None = None) -> None:
        where = ["-netns", self._namespace(host)] if host is not None else []
        subprocess.run(
            ["ip", *where, "-batch", "-"],
            input="\n".join(commands),
            text=True,
            check=True,
            capture_output=True,
            timeout=COMMAND_LIMIT_S,
        )

    def _traffic_control(self, command: str, host: str | None) -> None:
        where = self.command(host) if host is not None else []
        subprocess.run([*where, "tc", *command.split()], check=True, capture_output=True, timeout=COMMAND_LIMIT_S)

    @staticmethod
    def _output(command: Sequence[str]) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_LIMIT_S).stdout
