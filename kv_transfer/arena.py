"""Slots: the only memory that the network touches, and the budget they come from.

An arena is one dedicated allocation, so that exporting or registering it never covers anything else. D draws one for each
session and gives it back with the session's fence; P keeps one for all it sends.

Must not know: pools, parcels, sessions beyond their fences.
"""

from __future__ import annotations

import numpy as np

from kv_transfer.digest import message_bytes
from kv_transfer.transport.base import Bytes, Fenced

ARENA_SLOTS_AT_LEAST = 2
_PAGE_BYTES = 4096


class Arena:
    """`slots` slots, each long enough for `slot_bytes` of payload and its digest, each beginning on a page."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        assert slots >= 1, f"an arena of {slots} slots"
        assert slot_bytes >= 1, f"slots of {slot_bytes} bytes"
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = -(-message_bytes(slot_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        raw = np.zeros(slots * self._stride + _PAGE_BYTES, np.uint8)
        first = -raw.ctypes.data % _PAGE_BYTES
        self._memory = raw[first : first + slots * self._stride]

    @property
    def payload_bytes(self) -> int:
        """What the arena counts for in the budget."""
        return self.slots * self.slot_bytes

    def message(self, slot: int, payload_bytes: int) -> Bytes:
        """The part of a slot in which a parcel of this length travels, its digest included."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        assert 0 < payload_bytes <= self.slot_bytes, f"{payload_bytes} bytes in a slot of {self.slot_bytes}"
        begin = slot * self._stride
        return self._memory[begin : begin + message_bytes(payload_bytes)]


class StagingMemory:
    """A node's budget for arenas, in bytes of payload. An arena counts until it is given back."""

    def __init__(self, staging_bytes: int) -> None:
        self.staging_bytes = staging_bytes
        self._drawn: dict[int, tuple[Arena, int | None]] = {}

    @property
    def drawn_bytes(self) -> int:
        return sum(arena.payload_bytes for arena, _ in self._drawn.values())

    def draw_arena(self, slots: int, slot_bytes: int, session: int | None) -> Arena | None:
        """None when the budget does not allow it. `session` None: an arena of P's own, never given back."""
        assert slots >= ARENA_SLOTS_AT_LEAST, f"an arena has at least {ARENA_SLOTS_AT_LEAST} slots, not {slots}"
        if self.drawn_bytes + slots * slot_bytes > self.staging_bytes:
            return None
        arena = Arena(slots, slot_bytes)
        self._drawn[id(arena)] = arena, session
        return arena

    def give_back(self, arena: Arena, fence: Fenced) -> None:
        _, session = self._drawn[id(arena)]
        assert fence.session == session, f"the fence of session {fence.session} frees nothing of session {session}"
        del self._drawn[id(arena)]

    def give_back_untouched(self, arena: Arena) -> None:
        """Of an arena none of whose slots was ever handed to a transport."""
        del self._drawn[id(arena)]
