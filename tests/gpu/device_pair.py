"""Router, prefill node and decode node as processes on one GPU, and what is asked of them.

The model is the folder $GPU_TEST_MODEL, or a small one of random weights.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decant_up import Up
from router_model_folder import END_ID, write_model_folder

LIMIT_S = 60.0
REAL = "GPU_TEST_MODEL"
RANDOM_WEIGHTS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": END_ID + 1,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": END_ID,
    "dtype": "bfloat16",
}
COMMON = (
    "--device=cuda",
    "--gpu-memory-utilization=0.2",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=1024",
    "--no-enable-prefix-caching",
    "--slot-bytes=4MiB",
    "--staging-bytes=64MiB",
)


@contextmanager
def device_pair(folder: Path, *options: str) -> Iterator[Up]:
    """Ready, with these options beside the common ones; it ends with the block."""
    model = os.environ.get(REAL)
    load = [f"--model={model}"]
    if model is None:
        random = write_model_folder(folder / "model")
        (random / "config.json").write_text(json.dumps(RANDOM_WEIGHTS))
        load = [f"--model={random}", "--load-format=dummy"]
    cluster = Up(folder, *COMMON, *load, *options)
    try:
        cluster.await_ready()
        yield cluster
    finally:
        cluster.process.send_signal(signal.SIGINT)
        cluster.process.wait(LIMIT_S)


def prompt(number: int) -> str:
    """About 400 tokens of a real model, 1,500 bytes, no two alike in their first block."""
    text = f"Case {number}. The committee met on the {number + 2}th day to hear the harbour master. "
    return text + "It rained, and the ferries were late; nobody in the hall was surprised by either. " * 18


def greedy_choice(up: Up, text: str, **asked: int) -> dict[str, Any]:
    """The one choice of a completion, as the API tells it; `asked` are more of its fields."""
    body = {"prompt": text, "temperature": 0, "model": _served_model(up), **asked}
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.http_port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice


def _served_model(up: Up) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{up.http_port}/v1/models", timeout=LIMIT_S) as answer:
        return str(json.load(answer)["data"][0]["id"])
