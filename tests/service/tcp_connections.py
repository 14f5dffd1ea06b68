"""TCP connections between two processes and what they have carried, as the kernel tells `ss` (iproute2)."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

import pytest


class Ends(NamedTuple):
    local_port: int
    remote_port: int


def carried_bytes(pid: int, other_pid: int) -> dict[Ends, int]:
    """Payload bytes in both directions of each connection between the two, seen from the first."""
    if shutil.which("ss") is None:
        pytest.skip("no ss: apt-get install iproute2")
    theirs = {ends for ends, _ in _connections(other_pid)}
    return {ends: count for ends, count in _connections(pid) if Ends(*reversed(ends)) in theirs}


def _connections(pid: int) -> list[tuple[Ends, int]]:
    command = ["ss", "--tcp", "--processes", "--info", "--numeric", "--no-header", "--oneline", "state", "established"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    return [(_ends(line), _carried(line)) for line in lines if f"pid={pid}," in line]


def _ends(line: str) -> Ends:
    local, remote = re.findall(r":(\d+)\s", line)[:2]
    return Ends(int(local), int(remote))


def _carried(line: str) -> int:
    return sum(int(count) for count in re.findall(r"bytes_(?:sent|received):(\d+)", line))
