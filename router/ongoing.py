"""One request in flight: the rim around its `journey`. It carries out what the journey decides.

The common case, one more token of the current attempt, takes a short way through `output`: no event and no effect is made for it.

Must not know: other requests, HTTP, gRPC servers, how text is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from decant_proto.v1 import node_pb2, types_pb2

from foundation.ids import AttemptId, NodeId, RequestId
from foundation.log import get_logger, naming
from foundation.metrics import RouterMetrics
from router.answer import AnswerStream
from router.family import Lead
from router.fleet import Fleet
from router.generation import Generation, Sampling
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
    Moved,
    NoPlace,
    Output,
    PatienceOver,
    Place,
    Placed,
    State,
    StopStringFound,
)
from router.placement import NoPlacement, Placement, prefix_chain
from router.request_trace import Caller, Traces
from router.timers import RequestTimers, TimerEnds
from router.tokenizer import ModelText
from router.wording import (
    INTERNAL_ERROR,
    Account,
    Failure,
    computed_on,
    placement_reason,
    refusal_of,
    sampling_message,
    unavailable,
)

log = get_logger()

CONTEXT_TOKENS = 6
"""Tokens of the prompt before the answer that may decide how its first token is written."""
_HOPELESS = frozenset({"context_too_short", "deadline_unmeetable"})
"""Of a request that has shown nothing yet. A stream that has begun fitted a node, which may come back."""
_OVER = (State.FINISHED, State.FAILED, State.CANCELLED)

_ENDINGS = {
    types_pb2.FINISH_REASON_STOP: Ending.STOP,
    types_pb2.FINISH_REASON_LENGTH: Ending.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: Ending.CANCELLED,
    types_pb2.FINISH_REASON_FAILED: Ending.FAILED,
}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all requests of a router share."""

    fleet: Fleet
    text: ModelText
    metrics: RouterMetrics
    now: Callable[[], float]
    patience_s: float
    failover_patience_s: float
    traces: Traces
    note_failure: Callable[[Failure], None]


class Books(Protocol):
    """What a request tells whoever keeps account of all of them."""

    def without_node(self, ongoing: Ongoing) -> None: ...

    def with_node(self, ongoing: Ongoing) -> None: ...

    def first_token(self, ongoing: Ongoing) -> None: ...

    def over(self, ongoing: Ongoing) -> None: ...


class Ongoing:
    def __init__(self, around: Surroundings, books: Books, generation: Generation, caller: Caller) -> None:
        self.generation = generation
        self.first_token_seen = False
        self.journey = Journey(RequestId(generation.request_id), len(generation.prompt), generation.sampling.max_tokens)
        detokenizer = around.text.detokenizer(
            generation.prompt[-CONTEXT_TOKENS:], skip_special_tokens=generation.sampling.skip_special_tokens
        )
        self.stream = AnswerStream(
            generation, detokenizer, lambda: self.handle(StopStringFound()), lambda: self.handle(ClientLeft())
        )
        self._around = around
        self._books = books
        self._metrics = around.metrics
        self._fleet = around.fleet
        self._trace = around.traces.of(caller, generation)
        self._failure = ""
        self._chain = prefix_chain(generation.prompt)
        self._placement: Placement | None = None
        self._follows: Lead | None = None
        """Whose KV of the same prompt the current attempt shares."""
        self._attempt_speaks = False
        """Whether the current attempt has said a token."""
        self._expected_s: float | None = None
        """Predicted time to first token, counted from the placement."""
        self._began_s = self._placed_s = self._last_token_s = around.now()
        ends = TimerEnds(
            deadline_passed=lambda: self.handle(DeadlinePassed()),
            patience_over=lambda: self.handle(PatienceOver()),
            look_again=self.find_place,
            failed=lambda: self.stream.fail(INTERNAL_ERROR),
        )
        self._timers = RequestTimers(generation.request_id, generation.deadline_s, around.now, ends)

    def begin(self) -> None:
        self._carry_out(self.journey.begin())

    def handle(self, event: Event) -> None:
        self._carry_out(self.journey.handle(event))

    def output(self, output: node_pb2.RequestOutput) -> None:
        """What a node says of one of this request's attempts."""
        tokens = output.tokens
        if self.stream.cached_tokens is None:
            self._hear_of_prompt(output)
        if self._attempt_speaks and not output.finish_reason and len(tokens) == 1:
            token = tokens[0]
            if self.journey.extend(output.attempt, token.position, token.token_id):
                now_s = self._around.now()
                self._metrics.inter_token_latency_seconds.observe(now_s - self._last_token_s)
                self._metrics.generation_tokens_total.inc()
                self._last_token_s = now_s
                self.stream.deliver_one(tokens)
                return
        ending = _ENDINGS.get(output.finish_reason)
        retry_after_s = output.retry_after_ms / 1000
        self.handle(Output(output.attempt, tokens, ending, output.failure, output.retryable, retry_after_s))

    def _hear_of_prompt(self, output: node_pb2.RequestOutput) -> None:
        stream = self.stream
        if output.HasField("prompt_account"):
            stream.cached_tokens = min(output.prompt_account.cached, len(self.generation.prompt))
        if stream.prompt_scores is not None and output.attempt == self.journey.attempt:
            stream.prompt_scores.take(output.prompt_logprobs)

    def find_place(self) -> None:
        """A node may have become usable for this request, which has none."""
        self._place(Place(frozenset(node for node, _ in self.journey.lost)))

    def leave(self, node: NodeId) -> bool:
        """Go on elsewhere, if another node has room now; False when there is none, and the attempt stays where it is."""
        journey = self.journey
        if journey.node != node or journey.state is not State.RUNNING:
            return True
        avoid = frozenset(lost for lost, _ in journey.lost)
        placed = self._fleet.place(
            journey.next_position,
            self._missing_tokens,
            self._chain,
            avoid,
            with_room=True,
            local_reason=self._local_reason,
        )
        if not isinstance(placed, Placement) or placed.decode.node == node:
            return False
        moved = Moved(journey.attempt, placed.decode.node)
        self._leave_node()
        self._follows = None
        self._take(placed)
        self.handle(moved)
        return True

    def account(self) -> Account:
        placement, journey = self._placement, self.journey
        return Account(
            request=self.generation.request_id,
            correlation=self.generation.correlation_id,
            attempt=journey.attempt,
            waits_on=journey.node,
            waits_for=journey.waiting_reason or ("last_token" if self.first_token_seen else "first_token"),
            since_s=round(self._around.now() - self._began_s, 3),
            expected_s=self._expected_s,
            computed_on=computed_on(placement) if placement is not None else None,
            placed_because=placement_reason(placement) if placement is not None else None,
            prompt_tokens=len(self.generation.prompt),
            answer_tokens=len(journey.log),
            lost=tuple(f"{node}: {reason}" for node, reason in journey.lost),
        )

    # --- what the journey decides

    def _carry_out(self, effects: list[Effect]) -> None:
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
                    self._fail(effect)
                case _:
                    assert_never(effect)
        if self.journey.state in _OVER:
            self._end()

    def _place(self, effect: Place) -> None:
        self._leave_node()
        self._timers.look_no_more()
        self._note_lost_attempt()
        if effect.after_s > 0:
            self._books.without_node(self)
            self._timers.look_again(effect.after_s)
            return
        placed: Placement | NoPlacement
        placed = self._beside_leader(effect.avoid) or self._fleet.place(
            self.journey.next_position, self._missing_tokens, self._chain, effect.avoid, local_reason=self._local_reason
        )
        if isinstance(placed, Placement) and not self.first_token_seen and self._too_late(placed.expected_s):
            placed = NoPlacement("deadline_unmeetable")
        match placed:
            case Placement():
                self._books.with_node(self)
                self._timers.wait_no_more()
                self._take(placed)
                self.handle(Placed(placed.decode.node))
            case NoPlacement(reason):
                self._books.without_node(self)
                self.handle(NoPlace(reason))
                if reason in _HOPELESS and not self.first_token_seen:
                    self.handle(PatienceOver())
                else:
                    around = self._around
                    patience_s = around.failover_patience_s if self.first_token_seen else around.patience_s
                    self._timers.wait_at_most(patience_s)

    def _beside_leader(self, avoid: frozenset[NodeId]) -> Placement | None:
        """With the choice of the same prompt that gets its KV, if there is one."""
        family = self.generation.family if not self._local_reason else None
        self._follows = family.lead_from(avoid) if family is not None else None
        return Placement(self._follows.decode, (), "fork") if self._follows is not None else None

    def _take(self, placed: Placement) -> None:
        self._placement, self._expected_s, self._placed_s = placed, placed.expected_s, self._around.now()
        self._metrics.placements_total.count(placement_reason(placed))
        if placed.expected_s is not None:
            self._metrics.predicted_time_to_first_token_seconds.observe(placed.expected_s)

    def _submit(self, effect: Begin) -> None:
        placement, fleet = self._placement, self._fleet
        assert placement is not None
        assert placement.decode.node == effect.node
        self._attempt_speaks = False
        generation, settled = self.generation, tuple(self.journey.log)
        attempt = AttemptId(self.journey.request, effect.attempt)
        family, follows = generation.family, self._follows
        tokens = 1 if follows is not None else self.journey.next_position
        fleet.begin(generation.request_id, placement, self._chain, tokens)
        if family is not None and follows is None:
            family.lead = Lead(generation.request_id, effect.attempt, placement.decode)
        submit = node_pb2.Submit(
            request_id=generation.request_id,
            attempt=effect.attempt,
            prompt_token_ids=generation.prompt,
            settled_token_ids=settled,
            sampling=sampling_message(self._sampling),
            choice_index=generation.choice_index,
            deadline_ms=max(1, round(self._timers.remaining_s * 1000)),
            prefill_choices=fleet.prefill_choices(placement, attempt, generation.prompt, settled),
            local_reason=placement.local_reason,
            traceparent=self._trace.attempt(effect.attempt, placement, effect.why.value),
            choices=family.choices if family is not None and follows is None else 1,
            fork_of=follows.request if follows is not None else "",
            fork_attempt=follows.attempt if follows is not None else 0,
        )
        self._metrics.request_attempts_total.count(effect.why.value)
        log.debug("attempt begins", node=effect.node, **naming(attempt), **self._trace.log_ids)
        link = fleet.link(effect.node)
        if link is None or not link.send(node_pb2.RouterMessage(submit=submit)):
            # Not now: the effects in hand come first.
            lost = AttemptLost(effect.attempt, "not_sent")
            self._timers.soon(lambda: self.handle(lost))

    def _cancel(self, effect: CancelAttempt) -> None:
        link = self._fleet.link(effect.node)
        if link is not None:
            request = self.generation.request_id
            cancel = node_pb2.Cancel(request_id=request, attempt=effect.attempt, reason=effect.reason)
            link.send(node_pb2.RouterMessage(cancel=cancel))

    def _deliver(self, effect: Deliver) -> None:
        metrics, now_s = self._metrics, self._around.now()
        count = len(effect.tokens)
        if not self._attempt_speaks:
            self._attempt_speaks = True
            self._fleet.first_token_seen(self.generation.request_id)
        if not self.first_token_seen:
            self.first_token_seen = True
            self._books.first_token(self)
            if self._local_reason:
                self.stream.fail(unavailable("the decode node gave no log probabilities of the prompt", "not_scored"))
            metrics.time_to_first_token_seconds.observe(now_s - self._began_s)
            self._trace.first_token(now_s - self._began_s)
            if self._expected_s:
                metrics.prediction_ratio.observe((now_s - self._placed_s) / self._expected_s)
        else:
            metrics.inter_token_latency_seconds.observe((now_s - self._last_token_s) / count)
        self._last_token_s = now_s
        metrics.generation_tokens_total.inc(count)
        self.stream.deliver(effect.tokens)

    def _fail(self, effect: Fail) -> None:
        if self.journey.attempt == 0:
            unmeetable = effect.reason == "deadline_unmeetable"
            self._metrics.requests_refused_total.count(effect.reason if unmeetable else "no_node")
        self.stream.fail(refusal_of(effect, begun=self.first_token_seen))
        if self.stream.finish_reason is None:
            self._failure = effect.reason
            self._note("request", effect.reason, self.journey.node or "")

    # --- the end

    def _end(self) -> None:
        if self._timers.stopped:
            return
        self._timers.stop()
        self._leave_node()
        self._books.over(self)
        seconds, reason = self._around.now() - self._began_s, self._end_reason()
        self._metrics.e2e_request_latency_seconds.observe(seconds)
        self._metrics.request_success_total.count(reason)
        self._trace.end(reason, self._failure, self.journey.attempt, len(self.journey.log), seconds)
        log.info(
            "request ended",
            request=self.generation.request_id,
            attempt=self.journey.attempt,
            **self._trace.log_ids,
            correlation=self.generation.correlation_id or None,
            state=self.journey.state.value,
            failure=self._failure or None,
            prompt_tokens=len(self.generation.prompt),
            tokens=len(self.journey.log),
            seconds=round(seconds, 4),
            lost=[f"{node}: {reason}" for node, reason in self.journey.lost] or None,
        )

    def _end_reason(self) -> str:
        """As the client reads it."""
        return self.stream.finish_reason or ("cancelled" if self.journey.state is State.CANCELLED else "failed")

    def _note_lost_attempt(self) -> None:
        """What is placed again, has just lost its node, or has waited since."""
        if self._trace.attempt_open:
            node, reason = self.journey.lost[-1]
            self._trace.attempt_over(reason)
            self._note("attempt", reason, node)

    def _note(self, what: str, reason: str, node: str) -> None:
        self._around.note_failure(Failure(what, reason, self.generation.request_id, node, self._around.now()))

    def _leave_node(self) -> None:
        if self._placement is not None:
            self._fleet.attempt_over(self.generation.request_id, self._placement.decode.node)
            self._placement = None
            if self.generation.family is not None:
                self.generation.family.left(self.generation.request_id)

    # --- what is left to do

    @property
    def _missing_tokens(self) -> int:
        return self.generation.sampling.max_tokens - len(self.journey.log)

    @property
    def _local_reason(self) -> str:
        """Why the decode node must compute the whole prompt itself; empty: it need not."""
        scores = self.stream.prompt_scores
        return "prompt_logprobs" if scores is not None and not scores.complete else ""

    @property
    def _sampling(self) -> Sampling:
        """Without what has been answered already."""
        sampling = self.generation.sampling
        scored = self.stream.prompt_scores is not None and self.stream.prompt_scores.complete
        return replace(sampling, prompt_logprobs=None) if scored else sampling

    def _too_late(self, expected_s: float | None) -> bool:
        """Whether even the first token would come after the deadline, so that all work would be for nothing."""
        return expected_s is not None and expected_s > self._timers.remaining_s
