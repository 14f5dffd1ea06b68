"""Ports that are taken, and ports that only the connections of a dead process still hold."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from foundation.errors import ConfigurationError
from foundation.ports import lingers, require_dialable, require_free_port

pytestmark = pytest.mark.sockets

HOST = "127.0.0.1"


def listener() -> socket.socket:
    """As UCX listens: without SO_REUSEADDR."""
    listening = socket.socket()
    listening.bind((HOST, 0))
    listening.listen()
    return listening


@pytest.fixture
def left_port() -> Iterator[int]:
    """A port whose listener is gone while the other end of one of its connections is still open."""
    listening = listener()
    port: int = listening.getsockname()[1]
    with closing(socket.create_connection((HOST, port))):
        accepted, _ = listening.accept()
        accepted.close()
        listening.close()
        yield port


def test_f22_a_port_that_dead_connections_hold_is_no_reason_not_to_start(left_port: int) -> None:
    assert lingers(left_port)
    require_free_port("--data-port", HOST, left_port, may_linger=True)
    with pytest.raises(ConfigurationError, match="--data-port"):
        require_free_port("--data-port", HOST, left_port)


def test_f32_a_port_on_which_somebody_listens_is_refused_even_when_it_may_linger() -> None:
    with closing(listener()) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigurationError, match="--data-port"):
            require_free_port("--data-port", HOST, port, may_linger=True)


def test_a_port_that_nobody_holds_does_not_linger() -> None:
    with closing(listener()) as listening:
        port = listening.getsockname()[1]
    assert not lingers(port)


@pytest.mark.parametrize(
    ("address", "registry"),
    [
        ("127.0.0.1", "127.0.0.1:9000"),
        ("localhost", "redis://user:secret@localhost:6379/0"),
        ("10.0.0.2", "10.0.0.1:9000"),
        ("10.0.0.2", "redis://10.0.0.1"),
        ("127.0.0.1", "a-registry-that-starts-later.invalid:9000"),
        ("127.0.0.1", "unix:///run/redis.sock"),
        ("::1", "[::1]:9000"),
    ],
)
def test_an_address_that_others_can_dial_is_taken(address: str, registry: str) -> None:
    require_dialable("--advertise-address", address, registry)


@pytest.mark.parametrize(
    ("address", "registry", "problem"),
    [
        ("127.0.0.1", "10.0.0.1:9000", "loopback"),
        ("localhost", "redis://10.0.0.1:6379/0", "loopback"),
        ("no-such-name.invalid", "127.0.0.1:9000", "cannot be resolved"),
    ],
)
def test_f32_an_address_that_others_cannot_dial_names_the_setting(address: str, registry: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--advertise-address.*{problem}"):
        require_dialable("--advertise-address", address, registry)
