"""The verified copies of a node whose KV pool is on a GPU: what `staging.HostCopier` does for a host.

A copy is one kernel. It reads what the host knows (blocks, owner words, seed) from a place of its own in pinned memory, and says
there how it went; several may be on their way at once.

Invariant: nothing counts as scattered whose digest does not agree.

Must not know: torch, Triton, models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from foundation.kv_layout import KvLayout
from kv_transfer.device_launches import DeviceLaunches, Launch
from kv_transfer.device_places import WORD_BYTES, ParcelPlace, PinnedPlace
from kv_transfer.device_slots import on_device
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.staging import DigestMismatch, Gather, Gathered, Scatter, Scattered


class ParcelKernels(Protocol):
    """Of one pool, for one stream."""

    def launch(self, parcel: ParcelName, place: ParcelPlace, *, gather: bool) -> Launch: ...


class DeviceCopies:
    """A `staging.Copier`."""

    def __init__(
        self, layout: KvLayout, kernels: ParcelKernels, places: Sequence[PinnedPlace], launches: DeviceLaunches
    ) -> None:
        """`places`: as many as `launches` may have on their way."""
        self._layout = layout
        self._kernels = kernels
        self._places = places
        self._launches = launches
        for gather in (True, False):  # what a kernel's first launch takes, no transfer waits for
            launches.ask(partial(self._begin_nothing, gather), lambda place: lambda: None)

    @property
    def failure(self) -> asyncio.Future[None]:
        return self._launches.failure

    def gather(self, job: Gather, done: Callable[[Gathered], None]) -> None:
        self._launches.ask(partial(self._begin, job, True), partial(self._gathered, done))

    def scatter(self, job: Scatter, done: Callable[[Scattered | DigestMismatch], None]) -> None:
        self._launches.ask(partial(self._begin, job, False), partial(self._scattered, done))

    async def close(self) -> None:
        await self._launches.close()

    def _begin(self, job: Gather | Scatter, gather: bool, place: int) -> Launch:
        payload_bytes = job.parcel.wire_bytes(self._layout)
        message = on_device(job.message)
        assert message.size == payload_bytes + WORD_BYTES, f"{message.size} bytes for {job.parcel}"
        part = job.blocks.covering(job.parcel, self._layout.block_size)
        ids, owner_words = job.blocks.ids[part], job.blocks.owner_words[part]
        where = self._places[place].write(job.seed, ids, owner_words, message.address)
        return self._kernels.launch(job.parcel, where, gather=gather)

    def _begin_nothing(self, gather: bool, place: int) -> Launch:
        """A parcel of no layers, whose trailer is a word of the place itself."""
        none = np.zeros(0, np.int64)
        where = self._places[place].write(0, none, none.view(np.uint64), self._places[place].address)
        return self._kernels.launch(ParcelName(0, 1, 0, 0, 0, self._layout.kv_heads), where, gather=gather)

    def _gathered(self, done: Callable[[Gathered], None], place: int) -> Callable[[], None]:
        digest, trailer = self._places[place].outcome()
        return partial(done, Gathered(trailer, intact=digest == trailer))

    def _scattered(self, done: Callable[[Scattered | DigestMismatch], None], place: int) -> Callable[[], None]:
        digest, trailer = self._places[place].outcome()
        return partial(done, Scattered(digest) if digest == trailer else DigestMismatch(digest, trailer))
