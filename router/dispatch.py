"""Carries requests from a front end to decode nodes and their tokens back: the rim around `journey`.

A front end opens a `Generation` and reads `Piece`s from its `AnswerStream`; everything between (placing, submitting, failing
over, deadlines, cancelling) happens here, synchronously, on the one event loop.

Must not know: HTTP, gRPC servers, how text is written out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from decant_proto.v1 import node_pb2, types_pb2

from foundation.ids import AttemptId, NodeId, RequestId
from foundation.log import get_logger
from foundation.metrics import RouterMetrics
from router.answer import AnswerStream
from router.fleet import Fleet
from router.generation import Generation, Refusal, RefusalKind, RequestRefused
from router.journey import (
    AttemptLost,
    Begin,
    CancelAttempt,
    ClientLeft,
    DeadlinePassed,
    Deliver,
    Dropped,
    Effect,
    Ending,
    Event,
    Fail,
    Finish,
    Journey,
    NoPlace,
    Output,
    PatienceOver,
    Place,
    Placed,
    State,
    StopStringFound,
)
from router.placement import NoPlacement, Placement, prefix_chain
from router.tokenizer import ModelText
from router.wording import (
    RETRY_AFTER_S,
    Account,
    computed_on,
    placement_reason,
    refusal_of,
    sampling_message,
    unavailable,
)

log = get_logger()

PATIENCE_S = 5.0
"""A request that has shown nothing yet waits so long for a decode node."""
FAILOVER_PATIENCE_S = 30.0
"""A stream that has begun waits so long for another one."""
_HOPELESS = frozenset({"context_too_short", "deadline_unmeetable"})

_ENDINGS = {
    types_pb2.FINISH_REASON_STOP: Ending.STOP,
    types_pb2.FINISH_REASON_LENGTH: Ending.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: Ending.CANCELLED,
    types_pb2.FINISH_REASON_FAILED: Ending.FAILED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    most_waiting: int
    """Requests without a first token; more are refused."""
    most_waiting_tokens: int = 1 << 24
    """Their prompts' tokens in all; a prompt longer than that is taken while no other waits."""
    patience_s: float = PATIENCE_S
    failover_patience_s: float = FAILOVER_PATIENCE_S


class Dispatcher:
    """Implements `FleetListener`."""

    def __init__(
        self, fleet: Fleet, text: ModelText, metrics: RouterMetrics, limits: Limits, now: Callable[[], float]
    ) -> None:
        self.draining = False
        self._fleet = fleet
        self._text = text
        self._metrics = metrics
        self._limits = limits
        self._now = now
        self._ongoing: dict[str, _Ongoing] = {}
        self._without_node: dict[str, _Ongoing] = {}
        self._without_token = 0
        self._waiting_tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._ongoing)

    def open(self, generation: Generation) -> AnswerStream:
        """Start a request. Raises RequestRefused when the router is draining or has too many waiting."""
        if self.draining:
            self._metrics.requests_refused_total.count("draining")
            raise RequestRefused(unavailable("this router is shutting down", "draining"))
        waiting_tokens = self._waiting_tokens + len(generation.prompt)
        if self._without_token >= self._limits.most_waiting:
            raise self._overloaded(f"{self._without_token} requests are waiting already")
        if self._without_token and waiting_tokens > self._limits.most_waiting_tokens:
            raise self._overloaded(f"prompts of {self._waiting_tokens} tokens are waiting already")
        ongoing = _Ongoing(self, generation)
        self._ongoing[generation.request_id] = ongoing
        self._idle.clear()
        self._without_token += 1
        self._waiting_tokens = waiting_tokens
        self._metrics.prompt_tokens_total.inc(len(generation.prompt))
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
        now_s = self._now()
        ongoing = self._ongoing.values()
        return [one.account(now_s) for one in ongoing if not (waiting and one.first_token_seen)]

    # --- FleetListener

    def fleet_changed(self) -> None:
        for ongoing in list(self._without_node.values()):
            ongoing.carry_out([Place(frozenset(node for node, _ in ongoing.journey.lost))])

    def attempts_lost(self, node: NodeId, requests: Sequence[str], reason: str) -> None:
        for request in requests:
            ongoing = self._ongoing.get(request)
            if ongoing is not None and ongoing.journey.node == node:
                ongoing.handle(AttemptLost(ongoing.journey.attempt, reason))

    def outputs(self, node: NodeId, outputs: node_pb2.StepOutput) -> None:
        ongoing_requests = self._ongoing
        for output in outputs.outputs:
            ongoing = ongoing_requests.get(output.request_id)
            if ongoing is None or ongoing.journey.node != node:
                # Its request is over, or goes on elsewhere.
                self._metrics.dropped_total.count("stale_attempt", max(1, len(output.tokens)))
                continue
            ongoing.output(output)

    # --- inside

    def _overloaded(self, sentence: str) -> RequestRefused:
        self._metrics.requests_refused_total.count("overloaded")
        kind = RefusalKind.OVERLOADED
        return RequestRefused(Refusal(kind, sentence, code="overloaded", retryable=True, retry_after_s=RETRY_AFTER_S))

    def _waits_no_more(self, ongoing: _Ongoing) -> None:
        """Its first token is there, or it has ended without one."""
        self._without_token -= 1
        self._waiting_tokens -= len(ongoing.generation.prompt)

    def _set_gauges(self) -> None:
        self._metrics.requests_waiting.set(self._without_token)
        self._metrics.requests_running.set(len(self._ongoing) - self._without_token)

    def _over(self, ongoing: _Ongoing) -> None:
        del self._ongoing[ongoing.generation.request_id]
        self._without_node.pop(ongoing.generation.request_id, None)
        if not ongoing.first_token_seen:
            self._waits_no_more(ongoing)
        if not self._ongoing:
            self._idle.set()
        self._set_gauges()


class _Ongoing:
    """One request in flight: its journey, the stream its front end reads, and its two timers."""

    def __init__(self, dispatcher: Dispatcher, generation: Generation) -> None:
        self.generation = generation
        self.first_token_seen = False
        self.journey = Journey(RequestId(generation.request_id), len(generation.prompt), generation.sampling.max_tokens)
        text = dispatcher._text
        decode = text.decode if generation.sampling.skip_special_tokens else text.decode_all
        self.stream = AnswerStream(
            generation, decode, lambda: self.handle(StopStringFound()), lambda: self.handle(ClientLeft())
        )
        self._dispatcher = dispatcher
        self._metrics = dispatcher._metrics
        self._chain = prefix_chain(generation.prompt)
        self._placement: Placement | None = None
        self._expected_s: float | None = None
        """Predicted time to first token, counted from the placement."""
        self._began_s = self._placed_s = self._last_token_s = dispatcher._now()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(generation.deadline_s, lambda: self.handle(DeadlinePassed()))
        self._patience: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.carry_out(self.journey.begin())

    def handle(self, event: Event) -> None:
        self.carry_out(self.journey.handle(event))

    def output(self, output: node_pb2.RequestOutput) -> None:
        if output.HasField("prompt_account") and self.stream.cached_tokens is None:
            self.stream.cached_tokens = min(output.prompt_account.cached, len(self.generation.prompt))
        ending = _ENDINGS.get(output.finish_reason)
        self.handle(Output(output.attempt, output.tokens, ending, output.failure, output.retryable))

    def account(self, now_s: float) -> Account:
        placement, journey = self._placement, self.journey
        return Account(
            request=self.generation.request_id,
            correlation=self.generation.correlation_id,
            attempt=journey.attempt,
            waits_on=journey.node,
            waits_for=journey.waiting_reason or ("last_token" if self.first_token_seen else "first_token"),
            since_s=round(now_s - self._began_s, 3),
            expected_s=self._expected_s,
            computed_on=computed_on(placement) if placement is not None else None,
            placed_because=placement_reason(placement) if placement is not None else None,
            prompt_tokens=len(self.generation.prompt),
            answer_tokens=len(journey.log),
            lost=tuple(f"{node}: {reason}" for node, reason in journey.lost),
        )

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver():
                    self._deliver(effect)
                case Dropped():
                    self._metrics.dropped_total.count(effect.reason, effect.count)
                case Place():
                    self._place(effect)
                case Begin():
                    self._submit(effect)
                case CancelAttempt():
                    self._cancel(effect)
                case Finish():
                    self.stream.finish(effect.ending)
                case Fail():
                    if self.journey.attempt == 0:
                        unmeetable = effect.reason == "deadline_unmeetable"
                        self._metrics.requests_refused_total.count(effect.reason if unmeetable else "no_node")
                    self.stream.fail(refusal_of(effect))
                case _:
                    assert_never(effect)
        if self.journey.state in (State.FINISHED, State.FAILED, State.CANCELLED):
            self._end()

    def _place(self, effect: Place) -> None:
        dispatcher, tokens = self._dispatcher, self.journey.next_position
        remaining = self.generation.sampling.max_tokens - len(self.journey.log)
        self._leave_node()
        placed = dispatcher._fleet.place(tokens, remaining, self._chain, effect.avoid)
        if isinstance(placed, Placement) and not self.first_token_seen and self._too_late(placed.expected_s):
            placed = NoPlacement("deadline_unmeetable")
        match placed:
            case Placement():
                dispatcher._without_node.pop(self.generation.request_id, None)
                self._stop_patience()
                self._placement, self._expected_s, self._placed_s = placed, placed.expected_s, dispatcher._now()
                self._metrics.placements_total.count(placement_reason(placed))
                if placed.expected_s is not None:
                    self._metrics.predicted_time_to_first_token_seconds.observe(placed.expected_s)
                self.handle(Placed(placed.decode.node))
            case NoPlacement(reason):
                dispatcher._without_node[self.generation.request_id] = self
                self.handle(NoPlace(reason))
                if reason in _HOPELESS:
                    self.handle(PatienceOver())
                elif self._patience is None:
                    limits = dispatcher._limits
                    patience_s = limits.failover_patience_s if self.first_token_seen else limits.patience_s
                    loop = asyncio.get_running_loop()
                    self._patience = loop.call_later(patience_s, lambda: self.handle(PatienceOver()))

    def _submit(self, effect: Begin) -> None:
        placement, fleet = self._placement, self._dispatcher._fleet
        assert placement is not None
        assert placement.decode.node == effect.node
        generation, settled = self.generation, tuple(self.journey.log)
        attempt = AttemptId(self.journey.request, effect.attempt)
        fleet.begin(generation.request_id, placement, self._chain, self.journey.next_position)
        submit = node_pb2.Submit(
            request_id=generation.request_id,
            attempt=effect.attempt,
            prompt_token_ids=generation.prompt,
            settled_token_ids=settled,
            sampling=sampling_message(generation.sampling),
            choice_index=generation.choice_index,
            deadline_ms=self._remaining_ms(),
            prefill_choices=fleet.prefill_choices(placement, attempt, generation.prompt, settled),
            local_reason=placement.local_reason,
        )
        self._metrics.request_attempts_total.count(effect.why.value)
        log.debug("attempt begins", request=generation.request_id, attempt=effect.attempt, node=effect.node)
        link = fleet.link(effect.node)
        if link is None or not link.send(node_pb2.RouterMessage(submit=submit)):
            # Not now: the effects in hand come first.
            lost = AttemptLost(effect.attempt, "not_sent")
            asyncio.get_running_loop().call_soon(lambda: self.handle(lost))

    def _cancel(self, effect: CancelAttempt) -> None:
        link = self._dispatcher._fleet.link(effect.node)
        if link is not None:
            request = self.generation.request_id
            cancel = node_pb2.Cancel(request_id=request, attempt=effect.attempt, reason=effect.reason)
            link.send(node_pb2.RouterMessage(cancel=cancel))

    def _deliver(self, effect: Deliver) -> None:
        dispatcher, metrics, now_s = self._dispatcher, self._metrics, self._dispatcher._now()
        count = len(effect.tokens)
        if not self.first_token_seen:
            self.first_token_seen = True
            dispatcher._waits_no_more(self)
            dispatcher._set_gauges()
            dispatcher._fleet.first_token_seen(self.generation.request_id)
            metrics.time_to_first_token_seconds.observe(now_s - self._began_s)
            if self._expected_s:
                metrics.prediction_ratio.observe((now_s - self._placed_s) / self._expected_s)
        else:
            metrics.inter_token_latency_seconds.observe((now_s - self._last_token_s) / count)
        self._last_token_s = now_s
        metrics.generation_tokens_total.inc(count)
        self.stream.deliver(effect.tokens)

    def _end(self) -> None:
        if self._deadline.cancelled():
            return
        self._deadline.cancel()
        self._stop_patience()
        self._leave_node()
        self._dispatcher._over(self)
        now_s = self._dispatcher._now()
        self._metrics.e2e_request_latency_seconds.observe(now_s - self._began_s)
        self._metrics.request_success_total.count(self._end_reason())
        log.info(
            "request ended",
            request=self.generation.request_id,
            correlation=self.generation.correlation_id or None,
            state=self.journey.state.value,
            attempts=self.journey.attempt,
            prompt_tokens=len(self.generation.prompt),
            tokens=len(self.journey.log),
            seconds=round(now_s - self._began_s, 4),
            lost=[f"{node}: {reason}" for node, reason in self.journey.lost] or None,
        )

    def _end_reason(self) -> str:
        match self.journey.state:
            case State.FINISHED:
                return self.stream.finish_reason or "stop"
            case State.CANCELLED:
                return "cancelled"
            case _:
                return "failed"

    def _leave_node(self) -> None:
        if self._placement is not None:
            self._dispatcher._fleet.attempt_over(self.generation.request_id, self._placement.decode.node)
            self._placement = None

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_late(self, expected_s: float | None) -> bool:
        """Whether even the first token would come after the deadline, so that all work would be for nothing."""
        return expected_s is not None and expected_s > self._remaining_s()

    def _remaining_s(self) -> float:
        return self.generation.deadline_s - (self._dispatcher._now() - self._began_s)

    def _remaining_ms(self) -> int:
        return max(1, round(self._remaining_s() * 1000))
