"""Between a node's KV pool and the network: the verified copies that fill and empty slots, on a thread of their own.

    P: pool blocks --gather--> slot --message--> slot --verify, scatter--> pool blocks :D

A message is a parcel's payload followed by its digest. Blocks, head order and shards of either side end here. All copies of
a node are begun and end in order on one copier thread, so that the asyncio thread never waits for one; the interpreter lock is
free while numpy copies, xxh3 hashes, or a GPU does both.

Invariants: nothing is scattered that was not verified; a gather whose blocks have changed owner, before or while it read
them, poisons the digest, so that the parcel can verify nowhere.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

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


@dataclass(frozen=True, slots=True)
class Begun(Generic[Outcome]):
    """A copy on its way. `outcome` waits for it, unless it is `over`."""

    over: Callable[[], bool]
    outcome: Callable[[], Outcome]


class Copies(Protocol):
    """How the copies of one pool are done. Used on the copier's thread alone; at most `at_once` have begun and not ended."""

    at_once: int

    def gather(self, job: Gather) -> Begun[Gathered]: ...

    def scatter(self, job: Scatter) -> Begun[Scattered | DigestMismatch]: ...


class HostCopies:
    """A copy is over when it has begun."""

    at_once = 1

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def gather(self, job: Gather) -> Begun[Gathered]:
        outcome = gather(self._pool, job)
        return Begun(lambda: True, lambda: outcome)

    def scatter(self, job: Scatter) -> Begun[Scattered | DigestMismatch]:
        outcome = scatter(self._pool, job)
        return Begun(lambda: True, lambda: outcome)


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

    def copies(self) -> Copies:
        """To be made on the copier's thread."""


AnyPool = KvPool | PoolElsewhere


def digest_kind(pool: AnyPool) -> str:
    return HOST_DIGEST if isinstance(pool, KvPool) else pool.digest_kind


def slot_memory(pool: AnyPool, staging_bytes: int, slot_bytes: int) -> SlotMemory:
    """For `staging_bytes` of payload in slots of at least `slot_bytes`."""
    slots = -(-staging_bytes // slot_bytes)
    return HostSlots() if isinstance(pool, KvPool) else pool.slots(slots * slot_stride(slot_bytes))


class Copier:
    """Gathers and scatters of one node, in the order asked for. Made on the asyncio thread, where all callbacks run.

    The queue is bounded by the slots: every job holds one. `failure` ends with the exception that ended the thread, which
    is a bug or a broken GPU; the node must not live on without it.
    """

    def __init__(self, pool: AnyPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[Copies], Begun[None]] | None] = SimpleQueue()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kv-copier", daemon=True)
        self._thread.start()

    def gather(self, job: Gather, done: Callable[[Gathered], None]) -> None:
        self._jobs.put(lambda copies: self._told(done, copies.gather(job)))

    def scatter(self, job: Scatter, done: Callable[[Scattered | DigestMismatch], None]) -> None:
        self._jobs.put(lambda copies: self._told(done, copies.scatter(job)))

    async def close(self) -> None:
        """Finishes what was asked for, then ends the thread."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        if not self.failure.done():
            self.failure.cancel()

    def _told(self, done: Callable[[Outcome], None], begun: Begun[Outcome]) -> Begun[None]:
        return Begun(begun.over, lambda: self._tell(done, begun.outcome()))

    def _tell(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(done, outcome)

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as error:
            self._loop.call_soon_threadsafe(partial(_fail, self.failure), error)

    def _copy(self) -> None:
        """What is over is told first; what can begin goes before what must be waited for."""
        copies = HostCopies(self._pool) if isinstance(self._pool, KvPool) else self._pool.copies()
        begun: deque[Begun[None]] = deque()
        while True:
            if begun and (len(begun) >= copies.at_once or self._jobs.empty() or begun[0].over()):
                begun.popleft().outcome()
                continue
            begin = self._jobs.get()
            if begin is None:
                break
            begun.append(begin(copies))
        while begun:
            begun.popleft().outcome()


def _fail(failure: asyncio.Future[Any], error: BaseException) -> None:
    if not failure.done():
        failure.set_exception(error)
