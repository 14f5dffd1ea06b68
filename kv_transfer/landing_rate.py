"""How fast a lane carries, seen from what lands: the best rate at which parcels of one transfer followed each other. Pure.

A prefill node sends what it has computed, so between two chunks a lane may rest: the average of a transfer says how fast P
computes, the best stretch of it how fast the lane is. Where no stretch is better than the computing, the lane is not what holds
the transfer up. The self-test of a pair measures the lane once, alone and with small messages; this sees it under its load.

Must not know: clocks, transports.
"""

from __future__ import annotations

SHORTEST_STRETCH_S = 0.002
"""Landings are noticed by an event loop, several at once when it was busy: shorter stretches say nothing."""


class LandingRate:
    __slots__ = ("_begun_s", "_bytes", "bytes_per_second")

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        """Of the best stretch; 0 until there was one."""
        self._begun_s: float | None = None
        self._bytes = 0

    def landed(self, payload_bytes: int, now_s: float) -> None:
        """The first parcel only begins a stretch: when it was sent is not known."""
        if self._begun_s is None:
            self._begun_s = now_s
            return
        self._bytes += payload_bytes
        seconds = now_s - self._begun_s
        if seconds >= SHORTEST_STRETCH_S:
            self.bytes_per_second = max(self.bytes_per_second, self._bytes / seconds)
            self._begun_s, self._bytes = now_s, 0
