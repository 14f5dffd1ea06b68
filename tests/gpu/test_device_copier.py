"""A GPU's copier as a node has it: kernels that Triton has compiled, launched by a thread of C."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from foundation.kv_layout import HeadOrder, KvLayout
from kv_transfer.arena import Arena, slot_stride
from kv_transfer.device_copy import DevicePool
from kv_transfer.device_digest import MASK, payload_digest
from kv_transfer.device_slots import on_device
from kv_transfer.device_staging import DeviceStaging
from kv_transfer.plan.parcels import ParcelName, cut_parcels
from kv_transfer.staging import Copier, DigestMismatch, Gather, Gathered, Scatter, Scattered
from kv_transfer.transfer_blocks import TransferBlocks

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
BLOCKS, TAKEN, BLOCK_SIZE, HEADS, HEAD_DIM, LAYERS = 80, 40, 16, 3, 64, 4
POSITIONS = TAKEN * BLOCK_SIZE - 5
SLOT_BYTES = 20_000
POISON = (1 << 64) - 1


class Side:
    """A pool whose first half, in another order, holds what travels; its staging, and its copier once it is entered."""

    def __init__(self, head_order: HeadOrder, layer_group: int, seed: int) -> None:
        self.layout = KvLayout(LAYERS, HEADS, HEAD_DIM, "bfloat16", BLOCK_SIZE, head_order, layer_group)
        inner = (HEADS, BLOCK_SIZE) if head_order == "HND" else (BLOCK_SIZE, HEADS)
        shape = (LAYERS // layer_group, BLOCKS, layer_group, 2, *inner, HEAD_DIM)
        self.memory = torch.randn(shape, device=DEVICE).bfloat16()
        self.words = torch.arange(1000, 1000 + BLOCKS).pin_memory()
        self.ids = np.random.default_rng(seed).permutation(BLOCKS)[:TAKEN]
        self.staging = DeviceStaging(DevicePool(self.layout, self.memory, self.words))
        torch.cuda.synchronize()

    def blocks(self, *, owned: bool) -> TransferBlocks:
        return TransferBlocks.of(self.ids, self.ids + 1000 if owned else ())

    def kv(self) -> torch.Tensor:
        """[layer, 2, position, head, dim] of what travels."""
        taken = self.memory[:, torch.from_numpy(self.ids).to(DEVICE)]
        groups, blocks, group, *_ = taken.shape
        if self.layout.head_order == "HND":
            taken = taken.transpose(4, 5)
        ordered = taken.permute(0, 2, 3, 1, 4, 5, 6).reshape(groups * group, 2, blocks * BLOCK_SIZE, HEADS, HEAD_DIM)
        return ordered[:, :, :POSITIONS]


async def gathered(copier: Copier, job: Gather) -> Gathered:
    ended: asyncio.Future[Gathered] = asyncio.get_running_loop().create_future()
    copier.gather(job, ended.set_result)
    return await asyncio.wait_for(ended, 30)


async def scattered(copier: Copier, job: Scatter) -> Scattered | DigestMismatch:
    ended: asyncio.Future[Scattered | DigestMismatch] = asyncio.get_running_loop().create_future()
    copier.scatter(job, ended.set_result)
    return await asyncio.wait_for(ended, 30)


def arena_of(side: Side, slots: int) -> Arena:
    size = slots * slot_stride(SLOT_BYTES)
    return Arena(slots, SLOT_BYTES, side.staging.slots(size).draw(size))


@pytest.mark.parametrize(("head_order", "layer_group"), [("HND", 4), ("HND", 1), ("NHD", 2)])
async def test_a_prompt_travels_through_slots_and_arrives_whole(head_order: HeadOrder, layer_group: int) -> None:
    source, target = Side(head_order, layer_group, 1), Side(head_order, layer_group, 2)
    parcels = cut_parcels(0, POSITIONS, source.layout, target.layout, SLOT_BYTES)
    assert len(parcels) > 30, "more than have places"
    arena = arena_of(source, len(parcels))
    sizes = [parcel.wire_bytes(source.layout) for parcel in parcels]
    messages = [arena.message(slot, size) for slot, size in enumerate(sizes)]
    sending, landing = source.staging.copier(), target.staging.copier()
    gathers = [
        gathered(sending, Gather(source.blocks(owned=True), parcel, seed, messages[seed]))
        for seed, parcel in enumerate(parcels)
    ]
    for seed, outcome in enumerate(await asyncio.gather(*gathers)):
        assert outcome.intact
        assert outcome.digest == payload_digest(seed, on_device(messages[seed]).read()[: sizes[seed]])
    scatters = [
        scattered(landing, Scatter(target.blocks(owned=False), parcel, seed, messages[seed]))
        for seed, parcel in enumerate(parcels)
    ]
    assert all(isinstance(outcome, Scattered) for outcome in await asyncio.gather(*scatters))
    assert torch.equal(source.kv(), target.kv())
    await sending.close()
    await landing.close()
    assert sending.failure.cancelled()


async def test_a_lost_block_and_another_seed_are_told() -> None:
    side = Side("HND", 4, 1)
    parcel = ParcelName(0, 4, 0, 4, 0, HEADS)
    message = arena_of(side, 2).message(0, parcel.wire_bytes(side.layout))
    copier = side.staging.copier()
    job = Gather(side.blocks(owned=True), parcel, MASK - 7, message)
    sound = await gathered(copier, job)
    assert sound.intact
    other = await scattered(copier, Scatter(side.blocks(owned=False), parcel, 8, message))
    assert isinstance(other, DigestMismatch)
    assert other.received == sound.digest
    side.words[int(side.ids[0])] += 1
    lost = await gathered(copier, job)
    assert not lost.intact
    assert lost.digest == sound.digest ^ POISON
    await copier.close()


BREAKS = """
import asyncio
from test_device_copier import HEADS, ParcelName, Side, TransferBlocks, Gather
from kv_transfer.transport.cuda_memory import DeviceBytes

async def main() -> None:
    side = Side("HND", 4, 1)
    parcel = ParcelName(0, 4, 0, 4, 0, HEADS)
    nowhere = DeviceBytes(1 << 20, parcel.wire_bytes(side.layout) + 8, side.staging.device, None)
    copier = side.staging.copier()
    copier.gather(Gather(side.blocks(owned=True), parcel, 1, nowhere), print)
    try:
        await asyncio.wait_for(asyncio.shield(copier.failure), 30)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    await copier.close()

asyncio.run(main())
"""


def test_a_gpu_that_breaks_ends_the_copier_in_cudas_words() -> None:
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", BREAKS], capture_output=True, text=True, timeout=100, env=paths)
    assert ran.stdout.startswith("TransportError"), ran.stderr[-3000:]
    assert "illegal" in ran.stdout
