"""Blocks that a step copies on the device, for choices that share a prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv_cache.device_storage import DeviceKvStorage
from foundation.kv_layout import KvLayout

pytestmark = pytest.mark.gpu


def test_copied_blocks_hold_what_their_sources_hold_and_no_other_block_changes() -> None:
    layout = KvLayout(6, 2, 64, "bfloat16", 16, "HND", 3)
    storage = DeviceKvStorage(layout, 8, torch.device("cuda"))
    storage.memory.normal_()
    before = storage.memory.clone()
    storage.copy_blocks(np.array([[1, 4], [1, 6], [2, 5]], np.int64))
    torch.cuda.synchronize()
    expected = before.clone()
    expected[:, [4, 6, 5]] = before[:, [1, 1, 2]]
    assert torch.equal(storage.memory, expected)
