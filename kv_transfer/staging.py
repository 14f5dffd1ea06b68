"""Between a node's KV pool and the network: the verified copies that fill and empty slots, on a thread of their own.

    P: pool blocks --gather--> slot --message--> slot --verify, scatter--> pool blocks :D

A message is a parcel's payload followed by its digest. Blocks, head order and shards of either side end here. All copies of
a node are begun and end in order on one copier thread, so that the asyncio thread never waits for one; the interpreter lock is
free while numpy copies and xxh3 hashes. A pool on a GPU has a copier of its own (`device_copies`).

Invariants: nothing is scattered that was not verified; a gather whose blocks have changed owner, before or while it read
them, poisons the digest, so that the parcel can verify nowhere.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

from foundation.kv_layout import KvLayout
from kv_transfer.arena import HostSlots, SlotMemory, slot_stride
from kv_transfer.digest import KIND as HOST_DIGEST
from kv_transfer.digest import TRAILER_BYTES, payload_digest
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.pool_copy import KvPool, gather_parcel, scatter_parcel
from kv_transfer.transfer_blocks import TransferBlocks
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.cuda_memory import CudaDevice

_POISON = (1 << 64) - 1

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Gather:
    """P: read one parcel out of a transfer's blocks, if they still have the owners that it names.

    `message` is exactly payload + digest long.
    """

    blocks: TransferBlocks
    parcel: ParcelName
    seed: int
    message: Bytes


@dataclass(frozen=True, slots=True)
class Gathered:
    """`digest` is what stands in the message; it verifies nowhere unless `intact`."""

    digest: int
    intact: bool


@dataclass(frozen=True, slots=True)
class Scatter:
    """D: verify one parcel and write it into a transfer's blocks."""

    blocks: TransferBlocks
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


def gather(pool: KvPool, job: Gather) -> Gathered:
    """Fill the message. Blocks."""
    payload = job.message[:-TRAILER_BYTES]
    assert payload.size == job.parcel.wire_bytes(pool.layout), f"{payload.size} bytes for {job.parcel}"
    owned = _owned(pool, job)
    gather_parcel(pool, job.blocks, job.parcel, payload)
    digest = payload_digest(job.seed, payload)
    intact = owned and _owned(pool, job)
    if not intact:
        digest ^= _POISON
    job.message[-TRAILER_BYTES:] = np.frombuffer(digest.to_bytes(TRAILER_BYTES, "little"), np.uint8)
    return Gathered(digest, intact)


def scatter(pool: KvPool, job: Scatter) -> Scattered | DigestMismatch:
    """Verify the message, then write it. Blocks."""
    payload = job.message[:-TRAILER_BYTES]
    assert payload.size == job.parcel.wire_bytes(pool.layout), f"{payload.size} bytes for {job.parcel}"
    received = int.from_bytes(job.message[-TRAILER_BYTES:].tobytes(), "little")
    computed = payload_digest(job.seed, payload)
    if computed != received:
        return DigestMismatch(computed, received)
    scatter_parcel(pool, job.blocks, job.parcel, payload)
    return Scattered(computed)


def _owned(pool: KvPool, job: Gather) -> bool:
    part = job.blocks.covering(job.parcel, pool.layout.block_size)
    return np.array_equal(pool.owner_words[job.blocks.ids[part]], job.blocks.owner_words[part])


class Copier(Protocol):
    """Gathers and scatters of one node, begun and ended in the order asked for. Made and used on the asyncio thread, where all
    callbacks run, never before `gather` or `scatter` has returned.

    What waits is bounded by the slots: every job holds one. `failure` ends with the exception after which nothing is copied any
    more, which is a bug or a broken GPU; the node must not live on without it.
    """

    @property
    def failure(self) -> asyncio.Future[None]: ...

    def gather(self, job: Gather, done: Callable[[Gathered], None]) -> None: ...

    def scatter(self, job: Scatter, done: Callable[[Scattered | DigestMismatch], None]) -> None: ...

    async def close(self) -> None:
        """Finishes what was asked for, then ends the thread."""


class PoolElsewhere(Protocol):
    """A pool that is not in host memory brings what belongs to its memory."""

    @property
    def device(self) -> CudaDevice: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def digest_kind(self) -> str:
        """Peers that pair must name the same."""

    def slots(self, size: int) -> SlotMemory:
        """Memory of `size` bytes in all, for arenas."""

    def copier(self) -> Copier: ...


AnyPool = KvPool | PoolElsewhere


def digest_kind(pool: AnyPool) -> str:
    return HOST_DIGEST if isinstance(pool, KvPool) else pool.digest_kind


def slot_memory(pool: AnyPool, staging_bytes: int, slot_bytes: int) -> SlotMemory:
    """For `staging_bytes` of payload in slots of at least `slot_bytes`."""
    slots = -(-staging_bytes // slot_bytes)
    return HostSlots() if isinstance(pool, KvPool) else pool.slots(slots * slot_stride(slot_bytes))


def copier_of(pool: AnyPool) -> Copier:
    return HostCopier(pool) if isinstance(pool, KvPool) else pool.copier()


class HostCopier:
    """A `Copier` with a thread of Python's, which numpy and xxh3 let run beside others."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kv-copier", daemon=True)
        self._thread.start()

    def gather(self, job: Gather, done: Callable[[Gathered], None]) -> None:
        self._jobs.put(lambda: self._tell(done, gather(self._pool, job)))

    def scatter(self, job: Scatter, done: Callable[[Scattered | DigestMismatch], None]) -> None:
        self._jobs.put(lambda: self._tell(done, scatter(self._pool, job)))

    async def close(self) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        if not self.failure.done():
            self.failure.cancel()

    def _tell(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(done, outcome)

    def _run(self) -> None:
        try:
            while job := self._jobs.get():
                job()
        except BaseException as error:
            self._loop.call_soon_threadsafe(partial(_fail, self.failure), error)


def _fail(failure: asyncio.Future[Any], error: BaseException) -> None:
    if not failure.done():
        failure.set_exception(error)
