"""Traces: the spans by which one request is followed through router, decode node and prefill node.

A process's `main` opens one tracer and hands it down. A span's `traceparent` (W3C trace context) travels in our own messages,
and the receiver begins its span under it; so one request's spans are one tree, whoever recorded them:

    chat MODEL             router: the request, from its arrival to its last token; under the client's own span, if it named one
      attempt              router: one assignment to a decode node
        decode             D: the attempt
          transfer         D: one try with one prefill node: bytes, lane, and why it ended if it failed
            prefill        P: the prompt's computation

Without --otlp-traces-endpoint the tracer is `NoTracer`: nothing is recorded, OpenTelemetry is not imported, and a client's
trace context is passed on unchanged. Spans are made for each request, attempt and transfer, never for each token.

Must not know: what is traced, gRPC.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OpenTelemetrySpan

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]
Kind = Literal["server", "client", "internal"]

NONE: Attributes = {}
CLOSE_WITHIN_S = 3.0
"""At a process's end: for the last spans to reach the collector."""
EXPORT_WITHIN_S = 2.0

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_NOWHERE = {"0" * 32, "0" * 16}


def valid_traceparent(text: str) -> str:
    """`text`, if it is a W3C trace context; else nothing, for a trace is never worth refusing a request."""
    found = _TRACEPARENT.fullmatch(text)
    return "" if found is None or text.startswith("ff") or _NOWHERE & {*found.groups()} else text


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """What to send to whoever goes on with this; empty when there is no trace."""

    @property
    def log_ids(self) -> dict[str, str]:
        """Fields for log lines about the same: `trace_id`, or nothing."""

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes = NONE) -> None: ...

    def end(self, failure: str = "") -> None:
        """Ends it, as failed for that reason if there is one. Only the first end counts."""


class Tracer(Protocol):
    @property
    def records(self) -> bool:
        """Whether anything becomes of a span's attributes; where not, they need not be put together."""

    def begin(self, name: str, parent: str, kind: Kind, attributes: Attributes = NONE) -> Span:
        """A span under the trace context `parent`, or of a new trace when that is empty or no trace context."""

    def close(self) -> None:
        """Sends what is left; waits for the collector no longer than CLOSE_WITHIN_S."""


class PassedOn:
    """The span of somebody else, whose context is passed on."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    @property
    def log_ids(self) -> dict[str, str]:
        return {"trace_id": self.traceparent.split("-")[1]} if self.traceparent else {}

    def set(self, attributes: Attributes) -> None:
        pass

    def event(self, name: str, attributes: Attributes = NONE) -> None:
        pass

    def end(self, failure: str = "") -> None:
        pass


NO_SPAN: Span = PassedOn("")


class NoTracer:
    """Tracing is off."""

    records = False

    def begin(self, name: str, parent: str, kind: Kind, attributes: Attributes = NONE) -> Span:
        return PassedOn(valid) if parent and (valid := valid_traceparent(parent)) else NO_SPAN

    def close(self) -> None:
        pass


NO_TRACER: Tracer = NoTracer()


def require_collector_address(endpoint: str | None) -> None:
    """Raises ConfigurationError naming --otlp-traces-endpoint when it is no http:// or https:// URL with a port."""
    if endpoint is not None and not re.fullmatch(r"https?://[^/:]+:\d{1,5}/?", endpoint):
        raise ConfigurationError(
            "--otlp-traces-endpoint", f"must be http://host:port or https://host:port, not {endpoint!r}"
        )


def open_tracer(endpoint: str | None, service: str, identity: Attributes = NONE) -> Tracer:
    """`endpoint`: an OTLP collector's gRPC address, http://host:port or https://host:port; None: no traces.

    `service` is the resource's service.name, `identity` its other attributes. Which requests are sampled is OpenTelemetry's
    own setting (OTEL_TRACES_SAMPLER; default: what the client says, else all).
    """
    return NO_TRACER if endpoint is None else _open_otlp(endpoint, service, identity)


def _open_otlp(endpoint: str, service: str, identity: Attributes) -> Tracer:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_WITHIN_S)
    provider = TracerProvider(resource=Resource.create({"service.name": service, **identity}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtlpTracer(provider)


class OtlpTracer:
    """Spans are queued without waiting and leave in batches from a thread; a queue that is full drops new ones."""

    records = True

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("decant")
        self._kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
        self._context = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str, kind: Kind, attributes: Attributes = NONE) -> Span:
        context = self._context.extract({"traceparent": parent}) if parent else None
        return _Recorded(self._tracer.start_span(name, context, self._kinds[kind], dict(attributes)))

    def close(self) -> None:
        # A thread of its own: an exporter may wait for a collector that is gone, and the process must not.
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S)


class _Recorded:
    __slots__ = ("_span", "traceparent")

    def __init__(self, span: OpenTelemetrySpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def log_ids(self) -> dict[str, str]:
        return {"trace_id": self.traceparent.split("-")[1]}

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NONE) -> None:
        self._span.add_event(name, attributes)

    def end(self, failure: str = "") -> None:
        if not self._span.is_recording():
            return
        if failure:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", failure.partition(":")[0])
            self._span.set_status(StatusCode.ERROR, failure)
        self._span.end()
