"""How fast a lane carries, seen from what lands: the best rate at which parcels of one transfer followed each other. Pure.

A prefill node sends what it has computed, so between two chunks a lane may rest: the average of a transfer says how fast P
computes, the best stretch of it how fast the lane is. Where no stretch is better than the computing, the lane is not what holds
the transfer up. Early layers leave at the pace of the step that computes them, however fast the lane is, so a stretch begins
with one at most. The self-test of a pair measures the lane once, alone and with small messages; this sees it under its load.

Must not know: clocks, transports.
"""

from __future__ import annotations

from collections import deque

SHORTEST_STRETCH_S = 0.002
STRETCH_PARCELS = 3
"""Landings are noticed by an event loop, several at once when it was busy: one that follows another closely says nothing."""


class LandingRate:
    __slots__ = ("_landed", "_landed_bytes", "bytes_per_second")

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        """Of the best stretch; 0 until there was one."""
        self._landed: deque[tuple[float, int]] = deque(maxlen=1 + STRETCH_PARCELS)
        """When a parcel landed, and how many bytes had by then; the oldest only begins a stretch, for it was sent before that."""
        self._landed_bytes = 0

    def landed(self, payload_bytes: int, now_s: float, *, early: bool = False) -> None:
        """`early`: before P has said that all layers of the parcel's positions are computed."""
        if early:
            self._landed.clear()
        self._landed_bytes += payload_bytes
        self._landed.append((now_s, self._landed_bytes))
        begun_s, before = self._landed[0]
        if len(self._landed) > STRETCH_PARCELS and now_s - begun_s >= SHORTEST_STRETCH_S:
            self.bytes_per_second = max(self.bytes_per_second, (self._landed_bytes - before) / (now_s - begun_s))
