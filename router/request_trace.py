"""One request's spans in the router, with OpenTelemetry's names for generative AI (`gen_ai.*`; latencies as vLLM names them).

Must not know: how spans are recorded, nodes, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foundation.tracing import NO_SPAN, NO_TRACER, NONE, Attributes, Span, Tracer
from router.generation import Generation
from router.placement import Placement
from router.wording import computed_on, placement_reason

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True)
class Caller:
    """What a front end knows of a request beside its content. `traceparent`: as the client gave it, unchecked."""

    operation: Operation = "text_completion"
    traceparent: str = ""


UNNAMED = Caller()


@dataclass(frozen=True, slots=True)
class Traces:
    """`model`: the name under which it is served."""

    tracer: Tracer
    model: str

    def of(self, caller: Caller, generation: Generation) -> RequestTrace:
        return RequestTrace(self.tracer, caller, self.model, generation)


NO_TRACES = Traces(NO_TRACER, "")


class RequestTrace:
    def __init__(self, tracer: Tracer, caller: Caller, model: str, generation: Generation) -> None:
        self._tracer = tracer
        attributes = _request_attributes(caller, model, generation) if tracer.records else NONE
        self._request = tracer.begin(f"{caller.operation} {model}", caller.traceparent, "server", attributes)
        self._attempt: Span = NO_SPAN
        self.attempt_open = False

    @property
    def log_ids(self) -> dict[str, str]:
        return self._request.log_ids

    def attempt(self, number: int, placement: Placement, why: str) -> str:
        """An attempt begins, and the one before it is over; the trace context for its decode node."""
        self.attempt_over("")
        self.attempt_open = True
        attributes = _attempt_attributes(number, placement, why) if self._tracer.records else NONE
        self._attempt = self._tracer.begin("attempt", self._request.traceparent, "client", attributes)
        return self._attempt.traceparent

    def attempt_over(self, failure: str) -> None:
        self.attempt_open = False
        self._attempt.end(failure)

    def first_token(self, after_s: float) -> None:
        self._request.event("first_token")
        self._request.set({"gen_ai.latency.time_to_first_token": after_s})

    def end(self, reason: str, failure: str, attempts: int, output_tokens: int, seconds: float) -> None:
        """`reason`: stop, length, cancelled or failed; `failure`: why, if it failed."""
        self._attempt.end(failure)
        if self._tracer.records:
            self._request.set(
                {
                    "gen_ai.response.finish_reasons": (reason,),
                    "gen_ai.usage.output_tokens": output_tokens,
                    "gen_ai.latency.e2e": seconds,
                    "decant.attempts": attempts,
                }
            )
        self._request.end(failure)


def _request_attributes(caller: Caller, model: str, generation: Generation) -> Attributes:
    sampling = generation.sampling
    return {
        "gen_ai.operation.name": caller.operation,
        "gen_ai.provider.name": "decant",
        "gen_ai.request.model": model,
        "gen_ai.request.id": generation.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": len(generation.prompt),
    }


def _attempt_attributes(number: int, placement: Placement, why: str) -> Attributes:
    return {
        "decant.attempt": number,
        "decant.attempt.reason": why,
        "decant.decode_node": placement.decode.node,
        "decant.computed_on": computed_on(placement),
        "decant.placement.reason": placement_reason(placement),
    }
