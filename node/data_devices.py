"""The network devices under the data plane, which UCX opens once and for good.

A container that was taken off its network and comes back has its address on a device of another name, or another address. What
listens on all addresses works again; UCX does not, and only a new process opens it anew. So the node ends, loudly: whatever runs
it starts it again, and its streams go on elsewhere.

Must not know: UCX's lanes, peers, health.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Collection, Mapping

LOOK_EVERY_S = 1.0
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR."""


class DataDevicesReplaced(RuntimeError):
    pass


def network_devices() -> dict[str, str]:
    """IPv4 addresses by device, now, without loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # it has none, or has gone since
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def data_devices(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those that UCX opens when it starts now. Empty where it is given none of the kernel's network devices (RDMA cards)."""
    names = environment.get("UCX_NET_DEVICES", "all").split(",")
    return {name: address for name, address in network_devices().items() if names == ["all"] or name in names}


def replaced(opened: Mapping[str, str], now: Mapping[str, str], advertised: Collection[str]) -> bool:
    """Whether nothing is left of what UCX has opened, although others reach this node under its advertised addresses again."""
    return bool(opened) and not opened.items() & now.items() and not set(advertised).isdisjoint(now.values())


async def watch(opened: Mapping[str, str], advertise_address: str) -> None:
    """Raises DataDevicesReplaced; returns never."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = network_devices()
        if opened.items() & now.items():
            continue
        try:
            resolved = await loop.getaddrinfo(advertise_address, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except socket.gaierror:  # it has no network yet
            continue
        if replaced(opened, now, {str(address[0]) for *_, address in resolved}):
            raise DataDevicesReplaced(f"UCX stands on {dict(opened)}, and the machine has {now} now")
