"""Traces of real processes, as an OpenTelemetry collector receives them: one request is one tree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from pd_golden import toy_prompt
from pd_nodes import eventually, json_lines
from toy_cluster import ToyCluster, toy_cluster
from trace_collector import SPANS, Collector

pytestmark = [pytest.mark.sockets, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

PATIENT = "--silence-limit-s=20"
"""A busy machine is no fault here."""
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ToyCluster, Collector]]:
    """`p` damages parcel 10 of the first transfer that has so many, which short prompts have not."""
    receiver = Collector()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    endpoint = f"--otlp-traces-endpoint=http://127.0.0.1:{receiver.port}"
    folder = tmp_path_factory.mktemp("traces")
    try:
        async with toy_cluster(
            folder, {"p": "prefill", "d": "decode"}, endpoint, PATIENT, faults={"p": "flip_byte_of_parcel=10"}
        ) as cluster:
            yield cluster, receiver
    finally:
        monkeypatch.undo()
        receiver.stop()


async def test_one_request_s_spans_are_one_tree_over_three_processes(traced: tuple[ToyCluster, Collector]) -> None:
    cluster, receiver = traced
    prompt = toy_prompt(24, 1)
    context = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    answer = await cluster.complete(prompt, headers=context)
    request = answer["id"].partition("-")[2]
    name = f"text_completion {answer['model']}"
    spans = await receiver.trace_with(name, *SPANS, attribute=("gen_ai.request.id", request))

    chain = [spans[each] for each in (name, *SPANS)]
    assert chain[0].parent == CLIENT_SPAN
    assert [child.parent for child in chain[1:]] == [parent.id for parent in chain[:-1]]
    assert {span.trace for span in chain} == {CLIENT_TRACE}
    assert [span.service for span in chain] == [
        *("decant-router", "decant-router", "decant-decode", "decant-decode", "decant-prefill"),
    ]
    assert not any(span.failed for span in chain)

    root, attempt, decode, transfer, prefill = chain
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.input_tokens"] == 24
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.attributes["gen_ai.latency.e2e"]
    assert (attempt.attributes["decant.decode_node"], attempt.attributes["decant.computed_on"]) == ("d", "p")
    assert decode.attributes["decant.prompt.transferred_tokens"] > 0
    assert transfer.attributes["decant.prefill_node"] == "p"
    assert transfer.attributes["decant.transfer.lane"] == "tcp"
    assert transfer.attributes["decant.transfer.bytes"] > 0
    assert transfer.attributes["decant.transfer.verified_positions"] == 24
    for span in (root, decode, prefill):
        assert span.events.count("first_token") == 1
    for outer, inner in ((root, attempt), (root, decode), (decode, transfer)):
        assert outer.lasts[0] <= inner.lasts[0], f"{inner.name} begins before {outer.name}"


async def test_f31_a_transfer_that_failed_says_why_and_how_much_was_computed_again(
    traced: tuple[ToyCluster, Collector],
) -> None:
    cluster, receiver = traced
    answer = await cluster.complete(toy_prompt(64, 2))
    request = answer["id"].partition("-")[2]
    spans = await receiver.trace_with("decode", "transfer", "prefill", attribute=("gen_ai.request.id", request))
    transfer, decode = spans["transfer"], spans["decode"]
    assert transfer.failed
    assert transfer.attributes["error.type"] == "bad_digest"
    assert "local_prefill" in decode.events
    assert not decode.failed, "the answer is right all the same"


async def test_log_lines_of_all_three_processes_name_the_trace(traced: tuple[ToyCluster, Collector]) -> None:
    cluster, _ = traced
    answer = await cluster.complete(toy_prompt(30, 3), headers={"traceparent": f"00-{'ab' * 16}-{CLIENT_SPAN}-01"})
    request = answer["id"].partition("-")[2]

    def lines() -> list[dict[str, Any]]:
        return [line for line in cluster.log() if line.get("request") == request]

    async def ended() -> bool:
        return any(line["event"] == "request ended" for line in lines())

    await eventually(ended, 5.0, "the router logs the request's end")
    (line,) = [line for line in lines() if line["event"] == "request ended"]
    assert (line["trace_id"], line["attempt"], line["role"]) == ("ab" * 16, 1, "router")
    failures = [line for line in json_lines(cluster.nodes["d"].log_path) if line["event"] == "transfer ended"]
    assert failures, "the test before this one lost a transfer"
    assert all({"request", "attempt", "try_number", "trace_id"} <= line.keys() for line in failures)


async def test_a_trace_context_that_is_none_costs_a_client_nothing(traced: tuple[ToyCluster, Collector]) -> None:
    cluster, receiver = traced
    answer = await cluster.complete(toy_prompt(20, 4), headers={"traceparent": "00-zz-nonsense"})
    request = answer["id"].partition("-")[2]
    spans = await receiver.trace_with("decode", attribute=("gen_ai.request.id", request))
    assert spans["decode"].trace != "0" * 32
    await asyncio.sleep(0)
