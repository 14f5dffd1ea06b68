"""Two sides of the data plane, each on a GPU of its own or both on one, for the contract tests of the lane between processes."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from device_far_side import fill_message, holds_message
from transport_worlds import UcxWorld, until

from kv_transfer.transport.base import Bytes, Tag
from kv_transfer.transport.cuda_memory import CudaDevice, DeviceBytes
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import DEVICE_LANES, ucx_environment

LARGE_BYTES = 24 << 30
"""About 13 ms at what one GPU copies to itself, five to ten times as long from one to another."""
COUNTED_AT_ONCE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Where:
    """The GPU of this process's memory, that of the far side's, and who copies."""

    near: int
    far: int
    scheme: str = "get_zcopy"


def freed() -> None:
    """What earlier tests held is given back: their sessions, futures and callbacks refer to one another. Then GPU 0 is this
    thread's again."""
    gc.collect()
    CudaDevice(0).use_in_this_thread()


class DeviceWorld(UcxWorld):
    program = Path(__file__).parent / "device_far_side.py"

    def __init__(self, where: Where) -> None:
        self.where = where
        self.device = CudaDevice(where.near)
        super().__init__(DEVICE_LANES, frozenset({"cuda_ipc/get"}))
        self.large_bytes = LARGE_BYTES

    def environment(self, lanes: str) -> dict[str, str]:
        root = Path(__file__).parents[2]
        found = f"{root}:{root / 'tests' / 'contract'}:{os.environ.get('PYTHONPATH', '')}"
        ucx = {**ucx_environment(lanes, device=True), "UCX_RNDV_SCHEME": self.where.scheme}
        return {**ucx, "FAR_SIDE_GPU": str(self.where.far), "PYTHONPATH": found}

    def transport(self) -> UcxTransport:
        return UcxTransport(self.device)

    def room(self, size: int) -> DeviceBytes:
        return self.device.allocate(size)

    def message(self, size: int, seed: int) -> Bytes:
        message = self.device.allocate(size)
        fill_message(message, seed)
        return cast(Bytes, message)

    async def send_partly(self, session: int, tag: Tag, buffer: Bytes, seed: int) -> None:
        run = cast(DeviceBytes, buffer)
        await self._tell(do="send", session=session, tag=tag, size=run.size, seed=seed)
        await until(lambda: first_bytes_landed(run))


def first_bytes_landed(buffer: DeviceBytes) -> bool:
    place = buffer.size // 64
    return bool(buffer[place : place + 1].read()[0])


def last_byte_landed(buffer: DeviceBytes) -> bool:
    return bool(buffer[buffer.size - 1 : buffer.size].read()[0])


def whole(buffer: DeviceBytes, seed: int) -> bool:
    return holds_message(buffer, buffer.size, seed)


def landed_bytes(buffer: DeviceBytes) -> int:
    """How many of its bytes are not zero: no message holds a zero."""
    gpu, count = torch.device("cuda", buffer.device.index), 0
    for first in range(0, buffer.size, COUNTED_AT_ONCE_BYTES):
        part = torch.as_tensor(buffer[first : first + COUNTED_AT_ONCE_BYTES], device=gpu)
        count += int(torch.count_nonzero(part))
    return count


def untouched(buffer: DeviceBytes) -> bool:
    return not buffer.read().any()
