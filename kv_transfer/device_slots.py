"""Slots in a GPU's memory: one allocation made for them alone, registered once and exported to peers once, from which arenas are
drawn and into which they are given back.

Must not know: torch, pools, sessions.
"""

from __future__ import annotations

from typing import cast

from kv_transfer.arena import PAGE_BYTES
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.cuda_memory import CudaDevice, DeviceBytes


class DeviceSlots:
    """One allocation, handed out in runs; the first gap that is long enough is taken."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        """Raises TransportError (`out_of_memory`)."""
        self._size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._memory = device.allocate(self._size)
        self._drawn: dict[int, int] = {}
        """Ends of runs by their beginnings."""

    def draw(self, size: int) -> Bytes | None:
        taken = -(-size // PAGE_BYTES) * PAGE_BYTES
        first = 0
        for begin, end in [*sorted(self._drawn.items()), (self._size, self._size)]:
            if begin - first >= taken:
                self._drawn[first] = first + taken
                return cast(Bytes, self._memory[first : first + size])
            first = end
        return None

    def give_back(self, run: Bytes) -> None:
        del self._drawn[on_device(run).address - self._memory.address]


def on_device(run: Bytes) -> DeviceBytes:
    """What stands for `run`, which must lie on a GPU."""
    found: object = run
    assert isinstance(found, DeviceBytes), f"slots of a GPU's pool in {type(found).__name__}"
    return found
