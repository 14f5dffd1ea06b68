"""What a side knows of its own node: constant while the node lives, no part of a state's identity.

The functions are pure; they come in here because what they belong to (digests) needs libraries that the protocol must not
know, and so that a search can run on a small world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foundation.ids import Incarnation
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName, cut_parcels
from kv_transfer.protocol.messages import Hello

CutParcels = Callable[[int, int, KvLayout, KvLayout, int], tuple[ParcelName, ...]]
"""(from_position, end_position, source_layout, target_layout, slot_bytes) -> the parcels, in order of position."""


@dataclass(frozen=True)
class LocalNode:
    """`hello` is this node's, but for the session number. `trailer_bytes` follow the payload in every parcel's message.

    `quarantine_arenas`: with so many arenas in quarantine D opens no further session. `unreserved_positions`: P computes at
    most so many positions for one D that has not reserved them yet.
    """

    incarnation: Incarnation
    hello: Hello
    trailer_bytes: int
    digest_of_all: Callable[[Sequence[int]], int]
    silence_limit_s: float = 2.0
    quarantine_arenas: int = 2
    unreserved_positions: int = 1 << 17
    cut: CutParcels = cut_parcels

    @property
    def layout(self) -> KvLayout:
        return self.hello.layout
