"""With --batch-invariant a pair on one GPU answers bit by bit what it answers to each request alone, also where KV that a killed
prefill node owed is recomputed by the decode node.

The model is the folder $GPU_TEST_MODEL, or a small one of random weights.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from decant_up import Up
from router_model_folder import write_model_folder
from test_device_nodes import COMMON, LIMIT_S, RANDOM_WEIGHTS, REAL, decode_port, prompt, served_model

pytestmark = [pytest.mark.gpu, pytest.mark.sockets, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    model = os.environ.get(REAL)
    options = [*COMMON, "--batch-invariant", f"--model={model}"]
    if model is None:
        random = write_model_folder(folder / "model")
        (random / "config.json").write_text(json.dumps(RANDOM_WEIGHTS))
        options = [*COMMON, "--batch-invariant", f"--model={random}", "--load-format=dummy"]
    cluster = Up(folder, *options)
    try:
        cluster.await_ready()
        yield cluster
    finally:
        cluster.process.send_signal(signal.SIGINT)
        cluster.process.wait(LIMIT_S)


def choice(up: Up, text: str) -> dict[str, Any]:
    """Text and log probabilities."""
    body = {"prompt": text, "max_tokens": 48, "temperature": 0, "logprobs": 5, "model": served_model(up)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.http_port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.load(answer)["choices"][0]
    return found


def test_answers_are_equal_in_every_bit_one_by_one_together_and_f01_after_a_kill(up: Up) -> None:
    prompts = [prompt(number) for number in range(12)]
    before = up.metric(decode_port(up), "decant_kv_transfer_bytes_total")
    alone = [choice(up, text) for text in prompts]
    assert up.metric(decode_port(up), "decant_kv_transfer_bytes_total") > before
    assert all(answer["logprobs"]["token_logprobs"] for answer in alone)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda text: choice(up, text), prompts))
        assert together == alone
        asked = [pool.submit(choice, up, text) for text in prompts]
        os.kill(up.children()["prefill"], signal.SIGKILL)
        assert [one.result() for one in asked] == alone
