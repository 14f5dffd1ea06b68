"""The far side of a transport test on a GPU: as `far_side_process`, its messages in the GPU's memory.

Messages of more than LARGE_BYTES hold one byte value throughout: they are there to be caught half-way, at a terabyte a second.
"""

from __future__ import annotations

import asyncio
import os
from typing import cast

import numpy as np
from far_side_process import FarSide, pattern, serve

from kv_transfer.transport.base import Bytes
from kv_transfer.transport.cuda_memory import CudaDevice, DeviceBytes
from kv_transfer.transport.ucx import UcxTransport

LARGE_BYTES = 64 << 20
LOOKS = 4096
SLOTS_BYTES = 512 << 20


def fill_message(message: DeviceBytes, seed: int) -> None:
    if message.size > LARGE_BYTES:
        message.fill(seed % 255 + 1)
    else:
        message.write(pattern(message.size, seed))


def holds_message(buffer: DeviceBytes, size: int, seed: int) -> bool:
    """Of a large one, LOOKS places spread over it, its first and last byte among them."""
    if size <= LARGE_BYTES:
        return bool(np.array_equal(buffer[:size].read(), pattern(size, seed)))
    places = [*range(0, size, size // LOOKS), size - 1]
    return all(buffer[place : place + 1].read()[0] == seed % 255 + 1 for place in places)


class DeviceFarSide(FarSide):
    def __init__(self, device: CudaDevice) -> None:
        super().__init__(UcxTransport(device))
        self._device = device
        self._slots = device.allocate(SLOTS_BYTES)
        """Peers map it when they are paired, as they do a node's slots; what fits is sent from here, each message once."""
        self._sent_bytes = 0
        self._kept: list[DeviceBytes] = []
        """Peers may still read what was sent from here."""

    def message(self, size: int, seed: int) -> Bytes:
        first, end = self._sent_bytes, self._sent_bytes + size
        if end <= SLOTS_BYTES:
            self._sent_bytes = -(-end // 4096) * 4096
            message = self._slots[first:end]
        else:
            message = self._device.allocate(size)
            self._kept.append(message)
        fill_message(message, seed)
        return cast(Bytes, message)

    def room(self, size: int) -> Bytes:
        return cast(Bytes, self._device.allocate(size))

    def holds(self, buffer: Bytes, size: int, seed: int) -> bool:
        return holds_message(cast(DeviceBytes, buffer), size, seed)


if __name__ == "__main__":
    asyncio.run(serve(lambda: DeviceFarSide(CudaDevice(int(os.environ.get("FAR_SIDE_GPU", "0"))))))
