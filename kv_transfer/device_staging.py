"""The verified copies of a node whose KV pool is on a GPU, and its slots: what `staging` does for a host.

A copy is one kernel on a stream of lower priority than the engine's. It reads what the host knows (blocks, owner words, seed)
from a place of its own in pinned memory, and says there how it went: nothing is copied to or fro, and several may be on their way
at once.

Invariants: a place is used again only after its copy has ended; nothing counts as scattered whose digest does not agree.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from foundation.kv_layout import KvLayout
from kv_transfer.arena import SlotMemory
from kv_transfer.device_copy import DeviceCopier, DevicePool, ParcelPlace
from kv_transfer.device_digest import KIND
from kv_transfer.device_slots import DeviceSlots, on_device
from kv_transfer.staging import Begun, Copies, DigestMismatch, Gather, Gathered, Scatter, Scattered
from kv_transfer.transport.cuda_memory import CudaDevice

AT_ONCE = 8
"""Copies that may be on their way; more than the GPU does while the host launches one."""

COPY_PRIORITY = 0
"""The lowest; the engine's is above it."""

WORD_BYTES = 8
_SEED, _DIGEST, _TRAILER, _BLOCKS = 0, 1, 2, 3


class DeviceStaging:
    """A `staging.PoolElsewhere`."""

    def __init__(self, pool: DevicePool) -> None:
        """Compiles the kernels, so that no transfer waits for a compiler."""
        self.pool = pool
        self.device = CudaDevice(pool.memory.device.index or 0)
        DeviceCopier(pool).compile(pool.layout.kv_heads)

    @property
    def layout(self) -> KvLayout:
        return self.pool.layout

    @property
    def digest_kind(self) -> str:
        return KIND

    def slots(self, size: int) -> SlotMemory:
        return DeviceSlots(self.device, size)

    def copies(self) -> Copies:
        return DeviceCopies(self.pool)


class DeviceCopies:
    """`staging.Copies`. Made on the copier's thread, whose stream and device it sets."""

    at_once = AT_ONCE

    def __init__(self, pool: DevicePool) -> None:
        self._layout = pool.layout
        device = pool.memory.device
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=COPY_PRIORITY))  # type: ignore[no-untyped-call]
        self._copier = DeviceCopier(pool)
        self._copier.compile(pool.layout.kv_heads)
        self._places = [_Place(pool.memory.shape[1]) for _ in range(AT_ONCE)]
        self._begun = 0

    def gather(self, job: Gather) -> Begun[Gathered]:
        place = self._begin(job, gather=True)
        return Begun(place.ended.query, partial(_gathered, place))

    def scatter(self, job: Scatter) -> Begun[Scattered | DigestMismatch]:
        place = self._begin(job, gather=False)
        return Begun(place.ended.query, partial(_scattered, place))

    def _begin(self, job: Gather | Scatter, *, gather: bool) -> _Place:
        payload_bytes = job.parcel.wire_bytes(self._layout)
        message = on_device(job.message)
        assert message.size == payload_bytes + WORD_BYTES, f"{message.size} bytes for {job.parcel}"
        place = self._places[self._begun % AT_ONCE]
        self._begun += 1
        part = job.blocks.covering(job.parcel, self._layout.block_size)
        where = place.write(job.seed, job.blocks.ids[part], job.blocks.owner_words[part], message.address)
        self._copier.run(job.parcel, where, gather=gather)
        place.ended.record()
        return place


class _Place:
    """What one copy is told and tells, in pinned memory: its seed; the digest, the trailer; owner words, block ids."""

    def __init__(self, blocks: int) -> None:
        self._pinned = torch.zeros(_BLOCKS + blocks + -(-blocks // 2), dtype=torch.int64, pin_memory=True)
        self._words = self._pinned.numpy().view(np.uint64)
        self._start = self._pinned.data_ptr()
        self.ended = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(
        self, seed: int, ids: npt.NDArray[np.int64], owner_words: npt.NDArray[np.uint64], message: int
    ) -> ParcelPlace:
        """`owner_words` may be none; the ids lie behind as many words as there are ids."""
        self._words[_SEED] = seed
        ids_at = _BLOCKS + len(ids)
        self._words[_BLOCKS : _BLOCKS + len(owner_words)] = owner_words
        self._words[ids_at:].view(np.int32)[: len(ids)] = ids
        return ParcelPlace(
            message=message,
            blocks=self._start + WORD_BYTES * ids_at,
            expected=self._start + WORD_BYTES * _BLOCKS,
            seed=self._start + WORD_BYTES * _SEED,
            outcome=self._start + WORD_BYTES * _DIGEST,
            block_count=len(ids),
        )

    def outcome(self) -> tuple[int, int]:
        """Digest and trailer. Waits for the copy; raises RuntimeError when the GPU has failed."""
        self.ended.synchronize()
        return int(self._words[_DIGEST]), int(self._words[_TRAILER])


def _gathered(place: _Place) -> Gathered:
    digest, trailer = place.outcome()
    return Gathered(trailer, intact=digest == trailer)


def _scattered(place: _Place) -> Scattered | DigestMismatch:
    digest, trailer = place.outcome()
    return Scattered(digest) if digest == trailer else DigestMismatch(digest, trailer)
