"""Gather and scatter between a GPU's KV pool and slots in its memory, with digest and owner check in the same pass.

    gather:  pool blocks -> registers -> slot, and their digest behind them     (poisoned if a block has changed owner)
    scatter: slot -> registers -> pool blocks, and the digest of those registers (for the host to compare with the message's)

On the wire a parcel is [layer, 2 (K, V), position, head, dim]; in the pool positions lie in blocks and heads before or behind
them. A thread block takes a run of positions of one layer and side: contiguous on the wire, and as long a run in the pool.
Copies run on whatever stream is current, or where `device_launches` launches them, on at most `programs` thread blocks, so that
the engine's steps beside them keep theirs. A scatter stores what it hashes before the host has compared: the blocks belong to the
transfer until it commits, so nobody reads what a refused parcel left there.

A kernel is compiled for a pool and a number of heads alone, so that no shape of a request adds one, and is launched by addresses:
bound as Triton binds arguments, a parcel cost the host 65 microseconds, four times what it costs the GPU.

Owner words lie in host memory that the device reads, and never repeat: one look after the bytes were read proves that nobody
else had the block before either.

Must not know: models, engines, sessions, the protocol's states.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foundation.kv_layout import KvLayout
from kv_transfer.device_digest import FIRST_MULTIPLIER, GOLDEN, SECOND_MULTIPLIER
from kv_transfer.device_launches import Launch
from kv_transfer.device_places import WORD_BYTES, ParcelPlace
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.triton_launch import TritonLaunch, triton_launch

ALIGNED_BYTES = 16
"""What a thread loads at once."""
TILE_WORDS = 4096
PROGRAMS = 264
"""Two on each multiprocessor of an H200. Fewer (33 to 132) cost decode steps beside them no less."""

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST_MULTIPLIER = tl.constexpr(FIRST_MULTIPLIER)
_SECOND_MULTIPLIER = tl.constexpr(SECOND_MULTIPLIER)
_POISON = tl.constexpr((1 << 64) - 1)
_OWNERS_TILE = tl.constexpr(256)
_NEVER_SPECIAL = (
    "count",
    "payload_bytes",
    "first_position",
    "positions",
    "first_head",
    "heads",
    "side_count",
)
"""By default Triton compiles once more for an argument that is 1, or divisible by 16."""
_NEVER_ALIGNED = ("blocks", "expected", "outcome", "seed_pointer")


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
        assert self.layout.head_bytes % ALIGNED_BYTES == 0, f"heads of {self.layout.head_bytes} bytes"
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
def _blocks_of(blocks, tile, first_position, positions, runs, BLOCK_SIZE: tl.constexpr, POSITIONS: tl.constexpr):
    """Where a tile's positions lie. `blocks` may be the host's memory, a microsecond away: loaded one tile ahead, that does not
    show."""
    step = (tile % runs) * POSITIONS + tl.arange(0, POSITIONS)
    place = (first_position + step) // BLOCK_SIZE - first_position // BLOCK_SIZE
    return tl.load(blocks + place, mask=step < positions, other=0).to(tl.int64)


@triton.jit(do_not_specialize=_NEVER_SPECIAL, do_not_specialize_on_alignment=_NEVER_ALIGNED)
def _copy(
    pool,
    wire,
    blocks,
    expected,
    owner_words,
    scratch,
    outcome,
    seed_pointer,
    count,
    payload_bytes,
    first_position,
    positions,
    first_head,
    heads,
    side_count,
    BLOCK_STRIDE: tl.constexpr,
    SIDE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    GATHER: tl.constexpr,
    HASH: tl.constexpr,
):
    """Tiles of POSITIONS positions, all wanted heads, of one layer and side; sides are counted K, V, K, V ... over the layers.

    `outcome` [2]: the digest, and what the message's trailer says (gather: the digest, poisoned if a block was not owned).
    """
    seed = tl.load(seed_pointer).to(tl.uint64, bitcast=True)
    runs = tl.cdiv(positions, POSITIONS)
    following = _blocks_of(blocks, tl.program_id(0), first_position, positions, runs, BLOCK_SIZE, POSITIONS)
    lane = tl.arange(0, LANES)[None, None, :]
    head = tl.arange(0, HEADS)[None, :, None]
    sums = tl.zeros((POSITIONS, HEADS, LANES), tl.uint64)
    for tile in range(tl.program_id(0), runs * side_count, tl.num_programs(0)):
        side = tile // runs
        step = (tile % runs) * POSITIONS + tl.arange(0, POSITIONS)
        inside = (step < positions)[:, None, None] & (head < heads) & (lane < ROW_WORDS)
        position = first_position + step
        block = following
        following = _blocks_of(
            blocks, tile + tl.num_programs(0), first_position, positions, runs, BLOCK_SIZE, POSITIONS
        )
        cell = block * BLOCK_STRIDE + side.to(tl.int64) * SIDE_STRIDE + (position % BLOCK_SIZE) * POSITION_STRIDE
        pool_place = pool + cell[:, None, None] + (first_head + head) * HEAD_STRIDE + lane
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
            trailer = wire + payload_bytes // 8
            tl.store(outcome, value.to(tl.int64, bitcast=True))
            if GATHER:
                owned = _all_owned(blocks, expected, owner_words, count, _OWNERS_TILE)
                value = tl.where(owned, value, value ^ _POISON)
                tl.store(trailer, value.to(tl.int64, bitcast=True))
                tl.store(outcome + 1, value.to(tl.int64, bitcast=True))
            else:
                tl.store(outcome + 1, tl.load(trailer))


class _Kernel(NamedTuple):
    """For one number of heads. Those that round up to the same power of two are compiled once."""

    compiled: Any
    constants: tuple[int | bool, ...]
    tile_positions: int
    launch: TritonLaunch


class DeviceCopier:
    """Gathers and scatters over one pool, on the current stream or as launches for another; its scratch memory serves one."""

    def __init__(self, pool: DevicePool, programs: int = PROGRAMS, *, digests: bool = True) -> None:
        """`digests` False is for measuring what they cost."""
        self._pool = pool
        self._programs = programs
        self._digests = digests
        words = pool.words()
        self._start = words.data_ptr()
        self._owner_words = pool.owner_words.data_ptr()
        self._strides = words.stride()
        heads_first = pool.layout.head_order == "HND"
        place = self._strides[4:6] if heads_first else self._strides[5:3:-1]
        self._shape = (self._strides[1], self._strides[3], *place, pool.layout.block_size, words.shape[-1])
        self._scratch = torch.zeros(4, dtype=torch.int64, device=pool.memory.device)
        self._scratch_start = self._scratch.data_ptr()
        self._kernels: dict[tuple[bool, int], _Kernel] = {}

    def gather(
        self,
        parcel: ParcelName,
        blocks: torch.Tensor,
        expected: torch.Tensor,
        seed: torch.Tensor,
        message: torch.Tensor,
        outcome: torch.Tensor | None = None,
    ) -> None:
        """Fill `message` (uint8, payload and digest) from `blocks` (int32, those that cover the parcel's positions), which
        should have the owner words `expected` (int64, as many). `seed`: int64 [1]; `outcome`: int64 [2], where the digest goes,
        and once more as it stands in the message."""
        told = self._scratch[2:] if outcome is None else outcome
        self.run(parcel, _place(message, blocks, expected, seed, told), gather=True)

    def scatter(
        self, parcel: ParcelName, blocks: torch.Tensor, seed: torch.Tensor, message: torch.Tensor, outcome: torch.Tensor
    ) -> None:
        """Store the payload into `blocks`. `outcome` (int64 [2]): the digest of what was stored, and what the message says."""
        self.run(parcel, _place(message, blocks, blocks, seed, outcome), gather=False)

    def run(self, parcel: ParcelName, place: ParcelPlace, *, gather: bool) -> None:
        kernel, programs, arguments = self._call(parcel, place, gather)
        kernel.compiled[(programs, 1, 1)](*arguments, *kernel.constants)

    def launch(self, parcel: ParcelName, place: ParcelPlace, *, gather: bool) -> Launch:
        """What `run` would launch."""
        kernel, programs, arguments = self._call(parcel, place, gather)
        return kernel.launch.over(programs, *arguments)

    def _call(self, parcel: ParcelName, place: ParcelPlace, gather: bool) -> tuple[_Kernel, int, tuple[int, ...]]:
        """The kernel, its thread blocks, and its arguments without the constants."""
        assert place.message % ALIGNED_BYTES == 0, f"a message at {place.message:#x}"
        layout = self._pool.layout
        group, first_layer = divmod(parcel.first_layer, layout.layer_group)
        layers = parcel.end_layer - parcel.first_layer
        assert first_layer + layers <= layout.layer_group, f"{parcel} straddles a layer group"
        heads = parcel.end_head - parcel.first_head
        kernel = self._kernels.get((gather, heads)) or self._compiled(gather, heads)
        programs = min(self._programs, -(-parcel.positions // kernel.tile_positions) * 2 * layers)
        start = group * self._strides[0] + first_layer * self._strides[2]
        arguments = (
            self._start + start * WORD_BYTES,
            place.message,
            place.blocks,
            place.expected,
            self._owner_words,
            self._scratch_start,
            place.outcome,
            place.seed,
            place.block_count,
            parcel.wire_bytes(layout),
            parcel.first_position,
            parcel.positions,
            parcel.first_head,
            heads,
            2 * layers,
        )
        return kernel, max(1, programs), arguments

    def compile(self, heads: int) -> None:
        """Both kernels for parcels of so many heads, loaded, so that no transfer waits for a compiler. Raises SetupError where
        this Triton is not known."""
        self._compiled(True, heads)
        self._compiled(False, heads)

    def _compiled(self, gather: bool, heads: int) -> _Kernel:
        """For a pool and a message at multiples of 16, as the tensors that stand for them here are."""
        lanes = triton.next_power_of_2(self._shape[-1])
        head_lanes = triton.next_power_of_2(heads)
        tile_positions = max(1, TILE_WORDS // (lanes * head_lanes))
        constants = (*self._shape, lanes, head_lanes, tile_positions, gather, self._digests)
        words, owners, scratch = self._pool.words(), self._pool.owner_words, self._scratch
        blocks = scratch.view(torch.int32)
        pointers = (words, scratch, blocks, scratch, owners, scratch, scratch[1:], scratch[1:])
        compiled = _copy.warmup(*pointers, *(16,) * len(_NEVER_SPECIAL), *constants, grid=(1,), num_warps=8)
        launch = triton_launch(compiled, ctypes.CDLL("libcuda.so.1"))
        kernel = self._kernels[gather, heads] = _Kernel(compiled, constants, tile_positions, launch)
        return kernel


def _place(
    message: torch.Tensor, blocks: torch.Tensor, expected: torch.Tensor, seed: torch.Tensor, outcome: torch.Tensor
) -> ParcelPlace:
    return ParcelPlace(
        message.data_ptr(), blocks.data_ptr(), expected.data_ptr(), seed.data_ptr(), outcome.data_ptr(), len(blocks)
    )
