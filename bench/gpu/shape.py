"""The model that is measured: Llama-3-8B's shape with random weights in bfloat16, made on the device."""

from __future__ import annotations

import json
from pathlib import Path

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 32, 8, 128, 128_256
KV_BYTES_A_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
LINEAR_PARAMETERS = LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HIDDEN * HEADS * HEAD_DIM + 3 * HIDDEN * FFN)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 40_960,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [VOCABULARY - 1],
    "dtype": "bfloat16",
}


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
