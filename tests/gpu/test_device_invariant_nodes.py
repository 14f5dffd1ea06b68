"""With --batch-invariant a pair on one GPU answers bit by bit what it answers to each request alone, also where KV that a killed
prefill node owed is recomputed by the decode node.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from decant_up import Up
from device_pair import device_pair, greedy_choice, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.sockets, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with device_pair(tmp_path_factory.mktemp("up"), "--batch-invariant") as cluster:
        yield cluster


def choice(up: Up, text: str) -> dict[str, Any]:
    """Text and log probabilities."""
    return greedy_choice(up, text, max_tokens=48, logprobs=5)


def test_answers_are_equal_in_every_bit_one_by_one_together_and_f01_after_a_kill(up: Up) -> None:
    prompts = [prompt(number) for number in range(12)]
    before = up.metric(up.decode_http_port, "decant_kv_transfer_bytes_total")
    alone = [choice(up, text) for text in prompts]
    assert up.metric(up.decode_http_port, "decant_kv_transfer_bytes_total") > before
    assert all(answer["logprobs"]["token_logprobs"] for answer in alone)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda text: choice(up, text), prompts))
        assert together == alone
        asked = [pool.submit(choice, up, text) for text in prompts]
        os.kill(up.children()["prefill"], signal.SIGKILL)
        assert [one.result() for one in asked] == alone
