"""Gather and scatter between a GPU's KV pool and slots in its memory, with digest and owner check in the same pass.

    gather:  pool blocks -> registers -> slot, and their digest behind them     (poisoned if a block has changed owner)
    scatter: slot -> registers -> pool blocks, and the digest of those registers (for the host to compare with the message's)

On the wire a parcel is [layer, 2 (K, V), position, head, dim]; in the pool positions lie in blocks and heads before or behind
them. A thread block takes a run of positions of one layer and side: contiguous on the wire, and as long a run in the pool.
Copies run on whatever stream is current, on at most `programs` thread blocks, so that the engine's steps beside them keep
theirs. A scatter stores what it hashes before the host has compared: the blocks belong to the transfer until it commits, so
nobody reads what a refused parcel left there.

Owner words lie in host memory that the device reads, and never repeat: one look after the bytes were read proves that nobody
else had the block before either.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from foundation.kv_layout import KvLayout
from kv_transfer.device_digest import FIRST_MULTIPLIER, GOLDEN, SECOND_MULTIPLIER
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.plan.regions import source_region

WORD_BYTES = 8
TILE_WORDS = 4096
PROGRAMS = 264
"""Two on each multiprocessor of an H200."""

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST_MULTIPLIER = tl.constexpr(FIRST_MULTIPLIER)
_SECOND_MULTIPLIER = tl.constexpr(SECOND_MULTIPLIER)
_POISON = tl.constexpr((1 << 64) - 1)
_OWNERS_TILE = tl.constexpr(256)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A GPU's pool as a transfer sees it: one shard, [groups, blocks, layer_group, 2, *inner, head_dim], and the owner words
    of its blocks, int64 in pinned memory."""

    layout: KvLayout
    memory: torch.Tensor
    owner_words: torch.Tensor

    def __post_init__(self) -> None:
        assert self.layout.tensor_parallel == self.layout.pipeline_parallel == 1, (
            f"one GPU holds one shard: {self.layout}"
        )
        assert self.layout.head_bytes % WORD_BYTES == 0, f"heads of {self.layout.head_bytes} bytes"
        assert self.memory.is_contiguous(), "a pool that is not contiguous"

    def words(self) -> torch.Tensor:
        return self.memory.view(torch.int64)


@triton.jit
def _digest_term(word, place, seed):
    bits = word.to(tl.uint64, bitcast=True)
    key = seed + (place.to(tl.uint64) + 1) * _GOLDEN
    key = (key ^ (key >> 30)) * _FIRST_MULTIPLIER
    key = key ^ (key >> 27)
    low = bits.to(tl.uint32) + key.to(tl.uint32)
    high = (bits >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)
    return low.to(tl.uint64) * high.to(tl.uint64)


@triton.jit
def _digest(total, payload_bytes):
    z = total.to(tl.uint64, bitcast=True) ^ (payload_bytes.to(tl.uint64) * _GOLDEN)
    z = (z ^ (z >> 30)) * _FIRST_MULTIPLIER
    z = (z ^ (z >> 27)) * _SECOND_MULTIPLIER
    return z ^ (z >> 31)


@triton.jit
def _all_owned(blocks, expected, owner_words, count, TILE: tl.constexpr):
    changed = tl.zeros((TILE,), tl.int32)
    for first in range(0, count, TILE):
        index = first + tl.arange(0, TILE)
        block = tl.load(blocks + index, mask=index < count, other=0)
        now = tl.load(owner_words + block, mask=index < count, other=0, volatile=True)
        changed |= (now != tl.load(expected + index, mask=index < count, other=0)).to(tl.int32)
    return tl.max(changed, axis=0) == 0


@triton.jit
def _copy(
    pool,
    wire,
    blocks,
    expected,
    owner_words,
    scratch,
    digest,
    seed_pointer,
    count,
    payload_bytes,
    first_position,
    positions,
    first_head,
    heads,
    side_count,
    block_stride,
    side_stride,
    head_stride,
    position_stride,
    pool_start,
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    GATHER: tl.constexpr,
    HASH: tl.constexpr,
):
    """Tiles of POSITIONS positions, all wanted heads, of one layer and side; sides are counted K, V, K, V ... over the layers."""
    seed = tl.load(seed_pointer).to(tl.uint64, bitcast=True)
    runs = tl.cdiv(positions, POSITIONS)
    lane = tl.arange(0, LANES)[None, None, :]
    head = tl.arange(0, HEADS)[None, :, None]
    sums = tl.zeros((POSITIONS, HEADS, LANES), tl.uint64)
    base = first_position // BLOCK_SIZE
    for tile in range(tl.program_id(0), runs * side_count, tl.num_programs(0)):
        side = tile // runs
        step = (tile % runs) * POSITIONS + tl.arange(0, POSITIONS)
        inside = (step < positions)[:, None, None] & (head < heads) & (lane < ROW_WORDS)
        position = first_position + step
        block = tl.load(blocks + position // BLOCK_SIZE - base, mask=step < positions, other=0).to(tl.int64)
        cell = (
            pool_start
            + block * block_stride
            + side.to(tl.int64) * side_stride
            + (position % BLOCK_SIZE) * position_stride
        )
        pool_place = pool + cell[:, None, None] + (first_head + head) * head_stride + lane
        wire_row = (side.to(tl.int64) * positions + step)[:, None, None] * heads + head
        wire_place = wire_row * ROW_WORDS + lane
        if GATHER:
            word = tl.load(pool_place, mask=inside, other=0)
            tl.store(wire + wire_place, word, mask=inside)
        else:
            word = tl.load(wire + wire_place, mask=inside, other=0)
            tl.store(pool_place, word, mask=inside)
        if HASH:
            sums += tl.where(inside, _digest_term(word, wire_place, seed), 0)
    if HASH:
        tl.atomic_add(scratch, tl.sum(tl.sum(tl.sum(sums, axis=2), axis=1), axis=0).to(tl.int64, bitcast=True))
        # Whoever is last sees all sums, and all reads lie behind it.
        if tl.atomic_add(scratch + 1, 1) == tl.num_programs(0) - 1:
            value = _digest(tl.atomic_xchg(scratch, 0), payload_bytes)
            tl.atomic_xchg(scratch + 1, 0)
            if GATHER:
                owned = _all_owned(blocks, expected, owner_words, count, _OWNERS_TILE)
                value = tl.where(owned, value, value ^ _POISON)
            tl.store(digest, value.to(tl.int64, bitcast=True))


class DeviceCopier:
    """Gathers and scatters over one pool on the current stream; its scratch memory serves one stream."""

    def __init__(self, pool: DevicePool, programs: int = PROGRAMS, *, digests: bool = True) -> None:
        """`digests` False is for measuring what they cost."""
        self._pool = pool
        self._programs = programs
        self._digests = digests
        self._scratch = torch.zeros(2, dtype=torch.int64, device=pool.memory.device)

    def gather(
        self,
        parcel: ParcelName,
        blocks: torch.Tensor,
        expected: torch.Tensor,
        seed: torch.Tensor,
        message: torch.Tensor,
    ) -> None:
        """Fill `message` (uint8, payload and digest) from `blocks` (int32, those that cover the parcel's positions), which
        should have the owner words `expected` (int64, as many). `seed`: int64 [1]. All on the device."""
        trailer = message[parcel.wire_bytes(self._pool.layout) :].view(torch.int64)
        self._run(parcel, blocks, expected, seed, message, trailer, gather=True)

    def scatter(
        self, parcel: ParcelName, blocks: torch.Tensor, seed: torch.Tensor, message: torch.Tensor, digest: torch.Tensor
    ) -> None:
        """Store the payload into `blocks`, and the digest of what was stored into `digest` (int64 [1])."""
        self._run(parcel, blocks, blocks, seed, message, digest, gather=False)

    def _run(
        self,
        parcel: ParcelName,
        blocks: torch.Tensor,
        expected: torch.Tensor,
        seed: torch.Tensor,
        message: torch.Tensor,
        digest: torch.Tensor,
        *,
        gather: bool,
    ) -> None:
        layout, memory = self._pool.layout, self._pool.words()
        region = source_region(parcel, layout)
        heads_first = layout.head_order == "HND"
        strides = memory.stride()
        head_stride, position_stride = (strides[4], strides[5]) if heads_first else (strides[5], strides[4])
        payload = message[: parcel.wire_bytes(layout)].view(torch.int64)
        row_words = memory.shape[-1]
        lanes = triton.next_power_of_2(row_words)
        heads = parcel.end_head - parcel.first_head
        head_lanes = triton.next_power_of_2(heads)
        run = max(1, min(TILE_WORDS // (lanes * head_lanes), triton.next_power_of_2(parcel.positions)))
        side_count = 2 * (parcel.end_layer - parcel.first_layer)
        tiles = triton.cdiv(parcel.positions, run) * side_count
        _copy[(min(self._programs, tiles),)](
            memory,
            payload,
            blocks,
            expected,
            self._pool.owner_words,
            self._scratch,
            digest,
            seed,
            len(blocks),
            parcel.wire_bytes(layout),
            parcel.first_position,
            parcel.positions,
            region.first_head,
            heads,
            side_count,
            strides[1],
            strides[3],
            head_stride,
            position_stride,
            region.group * strides[0] + region.first_layer * strides[2],
            BLOCK_SIZE=layout.block_size,
            ROW_WORDS=row_words,
            LANES=lanes,
            HEADS=head_lanes,
            POSITIONS=run,
            GATHER=gather,
            HASH=self._digests,
            num_warps=8,
        )
