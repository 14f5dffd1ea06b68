"""Ports of this machine for what a bench or a test starts.

They lie below those that the kernel gives to outgoing connections: of a port from there, some connection may have taken hold
before the process that was told it listens.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 12_000, 32_000


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody had a moment ago. Drawn at random, so that two runs at once rarely meet."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"{FIRST} to {LAST} holds no {count} free ports")


def free_port() -> int:
    return free_ports(1)[0]
