"""Metrics: all there before the first request, labels bounded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.metrics import DROPPED_REASONS, LANES_SHOWN, TRANSFER_FAILURE_REASONS, NodeMetrics, RouterMetrics

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
    'scheduler_skips_total{reason="no_free_blocks"}',
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


def test_of_lanes_only_those_measured_last_are_exported() -> None:
    metrics = NodeMetrics()
    for number in range(LANES_SHOWN + 10):
        metrics.kv_lane_gigabytes_per_second.set(f"p{number}", "tcp", float(number))
    metrics.kv_lane_gigabytes_per_second.set("p20", "tcp", 77.0)
    shown = {name: value for name, value in samples(metrics).items() if "kv_lane" in name}
    assert len(shown) == LANES_SHOWN
    assert shown['decant_kv_lane_gigabytes_per_second{lane="tcp",peer="p20"}'] == 77
    assert not any('peer="p9"' in name for name in shown)


def test_problems_are_shown_with_their_ages_and_go_back_to_nothing() -> None:
    metrics = NodeMetrics()
    metrics.show_problems({"engine_stalled": 12.5, "something new": 3.0})
    found = samples(metrics)
    assert found["decant_ready"] == 0
    assert found['decant_not_ready_seconds{reason="engine_stalled"}'] == 12.5
    assert found['decant_not_ready_seconds{reason="other"}'] == 3
    metrics.show_problems({})
    assert samples(metrics)["decant_ready"] == 1
    assert sum(value for name, value in samples(metrics).items() if "not_ready" in name) == 0


def test_two_objects_in_one_process_do_not_share_counts() -> None:
    first, second = NodeMetrics(), NodeMetrics()
    first.prompt_tokens_total.inc(3)
    assert samples(second)["decant_prompt_tokens_total"] == 0


ROOT = Path(__file__).parents[3]


def reasons_given_to(*functions: str, rooms: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(reason, where) of every call of these functions with a literal reason."""
    for file in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for argument in node.args if name in functions else ():
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, f"{file.relative_to(ROOT)}:{node.lineno}"


def test_every_reason_for_which_a_transfer_ends_has_its_label() -> None:
    found = list(
        reasons_given_to("session_over", "end", "NodeEnded", "ReceiveFailed", "LaneFailed", rooms=("kv_transfer",))
    )
    assert len(found) > 10, "the functions have other names now"
    assert [place for place in found if place[0] not in TRANSFER_FAILURE_REASONS] == []


def test_every_reason_for_which_a_message_changes_nothing_has_its_label() -> None:
    found = [
        *reasons_given_to("count", rooms=("kv_transfer/protocol",)),
        *reasons_given_to("Dropped", "CountDropped", "_dropped", rooms=("router", "decode_node")),
    ]
    assert len(found) > 10, "the functions have other names now"
    assert [place for place in found if place[0] not in DROPPED_REASONS] == []
