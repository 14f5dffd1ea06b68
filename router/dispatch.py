"""Carries requests from a front end to decode nodes and their tokens back: all requests in flight, and who may join them.

A front end opens a `Generation` and reads `Piece`s from its `AnswerStream`; everything between (placing, submitting, failing
over, deadlines, cancelling) happens here and in `ongoing`, synchronously, on the one event loop.

Must not know: HTTP, gRPC servers, how text is written out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decant_proto.v1 import node_pb2

from foundation.ids import NodeId
from foundation.metrics import RouterMetrics
from router.admission import Admission
from router.answer import AnswerStream
from router.fleet import Fleet
from router.generation import Generation, Refusal, RefusalKind, RequestRefused
from router.journey import AttemptLost, ClientLeft
from router.ongoing import Ongoing, Surroundings
from router.request_trace import NO_TRACES, UNNAMED, Caller, Traces
from router.timers import FAILOVER_PATIENCE_S, PATIENCE_S
from router.tokenizer import ModelText
from router.wording import RETRY_AFTER_S, Account, Failure, unavailable

RECENT_FAILURES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    most_waiting: int
    """Requests without a first token; more are refused."""
    most_waiting_tokens: int = 1 << 24
    """Their prompts' tokens in all; a prompt longer than that is taken while no other waits."""
    patience_s: float = PATIENCE_S
    failover_patience_s: float = FAILOVER_PATIENCE_S


class Dispatcher:
    """Implements `FleetListener` and `ongoing.Books`."""

    def __init__(
        self,
        fleet: Fleet,
        text: ModelText,
        metrics: RouterMetrics,
        limits: Limits,
        now: Callable[[], float],
        traces: Traces = NO_TRACES,
    ) -> None:
        self.draining = False
        self.failures: deque[Failure] = deque(maxlen=RECENT_FAILURES)
        """Attempts that were lost and requests that failed, the latest last, for people."""
        self._metrics = metrics
        self._around = Surroundings(
            fleet, text, metrics, now, limits.patience_s, limits.failover_patience_s, traces, self.failures.append
        )
        self._admission = Admission(limits.most_waiting, limits.most_waiting_tokens)
        self._ongoing: dict[str, Ongoing] = {}
        self._without_node: dict[str, Ongoing] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._ongoing)

    def open(self, generation: Generation, caller: Caller = UNNAMED) -> AnswerStream:
        """Start a request. Raises RequestRefused when the router is draining or has too many waiting."""
        if self.draining:
            self._metrics.requests_refused_total.count("draining")
            raise RequestRefused(unavailable("this router is shutting down", "draining"))
        prompt_tokens = generation.own_prompt_tokens
        if (sentence := self._admission.refusal(prompt_tokens)) is not None:
            raise self._overloaded(sentence)
        ongoing = Ongoing(self._around, self, generation, caller)
        self._ongoing[generation.request_id] = ongoing
        self._idle.clear()
        self._admission.enter(prompt_tokens)
        self._metrics.prompt_tokens_total.inc(prompt_tokens)
        ongoing.begin()
        self._set_gauges()
        return ongoing.stream

    async def drained(self) -> None:
        """Returns when no request is in flight."""
        await self._idle.wait()

    def give_up(self) -> None:
        """End every request in flight with an error that says why: what its client sees is never just a cut."""
        for ongoing in list(self._ongoing.values()):
            ongoing.stream.fail(unavailable("this router is shutting down", "draining"))
            ongoing.handle(ClientLeft())

    def cancel(self, request_id: str) -> bool:
        """End a request for its client, who reads that it was cancelled. False when there is none of that id."""
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            return False
        ongoing.stream.fail(Refusal(RefusalKind.CANCELLED, "the request was cancelled", code="cancelled"))
        ongoing.handle(ClientLeft())
        return True

    def accounts(self, *, waiting: bool = False) -> list[Account]:
        """Each request in flight, or each that has no token yet: where it is, on whom it waits, for what, and since when."""
        return [one.account() for one in self._ongoing.values() if not (waiting and one.first_token_seen)]

    # --- FleetListener

    def fleet_changed(self) -> None:
        for ongoing in list(self._without_node.values()):
            ongoing.find_place()

    def attempts_lost(self, node: NodeId, requests: Sequence[str], reason: str) -> None:
        for request in requests:
            ongoing = self._ongoing.get(request)
            if ongoing is not None and ongoing.journey.node == node:
                ongoing.handle(AttemptLost(ongoing.journey.attempt, reason))

    def attempts_leaving(self, node: NodeId, requests: Sequence[str]) -> None:
        for request in requests:
            ongoing = self._ongoing.get(request)
            if ongoing is not None and not ongoing.leave(node):
                return  # no room for this one now, so none for the next; asked again with the node's next status

    def outputs(self, node: NodeId, outputs: node_pb2.StepOutput) -> None:
        ongoing_requests = self._ongoing
        for output in outputs.outputs:
            ongoing = ongoing_requests.get(output.request_id)
            if ongoing is None or ongoing.journey.node != node:
                # Its request is over, or goes on elsewhere.
                self._metrics.dropped_total.count("stale_attempt", max(1, len(output.tokens)))
                continue
            ongoing.output(output)

    # --- Books

    def without_node(self, ongoing: Ongoing) -> None:
        self._without_node[ongoing.generation.request_id] = ongoing

    def with_node(self, ongoing: Ongoing) -> None:
        self._without_node.pop(ongoing.generation.request_id, None)

    def first_token(self, ongoing: Ongoing) -> None:
        self._admission.leave(ongoing.generation.own_prompt_tokens)
        self._set_gauges()

    def over(self, ongoing: Ongoing) -> None:
        del self._ongoing[ongoing.generation.request_id]
        self._without_node.pop(ongoing.generation.request_id, None)
        if not ongoing.first_token_seen:
            self._admission.leave(ongoing.generation.own_prompt_tokens)
        if not self._ongoing:
            self._idle.set()
        self._set_gauges()

    # --- inside

    def _overloaded(self, sentence: str) -> RequestRefused:
        self._metrics.requests_refused_total.count("overloaded")
        kind = RefusalKind.OVERLOADED
        return RequestRefused(Refusal(kind, sentence, code="overloaded", retryable=True, retry_after_s=RETRY_AFTER_S))

    def _set_gauges(self) -> None:
        waiting = self._admission.waiting
        self._metrics.requests_waiting.set(waiting)
        self._metrics.requests_running.set(len(self._ongoing) - waiting)
