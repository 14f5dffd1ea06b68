"""Router, prefill node and decode node as processes on one GPU: KV comes over the lane on which the receiver reads, answers are
those that the decode node gives alone, and a prefill node may die.
"""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from decant_up import Up
from device_pair import LIMIT_S, device_pair, greedy_choice, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.sockets, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with device_pair(tmp_path_factory.mktemp("up")) as cluster:
        yield cluster


def complete(up: Up, text: str, max_tokens: int = 24) -> str:
    return str(greedy_choice(up, text, max_tokens=max_tokens)["text"])


def metrics_of(up: Up) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{up.decode_http_port}/metrics", timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def test_kv_comes_over_the_lane_on_which_the_receiver_reads(up: Up) -> None:
    before = up.metric(up.decode_http_port, "decant_kv_transfer_bytes_total")
    assert complete(up, prompt(1000))
    assert up.metric(up.decode_http_port, "decant_kv_transfer_bytes_total") > before
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
    before = up.metric(up.decode_http_port, "decant_kv_transfer_bytes_total")
    assert complete(up, prompt(2000))
    assert up.metric(up.decode_http_port, "decant_kv_transfer_bytes_total") > before


def test_graphs_are_counted(up: Up) -> None:
    complete(up, prompt(3000))
    steps = re.findall(r'^decant_graph_steps_total\{mode="(\w+)"\} (\S+)$', metrics_of(up), re.MULTILINE)
    assert float(dict(steps)["full"]) > 0, steps


def test_the_memory_of_a_gpu_is_bounded_by_the_share_that_was_given(up: Up) -> None:
    sizes = re.findall(r"KV pool: ([\d.]+) GiB in (\d+) blocks \(share ([\d.]+)", (up.folder / "log").read_text())
    assert len(sizes) >= 2, "both nodes say how large their pools are"
    assert all(float(pool) < float(share) for pool, _, share in sizes)
