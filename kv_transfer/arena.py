"""Slots: the only memory that the network touches, and the budget they come from.

An arena is one run of memory dedicated to slots, so that exporting or registering it never covers anything else. D draws one
for each session and gives it back with the session's fence; P keeps one for all it sends.

Must not know: pools, parcels, sessions beyond their fences.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kv_transfer.digest import message_bytes
from kv_transfer.transport.base import Bytes, Fenced

ARENA_SLOTS_AT_LEAST = 2
ARENA_SLOTS_AT_MOST = 256
"""However small the peer says its slots are: each takes a page at least, and a credit looks at all of them."""
PAGE_BYTES = 4096


class SlotMemory(Protocol):
    """Where arenas come from."""

    def draw(self, size: int) -> Bytes | None:
        """Zeroed when it is new, beginning on a page; None when there is no room."""

    def give_back(self, run: Bytes) -> None:
        """Of what `draw` gave."""


class HostSlots:
    """An allocation for each arena."""

    def draw(self, size: int) -> Bytes:
        raw = np.zeros(size + PAGE_BYTES, np.uint8)
        first = -raw.ctypes.data % PAGE_BYTES
        return raw[first : first + size]

    def give_back(self, run: Bytes) -> None:
        pass


def slot_stride(slot_bytes: int) -> int:
    """From the beginning of one slot to that of the next."""
    return -(-message_bytes(slot_bytes) // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """`slots` slots, each long enough for `slot_bytes` of payload and its digest, each beginning on a page."""

    def __init__(self, slots: int, slot_bytes: int, memory: Bytes | None = None) -> None:
        """`memory`: `slots` strides long; None draws it from the host."""
        assert slots >= 1, f"an arena of {slots} slots"
        assert slot_bytes >= 1, f"slots of {slot_bytes} bytes"
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = slot_stride(slot_bytes)
        self.memory = HostSlots().draw(slots * self._stride) if memory is None else memory
        assert self.memory.size == slots * self._stride, f"{self.memory.size} bytes for {slots} slots"

    @property
    def payload_bytes(self) -> int:
        """What the arena counts for in the budget."""
        return self.slots * self.slot_bytes

    def message(self, slot: int, payload_bytes: int) -> Bytes:
        """The part of a slot in which a parcel of this length travels, its digest included."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        assert 0 < payload_bytes <= self.slot_bytes, f"{payload_bytes} bytes in a slot of {self.slot_bytes}"
        begin = slot * self._stride
        return self.memory[begin : begin + message_bytes(payload_bytes)]


class StagingMemory:
    """A node's budget for arenas, in bytes of payload. An arena counts until it is given back."""

    def __init__(self, staging_bytes: int, memory: SlotMemory | None = None) -> None:
        self.staging_bytes = staging_bytes
        self._memory = memory or HostSlots()
        self._drawn: dict[int, tuple[Arena, int | None]] = {}

    @property
    def drawn_bytes(self) -> int:
        return sum(arena.payload_bytes for arena, _ in self._drawn.values())

    def draw_arena(self, slots: int, slot_bytes: int, session: int | None) -> Arena | None:
        """None when the budget does not allow it. `session` None: an arena of P's own, never given back."""
        assert slots >= ARENA_SLOTS_AT_LEAST, f"an arena has at least {ARENA_SLOTS_AT_LEAST} slots, not {slots}"
        if self.drawn_bytes + slots * slot_bytes > self.staging_bytes:
            return None
        run = self._memory.draw(slots * slot_stride(slot_bytes))
        if run is None:
            return None
        arena = Arena(slots, slot_bytes, run)
        self._drawn[id(arena)] = arena, session
        return arena

    def give_back(self, arena: Arena, fence: Fenced) -> None:
        _, session = self._drawn[id(arena)]
        assert fence.session == session, f"the fence of session {fence.session} frees nothing of session {session}"
        self.give_back_untouched(arena)

    def give_back_untouched(self, arena: Arena) -> None:
        """Of an arena none of whose slots was ever handed to a transport."""
        del self._drawn[id(arena)]
        self._memory.give_back(arena.memory)
