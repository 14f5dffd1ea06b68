"""Gather and scatter alone, against a plain copy of the same bytes in the same run; digests and owner checks on and off.

Bandwidths count bytes read and written, as the copy's ceiling does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.measure import DEVICE, captured, median_s
from bench.gpu.parts import BLOCK_SIZE, Figures
from bench.gpu.shape import HEAD_DIM, KV_BYTES_A_TOKEN, KV_HEADS, LAYERS
from engine.kv_cache.device_storage import DeviceKvStorage
from foundation.kv_layout import HeadOrder, KvLayout
from kv_transfer.device_copy import DeviceCopier, DevicePool
from kv_transfer.plan.parcels import ParcelName, cut_parcels

TOKENS = 8192
"""1 GiB of KV."""


class Transfer:
    """The KV of TOKENS positions in scattered blocks, and slots for all its parcels."""

    def __init__(self, order: HeadOrder, group: int, slot_bytes: int, programs: int, *, digests: bool) -> None:
        layout = KvLayout(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16", BLOCK_SIZE, order, group)
        count = TOKENS // BLOCK_SIZE
        storage = DeviceKvStorage(layout, 2 * count, DEVICE)
        storage.memory.normal_()
        self.pool = DevicePool(layout, storage.memory, storage.device_owner_words)
        self.copier = DeviceCopier(self.pool, programs, digests=digests)
        self.parcels: tuple[ParcelName, ...] = cut_parcels(0, TOKENS, layout, layout, slot_bytes)
        blocks = np.random.default_rng(2).permutation(2 * count)[:count].astype(np.int32)
        self.blocks = torch.from_numpy(blocks).to(DEVICE)
        self.owners = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        self.seed = torch.tensor([1234567], device=DEVICE)
        stride = slot_bytes + 4096
        self.slots = torch.empty(len(self.parcels), stride, dtype=torch.uint8, device=DEVICE)
        self.messages = [
            slot[: parcel.wire_bytes(layout) + 8] for slot, parcel in zip(self.slots, self.parcels, strict=True)
        ]
        self.outcomes = torch.zeros(len(self.parcels), 2, dtype=torch.int64, device=DEVICE)

    def _part(self, parcel: ParcelName) -> slice:
        return slice(parcel.first_position // BLOCK_SIZE, -(-parcel.end_position // BLOCK_SIZE))

    def gather(self) -> None:
        for parcel, message in zip(self.parcels, self.messages, strict=True):
            part = self._part(parcel)
            self.copier.gather(parcel, self.blocks[part], self.owners[part], self.seed, message)

    def scatter(self) -> None:
        for parcel, message, outcome in zip(self.parcels, self.messages, self.outcomes, strict=True):
            self.copier.scatter(parcel, self.blocks[self._part(parcel)], self.seed, message, outcome)


def hand_over(report: Callable[[str], None]) -> Figures:
    source = torch.empty(TOKENS * KV_BYTES_A_TOKEN, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    figures: Figures = {"copy_gb_s": 2 * source.numel() / median_s(lambda: target.copy_(source)) / 1e9}
    orders: tuple[tuple[HeadOrder, int], ...] = (("HND", 32), ("NHD", 32), ("HND", 8))
    for order, group in orders:
        for mib in (4, 16, 64):
            for programs in (132, 264, 528):
                for digests in (True, False):
                    if not digests and (mib, programs) != (16, 264):
                        continue
                    transfer = Transfer(order, group, mib << 20, programs, digests=digests)
                    name = f"{order}/{group} {mib}MiB {programs} {'digests' if digests else 'plain'}"
                    for verb in (transfer.gather, transfer.scatter):
                        seconds = median_s(captured(verb), 10)
                        figures[f"{verb.__name__}_gb_s {name}"] = 2 * source.numel() / seconds / 1e9
                    if (mib, programs) == (16, 264):
                        figures[f"gather_eager_gb_s {name}"] = 2 * source.numel() / median_s(transfer.gather, 5) / 1e9
        report(", ".join(f"{key} {value:.0f}" for key, value in figures.items() if f"{order}/{group}" in key))
    return figures
