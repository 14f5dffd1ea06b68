"""Gather and scatter on the device against the host's: same bytes, and a digest that the host's definition gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foundation.kv_layout import HeadOrder, KvLayout
from kv_transfer.device_copy import DeviceCopier, DevicePool
from kv_transfer.device_digest import MASK, payload_digest
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.pool_copy import KvPool, gather_parcel, scatter_parcel
from kv_transfer.transfer_blocks import TransferBlocks

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SEED = -(1 << 62) + 12345
KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 3, 64, 4, 16
PARCELS = (
    (4, ParcelName(0, 96, 0, 4, 0, 3)),
    (2, ParcelName(16, 93, 2, 4, 1, 3)),
    (4, ParcelName(5, 37, 1, 3, 0, 3)),
    (1, ParcelName(0, 1, 3, 4, 2, 3)),
)


class World:
    def __init__(self, head_order: HeadOrder, layer_group: int, parcel: ParcelName) -> None:
        self.layout = KvLayout(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16", BLOCK_SIZE, head_order, layer_group)
        inner = (KV_HEADS, BLOCK_SIZE) if head_order == "HND" else (BLOCK_SIZE, KV_HEADS)
        self.shape = (LAYERS // layer_group, 40, layer_group, 2, *inner, HEAD_DIM)
        self.parcel = parcel
        self.all_blocks = TransferBlocks.of(np.random.default_rng(3).permutation(40)[:6].tolist())
        part = self.all_blocks.ids[self.all_blocks.covering(parcel, BLOCK_SIZE)]
        self.blocks = torch.from_numpy(part.astype(np.int32)).pin_memory()
        self.words = torch.arange(100, 140).pin_memory()
        self.expected = self.words[self.blocks.long()].pin_memory()
        self.seed = torch.tensor([SEED]).pin_memory()
        self.payload_bytes = parcel.wire_bytes(self.layout)
        self.message = torch.zeros(self.payload_bytes + 8, dtype=torch.uint8, device=DEVICE)

    def pool(self, memory: torch.Tensor) -> DevicePool:
        return DevicePool(self.layout, memory, self.words)

    def host_pool(self, memory: torch.Tensor) -> KvPool:
        return KvPool(self.layout, (memory.cpu().view(torch.uint8).numpy(),), self.words.numpy().view(np.uint64))

    def digest(self) -> int:
        return int.from_bytes(self.message[self.payload_bytes :].cpu().numpy().tobytes(), "little")


@pytest.mark.parametrize("head_order", ["HND", "NHD"])
@pytest.mark.parametrize(("layer_group", "parcel"), PARCELS)
def test_device_copies_move_the_host_copies_bytes_and_give_the_defined_digest(
    head_order: HeadOrder, layer_group: int, parcel: ParcelName
) -> None:
    world = World(head_order, layer_group, parcel)
    memory = torch.randn(world.shape, device=DEVICE).bfloat16()
    DeviceCopier(world.pool(memory)).gather(parcel, world.blocks, world.expected, world.seed, world.message)
    payload = np.zeros(world.payload_bytes, np.uint8)
    gather_parcel(world.host_pool(memory), world.all_blocks, parcel, payload)
    assert np.array_equal(world.message[: world.payload_bytes].cpu().numpy(), payload)
    assert world.digest() == payload_digest(SEED & MASK, payload)

    target = torch.full(world.shape, 7.0, device=DEVICE).bfloat16()
    expected_pool = world.host_pool(target)
    outcome = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    DeviceCopier(world.pool(target)).scatter(parcel, world.blocks, world.seed, world.message, outcome)
    assert int(outcome[0]) & MASK == world.digest()
    scatter_parcel(expected_pool, world.all_blocks, parcel, payload)
    assert np.array_equal(world.host_pool(target).shards[0], expected_pool.shards[0])


@pytest.mark.parametrize("place", [0, -1])
def test_a_block_that_has_changed_owner_poisons_the_digest(place: int) -> None:
    world = World("HND", 4, PARCELS[0][1])
    copier = DeviceCopier(world.pool(torch.randn(world.shape, device=DEVICE).bfloat16()))
    copier.gather(world.parcel, world.blocks, world.expected, world.seed, world.message)
    sound = world.digest()
    world.words[int(world.blocks[place])] += 1
    copier.gather(world.parcel, world.blocks, world.expected, world.seed, world.message)
    assert world.digest() == sound ^ MASK


def test_one_flipped_bit_anywhere_changes_what_a_scatter_reports() -> None:
    world = World("HND", 4, PARCELS[0][1])
    memory = torch.randn(world.shape, device=DEVICE).bfloat16()
    copier = DeviceCopier(world.pool(memory))
    copier.gather(world.parcel, world.blocks, world.expected, world.seed, world.message)
    outcome = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    rng = np.random.default_rng(9)
    for _ in range(50):
        byte, bit = int(rng.integers(world.payload_bytes)), int(rng.integers(8))
        world.message[byte] ^= 1 << bit
        copier.scatter(world.parcel, world.blocks, world.seed, world.message, outcome)
        assert int(outcome[0]) & MASK != world.digest()
        world.message[byte] ^= 1 << bit
    copier.scatter(world.parcel, world.blocks, world.seed, world.message, outcome)
    assert int(outcome[0]) & MASK == world.digest()
