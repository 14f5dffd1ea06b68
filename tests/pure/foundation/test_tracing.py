"""Tracing that is off: nothing is imported, nothing recorded, and a client's context is passed on as it came."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foundation.errors import ConfigurationError
from foundation.tracing import NO_SPAN, NO_TRACER, open_tracer, require_collector_address, valid_traceparent

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_without_an_endpoint_a_span_is_one_object_that_does_nothing() -> None:
    tracer = open_tracer(None, "decant-router")
    assert tracer is NO_TRACER
    span = tracer.begin("request", "", "server", {"a": 1})
    assert span is tracer.begin("another", "nonsense", "server") is NO_SPAN
    span.event("first_token")
    span.end("failed")
    assert (span.traceparent, span.log_ids) == ("", {})


def test_a_client_s_context_is_passed_on_where_tracing_is_off() -> None:
    span = NO_TRACER.begin("request", CONTEXT, "server")
    assert span.traceparent == CONTEXT
    assert span.log_ids == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}


def test_opentelemetry_is_not_imported_where_tracing_is_off() -> None:
    """The redis client imports it where it is installed; a node that knows no Redis need not wait for it."""
    code = (
        "import sys, foundation.tracing as tracing; tracing.open_tracer(None, 'x').begin('a', '', 'server').end();"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", CONTEXT[:-1], CONTEXT + "0", CONTEXT.upper().replace("00-", "00-", 1), "ff" + CONTEXT[2:]),
        *(f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{'a' * 32}-{'0' * 16}-01", "a" * 10_000, CONTEXT + "\n"),
    ],
)
def test_what_is_no_trace_context_is_none(text: str) -> None:
    assert valid_traceparent(text) == ""


def test_a_trace_context_is_one() -> None:
    assert valid_traceparent(CONTEXT) == CONTEXT


@pytest.mark.parametrize("address", ["collector", "collector:4317", "http://collector", "grpc://c:1", "http://c:1/v1"])
def test_an_endpoint_that_is_none_names_the_setting(address: str) -> None:
    with pytest.raises(ConfigurationError, match="--otlp-traces-endpoint"):
        require_collector_address(address)


def test_spans_under_one_parent_are_one_trace_and_only_the_first_end_counts() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from foundation.tracing import OtlpTracer

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = OtlpTracer(provider)
    outer = tracer.begin("outer", CONTEXT, "server", {"a": 1})
    inner = tracer.begin("inner", outer.traceparent, "client")
    inner.end("transfer_stalled: 3 parcels")
    inner.end()
    outer.end()
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert len(exporter.get_finished_spans()) == 2
    assert {f"{span.context.trace_id:032x}" for span in found.values() if span.context} == {CONTEXT.split("-")[1]}
    assert valid_traceparent(inner.traceparent) == inner.traceparent
    parent, context = found["inner"].parent, found["outer"].context
    assert parent is not None
    assert context is not None
    assert parent.span_id == context.span_id
    assert found["inner"].status.status_code is StatusCode.ERROR
    assert found["inner"].attributes is not None
    assert found["inner"].attributes["error.type"] == "transfer_stalled"
