"""A decode node's requests: hears router, engine and transfers, asks `inbound` what to do, and does it.

One table entry for each attempt, from Submit until nothing here can touch its blocks any more. All tokens of one engine
step go to a router in one message. Everything happens on the asyncio thread and never waits. An effect that calls into the
transfers is always the last of its event, so that they may answer at once, within the call.

Must not know: how KV travels, how tokens are computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from decant_proto.v1 import node_pb2, types_pb2

from decode_node import inbound_events as on
from decode_node.attempt_trace import AttemptTrace
from decode_node.inbound import Inbound, Phase, handle, new_inbound
from decode_node.lane_rates import LaneRates
from decode_node.submission import facts_of, refused_submission, request_key, start_engine_request
from engine import port as engine_port
from engine.config import EngineConfig
from engine.port import Cancel, EngineEvent, FinishReason, ReserveKv, StartFromKv
from foundation.ids import AttemptId, NodeId, RequestId, TransferId
from foundation.log import get_logger, naming
from foundation.metrics import LOCAL_PREFILL_REASONS, NodeMetrics
from foundation.tracing import NO_TRACER, Tracer
from kv_transfer.port import BeginTransfer, DecodeTransfers, SettledToken, TransferAccount
from node.detail import RecentFailures
from node.health import LaneHealth
from node.router_stream import Attachment
from node.wire import FINISH_REASONS, token_to_wire

DEFAULT_DEADLINE_S = 600.0
ATTEMPTS_A_SEAT = 8
"""Attempts held for each sequence of a step; beyond that new ones are refused with a retry hint."""
RETRY_AFTER_S = 1.0
FINAL_FAILURES = frozenset(
    {"prompt_too_long", "invalid_grammar", "prompt_empty", "nothing_to_generate", "nothing_allowed", "deadline"}
)
"""Failures that would meet the attempt on every other node too."""

log = get_logger()


@dataclass(slots=True, eq=False)
class _Attempt:
    id: AttemptId
    attachment: Attachment
    submit: node_pb2.Submit
    prompt: tuple[int, ...]
    state: Inbound
    arrived_at: float
    deadline_at: float
    trace: AttemptTrace
    deadline: asyncio.TimerHandle | None = None
    last_token_at: float | None = None
    transferring_from: str = ""

    @property
    def key(self) -> engine_port.RequestKey:
        return request_key(self.id)


def reason_label(reason: str) -> str:
    """Of `refused: draining` the first word; what follows the colon is the peer's."""
    return reason.partition(":")[0]


class DecodeService:
    """Implements `node.router_stream.RequestHandler` and `kv_transfer.port.DecodeListener`."""

    def __init__(
        self,
        post: Callable[[engine_port.Command], None],
        config: EngineConfig,
        vocabulary_size: int,
        metrics: NodeMetrics,
        tracer: Tracer = NO_TRACER,
        lane_floor_bytes_per_second: float = 0.0,
    ) -> None:
        self._tracer = tracer
        self._post = post
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._metrics = metrics
        self._transfers: DecodeTransfers | None = None
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._by_key: dict[engine_port.RequestKey, _Attempt] = {}
        self._current: dict[RequestId, AttemptId] = {}
        self._outputs: dict[Attachment, list[node_pb2.RequestOutput]] = {}
        self.failures = RecentFailures(self._loop.time)
        self.lane_health = LaneHealth(self._loop.time, lane_floor_bytes_per_second)
        self.lane_rates = LaneRates(self._loop.time)
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def use(self, transfers: DecodeTransfers) -> None:
        self._transfers = transfers

    @property
    def attempts(self) -> int:
        return len(self._attempts)

    def drain(self) -> None:
        """New attempts are refused from now on; `idle` is set when the last one has ended."""
        self.draining = True

    # From the router.

    def submit(self, attachment: Attachment, message: node_pb2.Submit) -> None:
        attempt_id = AttemptId(RequestId(message.request_id), message.attempt)
        current = self._current.get(attempt_id.request)
        if current is not None and current.attempt >= attempt_id.attempt:
            self._metrics.dropped_total.count("stale_attempt")
            return
        prompt = tuple(message.prompt_token_ids[:])  # an item at a time takes half as long again
        refusal = refused_submission(message, prompt, self._vocabulary_size)
        if refusal is None and self._transfers is None and message.prefill_choices:
            refusal = "no_transfers"
        retry_after_s = 0.0
        if refusal is None and (self.draining or self.attempts >= ATTEMPTS_A_SEAT * self._config.max_num_seqs):
            refusal, retry_after_s = ("draining" if self.draining else "overloaded"), RETRY_AFTER_S
        if current is not None:
            self._event(self._attempts[current], on.Cancelled("superseded"))
        if refusal is not None:
            self._refuse(attachment, attempt_id, refusal, retry_after_s)
        else:
            self._open(attachment, attempt_id, message, prompt)
        self._flush()

    def _refuse(self, attachment: Attachment, attempt: AttemptId, reason: str, retry_after_s: float) -> None:
        log.warning("attempt refused", request=attempt.request, attempt=attempt.attempt, reason=reason)
        output = node_pb2.RequestOutput(
            request_id=attempt.request,
            attempt=attempt.attempt,
            finish_reason=types_pb2.FINISH_REASON_FAILED,
            failure=reason,
            retryable=retry_after_s > 0,
            retry_after_ms=round(retry_after_s * 1000),
        )
        self._outputs.setdefault(attachment, []).append(output)

    def _open(
        self, attachment: Attachment, attempt_id: AttemptId, message: node_pb2.Submit, prompt: tuple[int, ...]
    ) -> None:
        facts = facts_of(message, prompt, self._config)
        deadline_s = message.deadline_ms / 1000 or DEFAULT_DEADLINE_S
        now = self._loop.time()
        trace = AttemptTrace(self._tracer, attempt_id, message)
        attempt = _Attempt(attempt_id, attachment, message, prompt, new_inbound(facts), now, now + deadline_s, trace)
        attempt.deadline = self._loop.call_later(deadline_s, self._deadline_passed, attempt)
        self._attempts[attempt_id] = self._by_key[attempt.key] = attempt
        self._current[attempt_id.request] = attempt_id
        self.idle.clear()
        self._metrics.prompt_tokens_total.inc(len(prompt))
        self._event(attempt, on.Submitted())

    def cancel(self, attachment: Attachment, message: node_pb2.Cancel) -> None:
        attempt = self._attempts.get(AttemptId(RequestId(message.request_id), message.attempt))
        if attempt is None or attempt.attachment is not attachment:
            self._metrics.dropped_total.count("stale_attempt")
            return
        self._event(attempt, on.Cancelled(message.reason or "cancelled"))
        self._flush()

    def detached(self, attachment: Attachment, reason: str) -> None:
        for attempt in [attempt for attempt in self._attempts.values() if attempt.attachment is attachment]:
            self._event(attempt, on.Cancelled(reason))
        self._outputs.pop(attachment, None)

    def _deadline_passed(self, attempt: _Attempt) -> None:
        self._event(attempt, on.Cancelled("deadline", FinishReason.FAILED))
        self._flush()

    # From the transfers.

    def reserve(self, transfer: TransferId, end_position: int) -> None:
        self._transfer_event(transfer, on.BlocksWanted(transfer.try_number, end_position))

    def first_token(self, transfer: TransferId, token: SettledToken | None) -> None:
        self._transfer_event(transfer, on.FirstTokenArrived(transfer.try_number, token))

    def committed(self, transfer: TransferId, account: TransferAccount) -> None:
        self._metrics.kv_transfer_seconds.observe(account.seconds)
        attempt = self._attempts.get(transfer.attempt_id)
        if attempt is not None:
            self.lane_health.committed(NodeId(attempt.transferring_from))
            self.lane_rates.carried(NodeId(attempt.transferring_from), account.bytes_per_second)
            attempt.trace.transfer_over(account, "")
        self._transfer_event(transfer, on.Committed(transfer.try_number, account.verified_positions))

    def ended(self, transfer: TransferId, reason: str, account: TransferAccount) -> None:
        self._metrics.kv_transfer_seconds.observe(account.seconds)
        attempt = self._attempts.get(transfer.attempt_id)
        ids = attempt.trace.log_ids if attempt is not None else {}
        log.info("transfer ended", reason=reason, verified=account.verified_positions, **naming(transfer), **ids)
        if attempt is not None:
            attempt.trace.transfer_over(account, reason if reason != "done" else "")
            self.lane_health.ended(NodeId(attempt.transferring_from), reason_label(reason), account.seconds)
            self.lane_rates.carried(NodeId(attempt.transferring_from), account.bytes_per_second)
        if attempt is not None and attempt.state.phase is Phase.ENDING:
            if reason != "done":
                self._metrics.kv_transfer_failures_total.count("cancelled")
        else:
            self._metrics.kv_transfer_failures_total.count(reason_label(reason))
            peer = attempt.transferring_from if attempt is not None else ""
            self.failures.note("transfer", reason, transfer.request, peer)
        self._transfer_event(transfer, on.TransferEnded(transfer.try_number, reason, account.verified_positions))

    def _transfer_event(self, transfer: TransferId, event: on.TransferEvent) -> None:
        attempt = self._attempts.get(transfer.attempt_id)
        if attempt is None:
            self._metrics.dropped_total.count("unknown_transfer")
            return
        self._event(attempt, event)
        self._flush()

    # From the engine.

    def engine_events(self, events: Sequence[EngineEvent]) -> None:
        """All events of one step; unknown keys are requests that ended here before the engine knew."""
        for event in events:
            attempt = self._by_key.get(event.key)
            if attempt is None:
                continue
            match event:
                case engine_port.TokenSampled():
                    self._event(attempt, on.Sampled(event))
                case engine_port.PromptScored():
                    self._emit_prompt_logprobs(attempt, event)
                case engine_port.RequestFailed(reason=reason):
                    self._event(attempt, on.EngineFailed(reason))
                case engine_port.KvReserved():
                    reserved = on.BlocksReserved(event.block_ids, event.from_position, event.end_position)
                    self._event(attempt, reserved)
                case engine_port.KvUnavailable(reason=reason):
                    self._event(attempt, on.BlocksUnavailable(reason))
                case engine_port.PrefillReserved() | engine_port.KvLayersComputed() | engine_port.KvComputed():
                    raise AssertionError(f"{type(event).__name__} on a decode node")
                case _:
                    assert_never(event)
        self._flush()

    # What the table decided.

    def _event(self, attempt: _Attempt, event: on.Event) -> None:
        attempt.state, effects = handle(attempt.state, event)
        if attempt.state.phase is Phase.ENDED:
            self._forget(attempt)
        for effect in effects:
            self._do(attempt, effect)

    def _forget(self, attempt: _Attempt) -> None:
        if self._attempts.pop(attempt.id, None) is None:
            return
        del self._by_key[attempt.key]
        if self._current.get(attempt.id.request) == attempt.id:
            del self._current[attempt.id.request]
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        attempt.trace.end()
        if not self._attempts:
            self.idle.set()

    def _do(self, attempt: _Attempt, effect: on.Effect) -> None:
        match effect:
            case on.SubmitToEngine(await_kv=await_kv):
                self._post(start_engine_request(attempt.key, attempt.submit, attempt.prompt, await_kv))
            case on.ReserveBlocks(end_position=end_position):
                self._post(ReserveKv(attempt.key, end_position))
            case on.StartEngine(computed_positions=computed, first_token=first_token):
                self._post(StartFromKv(attempt.key, computed, first_token))
            case on.ForgetInEngine():
                self._post(Cancel(attempt.key))
            case on.BeginTry(try_number=try_number):
                self._begin(attempt, try_number)
            case on.GiveBlocks():
                transfer = TransferId(*attempt.id, effect.try_number)
                assert self._transfers is not None
                self._transfers.reserved(transfer, effect.block_ids, effect.from_position, effect.end_position)
            case on.RefuseBlocks(try_number=try_number, reason=reason):
                assert self._transfers is not None
                self._transfers.unavailable(TransferId(*attempt.id, try_number), reason)
            case on.EndTry(try_number=try_number, reason=reason):
                assert self._transfers is not None
                self._transfers.end(TransferId(*attempt.id, try_number), reason)
            case on.EmitToken():
                self._emit_token(attempt, effect)
            case on.EmitEnd(finish_reason=finish_reason, reason=reason):
                self._emit_end(attempt, finish_reason, reason)
            case on.CountLocalPrefill(reason=reason, recomputed_positions=recomputed):
                label = reason_label(reason)
                known = label in LOCAL_PREFILL_REASONS or attempt.state.try_number == 0
                self._metrics.local_prefill_total.count(label if known else "transfer_failed")
                self._metrics.kv_recomputed_tokens_total.inc(recomputed)
                attempt.trace.local_prefill(reason, recomputed)
            case on.CountDropped(reason=reason):
                self._metrics.dropped_total.count(reason)
            case _:
                assert_never(effect)

    def _begin(self, attempt: _Attempt, try_number: int) -> None:
        choice = attempt.submit.prefill_choices[try_number - 1]
        sampling = types_pb2.SamplingParameters()
        sampling.CopyFrom(attempt.submit.sampling)
        sampling.choice_index = attempt.submit.choice_index
        attempt.transferring_from = choice.node_id
        traceparent = attempt.trace.transfer(try_number, choice.node_id)
        assert self._transfers is not None
        self._transfers.begin(
            BeginTransfer(
                transfer=TransferId(*attempt.id, try_number),
                prefill_node=NodeId(choice.node_id),
                control_address=choice.control_address,
                ticket=choice.ticket,
                prompt=attempt.prompt,
                settled=tuple(attempt.submit.settled_token_ids),
                sampling=sampling.SerializeToString(),
                deadline_s=max(0.001, attempt.deadline_at - self._loop.time()),
                traceparent=traceparent,
                choices=max(1, attempt.submit.choices),
            )
        )

    # To the router.

    def _emit_prompt_logprobs(self, attempt: _Attempt, scored: engine_port.PromptScored) -> None:
        output = node_pb2.RequestOutput(
            request_id=attempt.id.request,
            attempt=attempt.id.attempt,
            prompt_logprobs=types_pb2.PromptLogprobs(
                position=scored.position,
                logprobs=scored.logprobs,
                ranks=scored.ranks,
                top_token_ids=scored.top_token_ids,
                top_logprobs=scored.top_logprobs,
            ),
        )
        self._outputs.setdefault(attempt.attachment, []).append(output)

    def _emit_token(self, attempt: _Attempt, token: on.EmitToken) -> None:
        output = node_pb2.RequestOutput(
            request_id=attempt.id.request,
            attempt=attempt.id.attempt,
            tokens=[token_to_wire(token.position, token.token_id, token.logprob, token.top_logprobs)],
        )
        now = self._loop.time()
        self._metrics.generation_tokens_total.inc()
        if attempt.last_token_at is None:
            self._metrics.time_to_first_token_seconds.observe(now - attempt.arrived_at)
            attempt.trace.first_token(now - attempt.arrived_at)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - attempt.last_token_at)
        attempt.last_token_at = now
        if token.prompt_account is not None:
            cached, transferred, computed = token.prompt_account
            self._metrics.prefix_cached_tokens_total.inc(cached)
            attempt.trace.prompt(cached, transferred, computed)
            output.prompt_account.cached = cached
            output.prompt_account.transferred = transferred
            output.prompt_account.computed = computed
            output.prompt_account.prefill_node = attempt.transferring_from if transferred else ""
        if token.finish_reason is not None:
            output.finish_reason = FINISH_REASONS[token.finish_reason]
            self._count_end(attempt, token.finish_reason)
        self._outputs.setdefault(attempt.attachment, []).append(output)

    def _emit_end(self, attempt: _Attempt, finish_reason: FinishReason, reason: str) -> None:
        log.info("attempt ended", reason=reason, **naming(attempt.id), **attempt.trace.log_ids)
        output = node_pb2.RequestOutput(
            request_id=attempt.id.request, attempt=attempt.id.attempt, finish_reason=FINISH_REASONS[finish_reason]
        )
        if finish_reason is FinishReason.FAILED:
            attempt.trace.failed(reason)
            self.failures.note("attempt", reason, attempt.id.request, "")
            output.failure = reason
            output.retryable = reason not in FINAL_FAILURES
        self._count_end(attempt, finish_reason)
        self._outputs.setdefault(attempt.attachment, []).append(output)

    def _count_end(self, attempt: _Attempt, finish_reason: FinishReason) -> None:
        self._metrics.request_success_total.count(finish_reason.value)
        self._metrics.e2e_request_latency_seconds.observe(self._loop.time() - attempt.arrived_at)

    def _flush(self) -> None:
        for attachment, outputs in self._outputs.items():
            attachment.send(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=outputs)))
        self._outputs.clear()
