"""Between a node's KV pool and the network: slots, and the two copies that fill and empty them.

    P: pool blocks --gather--> slot --message--> slot --verify, scatter--> pool blocks :D

The network only ever touches slots. A parcel's bytes in a slot are [layer, 2 (K, V), position, head, dim], followed by its
digest; blocks, head order and shards of either side end here. Copies run on one copier thread, so that the asyncio thread
never waits for one; the lock is free while numpy copies and while xxh3 hashes.

Invariants: nothing is scattered that was not verified; a gather whose blocks changed owner poisons the digest, so that it can
never verify anywhere; an arena is given back only with its session's fence.

Must not know: models, engines, transports beyond their fences, the protocol's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foundation.ids import BlockId
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.transport.base import Bytes, Fenced


@dataclass(frozen=True, slots=True)
class KvPool:
    """A node's KV memory as a transfer sees it.

    `shards[stage * tensor_parallel + rank]` has the shape that `foundation.kv_layout` describes and any dtype of the
    layout's item size (a bfloat16 tensor comes as its uint16 view). `owner_words[block]` (uint64) says whose KV a block holds.
    """

    layout: KvLayout
    shards: tuple[npt.NDArray[np.generic], ...]
    owner_words: npt.NDArray[np.uint64]


class Arena:
    """One dedicated allocation, cut into slots of `slot_bytes` payload and a digest each."""

    def __init__(self, slots: int, slot_bytes: int) -> None: ...

    def message(self, slot: int, payload_bytes: int) -> Bytes:
        """The part of a slot that a parcel of this length travels in, digest included."""


class StagingMemory:
    """The node's budget for arenas. An arena counts until it is given back."""

    def __init__(self, staging_bytes: int) -> None: ...

    def draw_arena(self, slots: int, slot_bytes: int) -> Arena | None:
        """None when the budget does not allow it; at least two slots."""

    def give_back(self, arena: Arena, fence: Fenced) -> None: ...

    def give_back_unused(self, arena: Arena) -> None:
        """Of an arena whose slots were never handed to a transport."""


@dataclass(frozen=True, slots=True)
class Gather:
    """P: read one parcel out of the blocks that cover positions [0, ...) in order, if they still have these owners."""

    block_ids: Sequence[BlockId]
    owner_words: Sequence[int]
    parcel: ParcelName
    seed: int
    message: Bytes


@dataclass(frozen=True, slots=True)
class Gathered:
    """`digest` is what stands in the message; poisoned unless `intact`."""

    digest: int
    intact: bool


@dataclass(frozen=True, slots=True)
class Scatter:
    """D: verify one parcel and write it into the blocks that cover positions [0, ...) in order."""

    block_ids: Sequence[BlockId]
    parcel: ParcelName
    seed: int
    message: Bytes


@dataclass(frozen=True, slots=True)
class Scattered:
    digest: int


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """Nothing was written."""

    computed: int
    received: int


class Copier:
    """Gathers and scatters of one node, in order, on one thread. Callbacks run on the asyncio thread that made it."""

    def __init__(self, pool: KvPool) -> None: ...

    def gather(self, job: Gather, done: Callable[[Gathered], None]) -> None: ...

    def scatter(self, job: Scatter, done: Callable[[Scattered | DigestMismatch], None]) -> None: ...

    async def close(self) -> None:
        """Finishes what was asked for, then ends the thread."""
