"""The chaos network does what a fault says it did, and proves it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from chaos_network import Direction, Network, free_number, why_not_possible

pytestmark = pytest.mark.netns


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := why_not_possible()) is not None:
        pytest.skip(reason)
    with Network(("a", "b", "c"), free_number()) as made:
        yield made


def reaches(network: Network, sender: str, receiver: str, within_s: float = 10.0) -> bool:
    """One datagram there, and its echo back."""
    echo = "import socket as s; o = s.socket(2, 2); o.bind(('', 9)); print(1, flush=True); d, p = o.recvfrom(9); o.sendto(d, p)"
    to = f"('{network.address(receiver)}', 9)"
    ask = f"import socket as s; o = s.socket(2, 2); o.settimeout({within_s}); o.sendto(b'x', {to}); o.recv(9)"
    with subprocess.Popen([*network.command(receiver), "python3", "-c", echo], stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        try:
            asked = subprocess.run([*network.command(sender), "python3", "-c", ask], capture_output=True, timeout=20)
        finally:
            listening.kill()
    return asked.returncode == 0


def test_a_cut_direction_loses_packets_counts_them_and_harms_no_other_pair(network: Network) -> None:
    assert reaches(network, "a", "b")
    before = network.swallowed_packets()
    network.cut(Direction("b", "a"))
    assert not reaches(network, "a", "b", within_s=0.5)
    assert network.swallowed_packets() > before
    assert reaches(network, "a", "c")
    network.heal(Direction("b", "a"))
    assert reaches(network, "a", "b")
    assert network.swallowed_packets() > before


def test_a_throttled_link_holds_packets_back_until_it_is_healed(network: Network) -> None:
    network.throttle("a", 0.1)
    assert network.throttled_packets("a") == 0
    send = f"import socket as s; o = s.socket(2, 2); [o.sendto(bytes(1400), ('{network.address('b')}', 9)) for _ in range(40)]"
    subprocess.run([*network.command("a"), "python3", "-c", send], check=True, timeout=20)
    assert network.throttled_packets("a") > 0
    network.unthrottle("a")
    assert reaches(network, "a", "b")
