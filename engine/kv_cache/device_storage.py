"""The KV pool's memory on a GPU: one allocation in the shape of `foundation.kv_layout`, and an owner word for each block.

The last block is nobody's: padded rows of a captured graph write there. The block pool does not know of it.

Owner words lie in pinned host memory that kernels read through the bus. The pool writes a new owner's word when it hands a block
out, which is before any step that overwrites the block can be launched; so a gather that reads words after the bytes can
miss no change, and no step has to carry words to the device.

Must not know: requests, which blocks are free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from foundation.errors import ConfigurationError
from foundation.kv_layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceKvStorage:
    """One shard: tensor or pipeline parallel layouts need a device for each."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        for setting, parts in (
            ("--tensor-parallel-size", layout.tensor_parallel),
            ("--pipeline-parallel-size", layout.pipeline_parallel),
        ):
            if parts != 1:
                raise ConfigurationError(setting, f"is {parts}; one GPU holds one shard of the KV pool")
        if layout.layers % layout.layer_group:
            raise ConfigurationError(
                "--kv-layer-group", f"is {layout.layer_group}; it must divide the model's {layout.layers} layers"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.dummy_block = num_blocks
        inner = (layout.kv_heads, layout.block_size)
        self.memory = torch.zeros(
            layout.layers // layout.layer_group,
            num_blocks + 1,
            layout.layer_group,
            2,
            *(inner if layout.head_order == "HND" else inner[::-1]),
            layout.head_dim,
            dtype=TORCH_DTYPES[layout.dtype],
            device=device,
        )
        words = torch.zeros(num_blocks, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device_owner_words = words
        """[num_blocks] int64: the same bits as `owner_words`, for kernels."""
        self.owner_words: npt.NDArray[np.uint64] = words.numpy().view(np.uint64)

    def copy_blocks(self, copies: npt.NDArray[np.int64]) -> None:
        """All KV of the blocks in the first column of `copies` [C, 2] into those of the second; the host does not wait."""
        blocks = torch.from_numpy(copies).pin_memory().to(self.memory.device, non_blocking=True)
        self.memory[:, blocks[:, 1]] = self.memory[:, blocks[:, 0]]

    def layer(self, layer: int) -> torch.Tensor:
        """[blocks + 1, 2 (K, V), *inner, head_dim] view of one layer."""
        group, in_group = divmod(layer, self.layout.layer_group)
        return self.memory[group, :, in_group]

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes
