"""Ports of this machine for what a bench or a test starts.

They lie below those that the kernel gives to outgoing connections: of a port from there, some connection may have taken hold
before the process that was told it listens. Nor is a port given twice by one process: who was given it first may not have
begun to listen yet, or may be dialled by those who do not know that it is gone.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 12_000, 32_000
_chance = random.SystemRandom()
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody had a moment ago. Drawn at random, so that two runs at once rarely meet."""
    return [free_port() for _ in range(count)]


def free_port() -> int:
    for _ in range(LAST - FIRST):
        port = _chance.randrange(FIRST, LAST)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise RuntimeError(f"{FIRST} to {LAST} holds no free port")


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
