"""When a node sees that only a new process can have a data plane, and when it had better stay."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from node import data_devices
from node.data_devices import DataDevicesReplaced, network_devices, replaced, watch

OPENED = {"eth0": "10.1.0.5"}
BACK = {"eth1": "10.1.0.5"}


@pytest.mark.parametrize(
    ("opened", "now", "advertised", "ends"),
    [
        pytest.param(OPENED, OPENED, ["10.1.0.5"], False, id="nothing has changed"),
        pytest.param(OPENED, {}, ["10.1.0.5"], False, id="off the network, which may come back as it was"),
        pytest.param(OPENED, BACK, ["10.1.0.5"], True, id="back on a device of another name"),
        pytest.param(OPENED, {"eth0": "10.1.0.9"}, ["10.1.0.9"], True, id="back with another address"),
        pytest.param(OPENED, {"docker0": "172.17.0.1"}, ["10.1.0.5"], False, id="some other network appears"),
        pytest.param(OPENED | {"eth2": "10.2.0.5"}, BACK | {"eth2": "10.2.0.5"}, ["10.1.0.5"], False, id="one is left"),
        pytest.param(OPENED, {"wlan0": "10.3.0.5"}, ["127.0.0.1"], False, id="peers are on this machine"),
        pytest.param({}, BACK, ["10.1.0.5"], False, id="UCX stands on other devices"),
    ],
)
def test_a_node_ends_when_its_address_is_back_and_its_data_devices_are_not(
    opened: dict[str, str], now: dict[str, str], advertised: list[str], ends: bool
) -> None:
    assert replaced(opened, now, advertised) == ends


def test_devices_are_this_machines_and_never_loopback() -> None:
    found = network_devices()
    assert found.keys() <= {name for _, name in socket.if_nameindex()} - {"lo"}
    for address in found.values():
        with socket.socket() as probe:
            probe.bind((address, 0))


def test_ucx_opens_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_devices, "network_devices", lambda: {"eth0": "10.1.0.5", "eth1": "10.2.0.5"})
    opened = data_devices.data_devices
    assert opened({}) == opened({"UCX_NET_DEVICES": "all"}) == {"eth0": "10.1.0.5", "eth1": "10.2.0.5"}
    assert opened({"UCX_NET_DEVICES": "lo,eth1"}) == {"eth1": "10.2.0.5"}
    assert opened({"UCX_NET_DEVICES": "mlx5_0:1"}) == {}


async def test_the_watch_waits_through_an_outage_and_ends_when_another_device_has_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Iterator[dict[str, str]] = iter([OPENED, {}, {}, BACK])
    monkeypatch.setattr(data_devices, "network_devices", lambda: next(seen))
    monkeypatch.setattr(data_devices, "LOOK_EVERY_S", 0.0)
    with pytest.raises(DataDevicesReplaced, match="eth1"):
        await asyncio.wait_for(watch(OPENED, "10.1.0.5"), 10)
    assert next(seen, None) is None
