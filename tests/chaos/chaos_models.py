"""The models that chaos runs serve, and what their unharmed answers may differ by.

`toy`: the next token is a hash of the KV bytes, so nothing may differ. `random`: a Llama of 4 layers with random weights.
`real`: the default model. Both in float32, and their answers are equal up to a near-tie: `margin` computes, for a position
at which two answers part, how far the two best scores were apart, teacher-forced over the whole history.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder

RANDOM_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": TOY_VOCABULARY_SIZE,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": TOY_VOCABULARY_SIZE - 1,
}


@dataclass(frozen=True)
class ServedModel:
    """`prompt_tokens`, `answer_tokens`: shortest and longest. `slot_bytes`: so that a prompt makes several parcels."""

    kind: str
    folder: Path
    options: tuple[str, ...]
    vocabulary: int
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    slot_bytes: int

    @property
    def exact(self) -> bool:
        return self.kind == "toy"

    def margin(self, history: Sequence[int], temperature: float, seed: int) -> float:
        """Distance of the two best scores of the token after `history`."""
        from engine.sampling.reference import Row, draw

        assert not self.exact, "the toy has no near-ties"
        logits = _last_logits(self, tuple(history))
        _, margin = draw(logits, Row(temperature=temperature, seed=seed, position=len(history)))
        return margin if math.isfinite(margin) else 1e9


def served_model(kind: str, folder: Path) -> ServedModel:
    match kind:
        case "toy":
            return ServedModel("toy", write_toy_folder(folder / "toy"), (), 256, (60, 400), (24, 96), 4096)
        case "random":
            model = write_toy_folder(folder / "random")  # for its tokenizer
            (model / "config.json").write_text(json.dumps(RANDOM_CONFIG, indent=2))
            options = ("--load-format=dummy", "--dtype=float32")
            return ServedModel("random", model, options, 256, (60, 400), (24, 96), 64 * 1024)
        case "real":
            from decant.default_model import ensure_default_model

            options = ("--dtype=float32", "--max-model-len=1024")
            return ServedModel("real", ensure_default_model(), options, 49152, (40, 160), (12, 32), 1 << 20)
    raise ValueError(f"no model {kind!r}: toy, random or real")


@functools.cache
def _decoder(kind: str, folder: Path) -> Any:
    import torch

    from engine.model.config import read_model_config
    from engine.model.loader import DummyTensors, FolderTensors, build_decoder

    config = read_model_config(folder)
    source = FolderTensors(folder) if kind == "real" else DummyTensors(config, 0)
    return build_decoder(config, source, torch.float32, torch.device("cpu"), 2048)


def _last_logits(model: ServedModel, history: tuple[int, ...]) -> list[float]:
    import torch
    from step_plans import batch_plan

    from engine.attention.paged import PagedAttention
    from engine.executor.inputs import step_inputs
    from engine.kv_cache.storage import KvStorage
    from foundation.kv_layout import KvLayout

    with torch.inference_mode():
        decoder = _decoder(model.kind, model.folder)
        config = decoder.config
        blocks = -(-len(history) // 16)
        layout = KvLayout(config.layers, config.kv_heads, config.head_dim, "float32", 16, "HND", config.layers)
        attention = PagedAttention(KvStorage(layout, blocks), config.heads, torch.float32)
        plan = batch_plan(0, [(list(history), 0, list(range(blocks)))], 16)
        inputs = step_inputs(plan, None, torch.device("cpu"))
        logits = decoder.forward(inputs.token_ids, inputs.positions, attention.prepare(plan), None)
        return [float(value) for value in logits[-1]]
