"""The toy model's arithmetic, without torch: what its KV is, how it lies in a pool, and which logits follow from it.

Every element of a token's KV is a hash of (token id, position, layer, K or V, head, element). The next token's logits are a hash
of all the KV bytes of the context. So a block, position, head, layer or byte that is not what a request's own tokens would
have written changes the text, while a correct engine gives `toy_logits`.

Must not know: plans, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kv_cache.storage import KvStorage, PoolShard
from foundation.kv_layout import DTYPE_BYTES, KvLayout

UInt64 = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOGIT_RANGE = 8.0
WORDS = {4: np.uint32, 2: np.uint16}


def _mix(z: UInt64) -> UInt64:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def toy_kv(token_ids: npt.ArrayLike, positions: npt.ArrayLike, layout: KvLayout) -> npt.NDArray[Any]:
    """[T, layers, 2, kv_heads, head_dim] unsigned words of the KV dtype's width."""
    tokens = np.asarray(token_ids, np.int64).astype(np.uint64)
    places = np.asarray(positions, np.int64).astype(np.uint64)
    keys = _mix(_mix(tokens + GOLDEN) ^ places)
    shape = (layout.layers, 2, layout.kv_heads, layout.head_dim)
    elements = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * GOLDEN
    words = _mix(keys[:, None] + elements) >> np.uint64(17)
    return words.astype(WORDS[DTYPE_BYTES[layout.dtype]]).reshape(len(keys), *shape)


def toy_logits_of_kv(kv: npt.NDArray[Any], vocabulary_size: int) -> npt.NDArray[np.float32]:
    """Logits [vocabulary_size] after a context whose KV is [positions, layers, 2, kv_heads, head_dim]."""
    words = kv.reshape(len(kv), -1).astype(np.uint64)
    places = _mix(np.arange(1, len(kv) + 1, dtype=np.uint64) * GOLDEN)
    elements = np.arange(words.shape[1], dtype=np.uint64) << np.uint64(33)
    state = _mix(words + elements + places[:, None]).sum(dtype=np.uint64)
    bits = _mix(state + np.arange(1, vocabulary_size + 1, dtype=np.uint64) * GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(LOGIT_RANGE / (1 << 24))


def toy_logits(token_ids: Sequence[int], layout: KvLayout, vocabulary_size: int) -> npt.NDArray[np.float32]:
    """The oracle: logits after `token_ids`, without any pool."""
    return toy_logits_of_kv(toy_kv(token_ids, np.arange(len(token_ids)), layout), vocabulary_size)


def toy_greedy(token_ids: Sequence[int], count: int, layout: KvLayout, vocabulary_size: int) -> list[int]:
    """The oracle's next `count` tokens; end-of-sequence tokens do not stop it."""
    history = list(token_ids)
    for _ in range(count):
        history.append(int(toy_logits(history, layout, vocabulary_size).argmax()))
    return history[len(token_ids) :]


class ToyPool:
    """A pool's bytes as the toy model's KV words."""

    def __init__(self, storage: KvStorage) -> None:
        self._layout = storage.layout
        self._shards = [_ShardWords(shard, storage.layout) for shard in storage.shards]

    def write(self, kv: npt.NDArray[Any], slot_mapping: npt.NDArray[np.int64]) -> None:
        """Store `kv` [T, layers, 2, kv_heads, head_dim] at these places (block id * block_size + offset)."""
        for shard in self._shards:
            shard.write(kv, *np.divmod(slot_mapping, self._layout.block_size))

    def read(self, blocks: npt.NDArray[np.int32], positions: int) -> npt.NDArray[Any]:
        """[positions, layers, 2, kv_heads, head_dim] of the context whose block table begins with `blocks`."""
        layout = self._layout
        blocks = blocks[: -(-positions // layout.block_size)]
        shape = (len(blocks) * layout.block_size, layout.layers, 2, layout.kv_heads, layout.head_dim)
        kv = np.zeros(shape, WORDS[DTYPE_BYTES[layout.dtype]])
        for shard in self._shards:
            shard.read(kv, blocks)
        return kv[:positions]


class _ShardWords:
    """One shard as words [groups, blocks, layer_group, 2, heads, block_size, head_dim], whatever its head order."""

    def __init__(self, shard: PoolShard, layout: KvLayout) -> None:
        words = shard.memory.view(WORDS[DTYPE_BYTES[layout.dtype]])
        self._words = words if layout.head_order == "HND" else words.swapaxes(4, 5)
        self._layers = slice(shard.first_layer, shard.end_layer)
        self._heads = slice(shard.first_head, shard.end_head)

    def write(self, kv: npt.NDArray[Any], blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
        groups, _, layer_group, *_ = self._words.shape
        part = kv[:, self._layers, :, self._heads]
        part = part.reshape(len(kv), groups, layer_group, *part.shape[2:])
        self._words[:, blocks, :, :, :, offsets] = part

    def read(self, kv: npt.NDArray[Any], blocks: npt.NDArray[np.int32]) -> None:
        """Fill this shard's share of `kv` [positions, layers, 2, kv_heads, head_dim]."""
        groups, _, layer_group, _, heads, block_size, head_dim = self._words.shape
        cells = self._words[:, blocks].transpose(1, 5, 0, 2, 3, 4, 6)
        shape = (len(blocks) * block_size, groups * layer_group, 2, heads, head_dim)
        kv[:, self._layers, :, self._heads] = cells.reshape(shape)
