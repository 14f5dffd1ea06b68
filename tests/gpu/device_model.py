"""The small model of random weights on which tests try the engine of a GPU, and decode steps of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from step_plans import batch_plan, greedy_rows

from engine.build import BuildOptions
from engine.build_device import DeviceEngineParts, build_device_engine
from engine.step import StepPlan

DEVICE = torch.device("cuda")
BLOCK_SIZE, BLOCKS, VOCABULARY, LAYERS, POSITIONS = 16, 200, 1003, 4, 1024
WEIGHTS_SEED = 3


def write_config(folder: Path, **changes: int) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": [VOCABULARY - 1],
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


def build(folder: Path, positions: int = POSITIONS, **options: int | float) -> DeviceEngineParts:
    """An engine of the model for contexts of so many positions; its configuration is written into `folder`."""
    write_config(folder, max_position_embeddings=positions)
    chosen: dict[str, int | float] = {"num_blocks": BLOCKS, "max_num_seqs": 24, "kv_layer_group": 2} | options
    asked = BuildOptions(folder, "dummy", seed=WEIGHTS_SEED, block_size=BLOCK_SIZE, **chosen)  # type: ignore[arg-type]
    return build_device_engine(asked, DEVICE)


def decodes(number: int, first: int, rows: int, fed: bool) -> StepPlan:
    """A step of `rows` single tokens at position `first`, greedy and drawn ones; `fed`: each follows its row's last sample."""
    made = [([7 * row], first, list(range(row * 8, row * 8 + 8))) for row in range(rows)]
    sampling = replace(
        greedy_rows(rows, [first + 1] * rows),
        temperature=np.linspace(0, 1, rows, dtype=np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        top_k=np.array([0, 20] * (rows // 2), np.int32),
    )
    return batch_plan(number, made, BLOCK_SIZE, feedback=list(range(rows)) if fed else (), sampling=sampling)
