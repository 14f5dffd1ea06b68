"""How long KV that a prefill node already holds takes to a decode node: Decant from Ask to commit, vLLM's NIXL post + transfer.

Prefill keeps its prefix cache and decode has none, so that the second request for a prompt moves all of it and computes none.
Seconds and bytes are what the decode side's own metrics gained. Decant's figure spans more (queue, reservation, digests,
commit), vLLM's only its NIXL calls; Decant moves the prompt's tokens, vLLM whole blocks of 128.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from bench.streams import run_streams

SETTLE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class TransferMetrics:
    """Names of a decode side's counters; several `seconds` are added up."""

    seconds: tuple[str, ...]
    count: str
    payload_bytes: str


DECANT = TransferMetrics(
    ("decant_kv_transfer_seconds_sum",), "decant_kv_transfer_seconds_count", "decant_kv_transfer_bytes_total"
)
VLLM = TransferMetrics(
    ("vllm:nixl_xfer_time_seconds_sum", "vllm:nixl_post_time_seconds_sum"),
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:nixl_bytes_transferred_sum",
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One prompt's."""

    seconds: float
    payload_bytes: int


def measure_transfers(
    url: str, decode_url: str, metrics: TransferMetrics, prompts: Sequence[Sequence[int]]
) -> list[Transfer]:
    """Each prompt once to have it computed, once more to have it moved."""
    transfers = []
    for prompt in prompts:
        computed = _answer(url, decode_url, metrics, prompt, _read(decode_url, metrics))
        moved = _answer(url, decode_url, metrics, prompt, computed)
        transfers.append(Transfer(moved[0] - computed[0], round(moved[2] - computed[2])))
    return transfers


def in_words(transfers: Sequence[Transfer]) -> str:
    seconds = statistics.median(transfer.seconds for transfer in transfers)
    moved = statistics.median(transfer.payload_bytes for transfer in transfers)
    return f"{1000 * seconds:.1f} ms for {moved / 2**20:.1f} MiB ({moved / seconds / 1e9:.2f} GB/s)"


def _answer(
    url: str, decode_url: str, metrics: TransferMetrics, prompt: Sequence[int], before: tuple[float, float, float]
) -> tuple[float, float, float]:
    """The metrics after one more transfer; vLLM counts it a while after its answer."""
    asyncio.run(run_streams(url, "m", [prompt], 1, 8))
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while (after := _read(decode_url, metrics))[1] <= before[1]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{decode_url}/metrics counts no transfer after a request")
        time.sleep(0.1)
    assert after[1] == before[1] + 1, f"{after[1] - before[1]} transfers for one prompt"
    return after


def _read(decode_url: str, metrics: TransferMetrics) -> tuple[float, float, float]:
    """Seconds, transfers, bytes so far."""
    with urllib.request.urlopen(f"{decode_url}/metrics", timeout=5) as answer:
        text = answer.read().decode()

    def value(name: str) -> float:
        return sum(
            float(found) for found in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        )

    return sum(map(value, metrics.seconds)), value(metrics.count), value(metrics.payload_bytes)
