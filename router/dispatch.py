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
from router.generation import Generation, Refusal, RefusalKind, RequestRefused, Sampling
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

log = get_logger()

PATIENCE_S = 5.0
"""A request that has shown nothing yet waits so long for a decode node."""
FAILOVER_PATIENCE_S = 30.0
"""A stream that has begun waits so long for another one."""
RETRY_AFTER_S = 1.0
_HOPELESS = frozenset({"context_too_short"})

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
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._ongoing)

    def open(self, generation: Generation) -> AnswerStream:
        """Start a request. Raises RequestRefused when the router is draining or has too many waiting."""
        if self.draining:
            self._metrics.requests_refused_total.count("draining")
            raise RequestRefused(_unavailable("this router is shutting down", "draining"))
        if self._without_token >= self._limits.most_waiting:
            self._metrics.requests_refused_total.count("overloaded")
            raise RequestRefused(
                Refusal(
                    RefusalKind.OVERLOADED,
                    f"{self._without_token} requests are waiting already",
                    code="overloaded",
                    retryable=True,
                    retry_after_s=RETRY_AFTER_S,
                )
            )
        ongoing = _Ongoing(self, generation)
        self._ongoing[generation.request_id] = ongoing
        self._idle.clear()
        self._without_token += 1
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
            ongoing.stream.fail(_unavailable("this router is shutting down", "draining"))
            ongoing.handle(ClientLeft())

    def why_waiting(self) -> list[dict[str, object]]:
        """Each request without a first token: on whom it waits, for what, and since when."""
        now_s = self._now()
        return [ongoing.account(now_s) for ongoing in self._ongoing.values() if not ongoing.first_token_seen]

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

    def _set_gauges(self) -> None:
        self._metrics.requests_waiting.set(self._without_token)
        self._metrics.requests_running.set(len(self._ongoing) - self._without_token)

    def _over(self, ongoing: _Ongoing) -> None:
        del self._ongoing[ongoing.generation.request_id]
        self._without_node.pop(ongoing.generation.request_id, None)
        if not ongoing.first_token_seen:
            self._without_token -= 1
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
        self._began_s = self._last_token_s = dispatcher._now()
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

    def account(self, now_s: float) -> dict[str, object]:
        return {
            "request": self.generation.request_id,
            "attempt": self.journey.attempt,
            "waits_on": self.journey.node,
            "waits_for": self.journey.waiting_reason or "first_token",
            "since_s": round(now_s - self._began_s, 3),
        }

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
                        self._metrics.requests_refused_total.count("no_node")
                    self.stream.fail(_refusal(effect))
                case _:
                    assert_never(effect)
        if self.journey.state in (State.FINISHED, State.FAILED, State.CANCELLED):
            self._end()

    def _place(self, effect: Place) -> None:
        dispatcher, tokens = self._dispatcher, self.journey.next_position
        remaining = self.generation.sampling.max_tokens - len(self.journey.log)
        self._leave_node()
        placed = dispatcher._fleet.place(tokens, remaining, self._chain, effect.avoid)
        match placed:
            case Placement():
                dispatcher._without_node.pop(self.generation.request_id, None)
                self._stop_patience()
                self._placement = placed
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
            sampling=_sampling_message(generation.sampling),
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
            dispatcher._without_token -= 1
            dispatcher._set_gauges()
            dispatcher._fleet.first_token_seen(self.generation.request_id)
            metrics.time_to_first_token_seconds.observe(now_s - self._began_s)
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

    def _remaining_ms(self) -> int:
        spent_s = self._dispatcher._now() - self._began_s
        return max(1, round((self.generation.deadline_s - spent_s) * 1000))


def _sampling_message(sampling: Sampling) -> types_pb2.SamplingParameters:
    return types_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
    )


_SENTENCES = {
    "deadline": (RefusalKind.DEADLINE, "the request took longer than it may"),
    "overloaded": (RefusalKind.OVERLOADED, "every decode node has as many requests as it takes"),
    "no_decode_node": (RefusalKind.UNAVAILABLE, "no decode node is connected to this router"),
    "context_too_short": (RefusalKind.INVALID, "no decode node that is up has a context long enough for this prompt"),
    "prompt_too_long": (RefusalKind.INVALID, "the prompt is longer than the decode node can hold"),
}


def _refusal(effect: Fail) -> Refusal:
    kind, sentence = _SENTENCES.get(effect.reason, (None, f"the request could not be completed: {effect.reason}"))
    if kind is None:
        kind = RefusalKind.UNAVAILABLE if effect.retryable else RefusalKind.INTERNAL
    retryable = effect.retryable and kind is not RefusalKind.INVALID
    return Refusal(
        kind, sentence, code=effect.reason, retryable=retryable, retry_after_s=RETRY_AFTER_S if retryable else None
    )


def _unavailable(sentence: str, code: str) -> Refusal:
    return Refusal(RefusalKind.UNAVAILABLE, sentence, code=code, retryable=True, retry_after_s=RETRY_AFTER_S)
