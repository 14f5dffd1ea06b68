"""An OpenTelemetry collector for tests: what real processes export over OTLP, by trace."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from pd_nodes import eventually

ARRIVES_WITHIN_S = 60.0
SPANS = ("attempt", "decode", "transfer", "prefill")
"""Below the root, each the parent of the next, where a prompt is computed on a prefill node."""


class Span:
    def __init__(self, span: trace_pb2.Span, service: str) -> None:
        self.name, self.service = span.name, service
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.attributes = {one.key: _value(one.value) for one in span.attributes}
        self.events = [event.name for event in span.events]
        self.failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        self.lasts = (span.start_time_unix_nano, span.end_time_unix_nano)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class Collector(collector_grpc.TraceServiceServicer):
    """A real OTLP receiver that keeps spans in memory, by trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[str, list[Span]] = defaultdict(list)
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        collector_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(
        self, request: collector.ExportTraceServiceRequest, context: Any
    ) -> collector.ExportTraceServiceResponse:
        with self._lock:
            for of_resource in request.resource_spans:
                names = {one.key: _value(one.value) for one in of_resource.resource.attributes}
                for scope in of_resource.scope_spans:
                    for span in scope.spans:
                        self._traces[span.trace_id.hex()].append(Span(span, names["service.name"]))
        return collector.ExportTraceServiceResponse()

    async def trace_with(self, *names: str, attribute: tuple[str, str]) -> dict[str, Span]:
        """The trace in which some span has this attribute, once spans of all these names have come, one of each."""

        async def complete() -> bool:
            return {span.name for span in self._find(attribute)} >= set(names)

        await eventually(complete, ARRIVES_WITHIN_S, f"spans {names}; there are {self._names()}")
        spans = self._find(attribute)
        assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
        return {span.name: span for span in spans}

    def _find(self, attribute: tuple[str, str]) -> list[Span]:
        key, value = attribute
        with self._lock:
            for spans in self._traces.values():
                if any(span.attributes.get(key) == value for span in spans):
                    return list(spans)
        return []

    def _names(self) -> list[list[str]]:
        with self._lock:
            return [[span.name for span in spans] for spans in self._traces.values()]

    def stop(self) -> None:
        self._server.stop(None)
