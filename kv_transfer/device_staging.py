"""A GPU's pool as a node's transfers take it: its slots, and its copier, whose kernels run on a stream of lower priority than the
engine's.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from foundation.kv_layout import KvLayout
from kv_transfer.arena import SlotMemory
from kv_transfer.device_copies import DeviceCopies
from kv_transfer.device_copy import DeviceCopier, DevicePool
from kv_transfer.device_digest import KIND
from kv_transfer.device_launches import AT_ONCE, DeviceLaunches, launch_libraries
from kv_transfer.device_places import PinnedPlace, place_words
from kv_transfer.device_slots import DeviceSlots
from kv_transfer.staging import Copier
from kv_transfer.transport.cuda_memory import CudaDevice

COPY_PRIORITY = 0
"""The lowest; the engine's is above it."""


class DeviceStaging:
    """A `staging.PoolElsewhere`."""

    def __init__(self, pool: DevicePool, *, digests: bool = True) -> None:
        """Compiles the kernels and what launches them, so that no transfer waits for a compiler. Raises SetupError where that
        cannot be. `digests` False is for measuring what they cost."""
        self.pool = pool
        self.device = CudaDevice(pool.memory.device.index or 0)
        self._digests = digests
        launch_libraries()
        DeviceCopier(pool, digests=digests).compile(pool.layout.kv_heads)

    @property
    def layout(self) -> KvLayout:
        return self.pool.layout

    @property
    def digest_kind(self) -> str:
        return KIND

    def slots(self, size: int) -> SlotMemory:
        return DeviceSlots(self.device, size)

    def copier(self) -> Copier:
        device, blocks = self.pool.memory.device, self.pool.memory.shape[1]
        stream = torch.cuda.Stream(device, priority=COPY_PRIORITY)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            kernels = DeviceCopier(self.pool, digests=self._digests)
            kernels.compile(self.layout.kv_heads)
            pinned = torch.zeros(AT_ONCE, place_words(blocks), dtype=torch.int64, pin_memory=True)
        places = [PinnedPlace(words) for words in pinned.numpy().view(np.uint64)]
        launches = DeviceLaunches(ctypes.CDLL("libcuda.so.1"), self.device.entering(), stream.cuda_stream)
        return DeviceCopies(self.layout, kernels, places, launches)
