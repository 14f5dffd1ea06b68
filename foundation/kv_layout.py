"""How KV bytes lie in a node's pool, and how a parcel of them lies on the wire.

A pool shard (one tensor-parallel rank of one pipeline stage) is one array of shape

    [layers / layer_group, blocks, layer_group, 2 (K, V), *inner]

with `inner` = [block_size, kv_heads, head_dim] for head order NHD, [kv_heads, block_size, head_dim] for HND.
With layer_group == layers a block's bytes are one contiguous run ("block-major").

On the wire a parcel is always [layer, 2 (K, V), token, head, head_dim]: independent of either side's blocks, order and shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HeadOrder = Literal["NHD", "HND"]
KvDtype = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV layout of a whole model on one node, and how it is cut into shards.

    Ranks of tensor parallelism split `kv_heads`; when there are more ranks than heads, heads are replicated
    (rank r holds head r * kv_heads // tensor_parallel). Pipeline stages split `layers` as evenly as possible,
    earlier stages taking the remainder.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_size: int
    head_order: HeadOrder = "NHD"
    layer_group: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's K (or V) at one position in one layer."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V at one position over all layers and heads (unreplicated)."""
        return 2 * self.layers * self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size
