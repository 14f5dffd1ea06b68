"""What is measured, by the size of the machine: the model's shape, the nodes' settings, the loads.

`8b` is Llama-3-8B's shape in bfloat16 for large GPUs; `small` runs the same code anywhere, and its figures mean nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.gpu.shape import CONFIG
from bench.serving.hand_over import HandOverPlan
from bench.serving.landing import LandingPlan
from bench.serving.workload import ConversationLengths, FixedLengths, Lengths, Shape

END_OF_TEXT = "<|end|>"

SMALL_CONFIG: dict[str, Any] = CONFIG | {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": [2047],
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Workload:
    lengths: Lengths
    rates: tuple[float, ...]
    """Requests a second that are offered to both arrangements for each pair of devices."""


@dataclass(frozen=True, slots=True)
class Size:
    config: dict[str, Any]
    shared_options: tuple[str, ...]
    prefill_options: tuple[str, ...]
    decode_options: tuple[str, ...]
    hand_over: HandOverPlan
    landing: LandingPlan
    workloads: tuple[Workload, ...]
    harm_rate: float
    harm_shape: Shape
    warm_s: float
    windows_s: tuple[float, float]
    """Shortest and longest window of one seed at one rate."""
    link_mib: int
    link_slots_mib: tuple[int, ...]
    start_limit_s: float


SIZES = {
    "8b": Size(
        config=CONFIG,
        shared_options=(
            *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "8192"),
            *("--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", "40GiB"),
        ),
        prefill_options=("--enable-prefix-caching", "--max-num-seqs", "32"),
        decode_options=("--no-enable-prefix-caching", "--max-num-seqs", "256"),
        hand_over=HandOverPlan(prompt_tokens=2048, prompts=16),
        landing=LandingPlan(
            streams=65,
            prompt_tokens=2048,
            output_tokens=2600,
            phase_s=2.5,
            landings_at_once=8,
            landings_a_second=10.0,
        ),
        workloads=(
            Workload(FixedLengths(Shape(2048, 256)), (10.0, 15.0, 19.0, 24.0)),
            Workload(ConversationLengths(), (16.0, 28.0, 38.0)),
        ),
        harm_rate=8.0,
        harm_shape=Shape(2048, 256),
        warm_s=2.0,
        windows_s=(3.0, 8.0),
        link_mib=1024,
        link_slots_mib=(16, 32, 64, 128),
        start_limit_s=150.0,
    ),
    "small": Size(
        config=SMALL_CONFIG,
        shared_options=(
            *("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "2048"),
            *("--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "64MiB"),
            *("--staging-bytes", "16MiB", "--slot-bytes", "1MiB"),
        ),
        prefill_options=("--enable-prefix-caching", "--max-num-seqs", "8"),
        decode_options=("--no-enable-prefix-caching", "--max-num-seqs", "16"),
        hand_over=HandOverPlan(prompt_tokens=128, prompts=3),
        landing=LandingPlan(
            streams=4, prompt_tokens=64, output_tokens=1900, phase_s=1.0, landings_at_once=2, landings_a_second=5.0
        ),
        workloads=(
            Workload(FixedLengths(Shape(64, 16)), (1.0, 2.0)),
            Workload(ConversationLengths(scale=0.1), (1.0, 2.0)),
        ),
        harm_rate=3.0,
        harm_shape=Shape(128, 64),
        warm_s=0.5,
        windows_s=(1.0, 2.0),
        link_mib=64,
        link_slots_mib=(1, 4),
        start_limit_s=120.0,
    ),
}


def write_model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """config.json, and a tokenizer of as many tokens: 256 bytes, words that no text becomes, and the end of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{index}" for index in range(config["vocab_size"] - len(symbols) - 1)]
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    assert tokenizer.get_vocab_size() == config["vocab_size"], "the tokenizer and the model disagree"
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
