"""Metrics: all there before the first request, labels bounded."""

from __future__ import annotations

import pytest

from foundation.metrics import NodeMetrics, RouterMetrics

SERVING = (
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    'request_success_total{reason="stop"}',
    "requests_running",
    "requests_waiting",
    "prompt_tokens_total",
    "generation_tokens_total",
)
NODE = (
    "step_tokens_count",
    'scheduler_skips_total{reason="other"}',
    "prefix_cached_tokens_total",
    "kv_transfer_bytes_total",
    "kv_transfer_seconds_count",
    'kv_transfer_failures_total{reason="bad_digest"}',
    "kv_recomputed_tokens_total",
    'local_prefill_total{reason="no_prefill_node"}',
    'kv_blocks{state="free"}',
    'staging_slots{state="quarantined"}',
)


def samples(metrics: NodeMetrics | RouterMetrics) -> dict[str, float]:
    lines = metrics.exposition().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("name", SERVING + NODE)
def test_a_node_exports_every_metric_before_its_first_request(name: str) -> None:
    assert samples(NodeMetrics())[f"decant_{name}"] == 0


@pytest.mark.parametrize("name", SERVING)
def test_a_router_exports_every_metric_before_its_first_request(name: str) -> None:
    assert samples(RouterMetrics())[f"decant_{name}"] == 0


def test_a_reason_that_nobody_declared_is_counted_as_other() -> None:
    metrics = NodeMetrics()
    metrics.kv_transfer_failures_total.count("bad_digest", 2)
    metrics.kv_transfer_failures_total.count("made up by a peer")
    found = samples(metrics)
    assert found['decant_kv_transfer_failures_total{reason="bad_digest"}'] == 2
    assert found['decant_kv_transfer_failures_total{reason="other"}'] == 1
    assert not any("made up" in name for name in found)


def test_two_objects_in_one_process_do_not_share_counts() -> None:
    first, second = NodeMetrics(), NodeMetrics()
    first.prompt_tokens_total.inc(3)
    assert samples(second)["decant_prompt_tokens_total"] == 0
