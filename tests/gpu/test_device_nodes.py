"""Router, prefill node and decode node as processes on one GPU: KV comes over the lane on which the receiver reads, answers are
those that the decode node gives alone, and a prefill node may die.

The model is the folder $GPU_TEST_MODEL, or a small one of random weights.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from decant_up import Up
from router_model_folder import END_ID, write_model_folder

pytestmark = [pytest.mark.gpu, pytest.mark.sockets, pytest.mark.timeout(300)]

LIMIT_S = 60.0
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
REAL = "GPU_TEST_MODEL"
COMMON = (
    "--device=cuda",
    "--gpu-memory-utilization=0.2",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=1024",
    "--no-enable-prefix-caching",
    "--slot-bytes=4MiB",
    "--staging-bytes=64MiB",
)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    model = os.environ.get(REAL)
    options = [*COMMON, f"--model={model}"]
    if model is None:
        random = write_model_folder(folder / "model")
        (random / "config.json").write_text(json.dumps(RANDOM_WEIGHTS))
        options = [*COMMON, f"--model={random}", "--load-format=dummy"]
    cluster = Up(folder, *options)
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


def complete(up: Up, text: str, max_tokens: int = 24) -> str:
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "model": served_model(up)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.http_port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def served_model(up: Up) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{up.http_port}/v1/models", timeout=LIMIT_S) as answer:
        return str(json.load(answer)["data"][0]["id"])


def metrics_of(up: Up) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{decode_port(up)}/metrics", timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def decode_port(up: Up) -> int:
    return 7102 + 10 * (up.node_index + 1)


def test_kv_comes_over_the_lane_on_which_the_receiver_reads(up: Up) -> None:
    before = up.metric(decode_port(up), "decant_kv_transfer_bytes_total")
    assert complete(up, prompt(1000))
    assert up.metric(decode_port(up), "decant_kv_transfer_bytes_total") > before
    assert re.search(r'^decant_kv_lane_gigabytes_per_second\{lane="cuda_ipc/get"', metrics_of(up), re.MULTILINE)


def test_early_layers_leave_the_prefill_node_while_later_ones_are_computed(up: Up) -> None:
    """Of some prompt at least: a small model's step may be over before the decode node has granted a credit."""

    def early_parcels() -> float:
        return up.metric(up.prefill_http_port, "decant_kv_early_parcels_total")

    before, number = early_parcels(), 1500
    while early_parcels() == before:
        assert number < 1550, "no layer has left early in fifty prompts"
        assert complete(up, prompt(number))
        number += 1


def test_answers_of_a_pair_are_those_of_the_decode_node_alone_and_f01_a_prefill_node_may_die(up: Up) -> None:
    prompts = [prompt(number) for number in range(12)]
    paired = [complete(up, text) for text in prompts]
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(complete, up, text) for text in prompts]
        os.kill(up.children()["prefill"], signal.SIGKILL)
        harmed = [one.result() for one in asked]
    differing = [number for number, answer in enumerate(paired) if harmed[number] != answer]
    print(f"{len(prompts)} answers, differing after the kill: {differing}; one of them: {paired[0]!r}")  # noqa: T201
    assert len(differing) <= len(prompts) // 4, [(paired[number], harmed[number]) for number in differing]
    deadline_s = time.monotonic() + 2 * LIMIT_S
    while up.usable_nodes() != {"prefill", "decode"}:
        assert time.monotonic() < deadline_s, "the prefill node did not come back"
        time.sleep(0.2)
    before = up.metric(decode_port(up), "decant_kv_transfer_bytes_total")
    assert complete(up, prompt(2000))
    assert up.metric(decode_port(up), "decant_kv_transfer_bytes_total") > before


def test_graphs_are_counted(up: Up) -> None:
    complete(up, prompt(3000))
    steps = re.findall(r'^decant_graph_steps_total\{mode="(\w+)"\} (\S+)$', metrics_of(up), re.MULTILINE)
    assert float(dict(steps)["full"]) > 0, steps


def test_the_memory_of_a_gpu_is_bounded_by_the_share_that_was_given(up: Up) -> None:
    sizes = re.findall(r"KV pool: ([\d.]+) GiB in (\d+) blocks \(share ([\d.]+)", (up.folder / "log").read_text())
    assert len(sizes) >= 2, "both nodes say how large their pools are"
    assert all(float(pool) < float(share) for pool, _, share in sizes)
