"""The verified copies of a node whose KV pool is on a GPU, and its slots: what `staging` does for a host.

A copy is one kernel on a stream of lower priority than the engine's. It reads what the host knows (blocks, owner words, seed)
from a place of its own, written before it is launched, and says how it went in pinned memory: nothing is copied back, and
several may be on their way at once.

Invariants: a place is used again only after its copy has ended; nothing counts as scattered whose digest does not agree.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
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
_DIGEST, _TRAILER = 0, 1


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
        self._places = [_Place(pool.memory.shape[1], device) for _ in range(AT_ONCE)]
        self._begun = 0

    def gather(self, job: Gather) -> Begun[Gathered]:
        place = self._begin(job, job.owner_words, gather=True)
        return Begun(place.ended.query, partial(_gathered, place))

    def scatter(self, job: Scatter) -> Begun[Scattered | DigestMismatch]:
        place = self._begin(job, (), gather=False)
        return Begun(place.ended.query, partial(_scattered, place))

    def _begin(self, job: Gather | Scatter, owner_words: Sequence[int], *, gather: bool) -> _Place:
        payload_bytes = job.parcel.wire_bytes(self._layout)
        message = on_device(job.message)
        assert message.size == payload_bytes + WORD_BYTES, f"{message.size} bytes for {job.parcel}"
        place = self._places[self._begun % AT_ONCE]
        self._begun += 1
        block_size = self._layout.block_size
        first, end = job.parcel.first_position // block_size, -(-job.parcel.end_position // block_size)
        where = place.write(job.seed, job.block_ids[first:end], owner_words[first:end], message.address)
        self._copier.run(job.parcel, where, gather=gather)
        place.ended.record()
        return place


class _Place:
    """What one copy is told and tells: seed, owner words, block ids; digest, trailer."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        words = 2 + blocks + -(-blocks // 2)
        self._pinned = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        self._words = self._pinned.numpy()
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        self._outcome = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self._told = self._outcome.numpy().view(np.uint64)
        self.ended = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, seed: int, blocks: Sequence[int], owners: Sequence[int], message: int) -> ParcelPlace:
        count = len(blocks)
        self._words[0] = seed - (1 << 64) if seed >> 63 else seed
        self._words[2 : 2 + len(owners)] = np.asarray(owners, np.uint64).view(np.int64)
        self._words[2 + count :].view(np.int32)[:count] = blocks
        used = 2 + count + -(-count // 2)
        self._device[:used].copy_(self._pinned[:used], non_blocking=True)
        start = self._device.data_ptr()
        return ParcelPlace(
            message=message,
            blocks=start + WORD_BYTES * (2 + count),
            expected=start + WORD_BYTES * 2,
            seed=start,
            outcome=self._outcome.data_ptr(),
            block_count=count,
        )

    def outcome(self) -> tuple[int, int]:
        """Digest and trailer. Waits for the copy; raises RuntimeError when the GPU has failed."""
        self.ended.synchronize()
        return int(self._told[_DIGEST]), int(self._told[_TRAILER])


def _gathered(place: _Place) -> Gathered:
    digest, trailer = place.outcome()
    return Gathered(trailer, intact=digest == trailer)


def _scattered(place: _Place) -> Scattered | DigestMismatch:
    digest, trailer = place.outcome()
    return Scattered(digest) if digest == trailer else DigestMismatch(digest, trailer)
