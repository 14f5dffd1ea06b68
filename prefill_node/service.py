"""A prefill node's requests: what a transfer asks for becomes work of the engine, and the engine's progress goes back.

The engine's request carries the transfer's name. Its blocks are the transfer's from `PrefillReserved` until `released`;
only then is the engine told to keep (ReleaseKv) or to forget (Cancel) them. The table here says how far each transfer is.
Everything happens on the asyncio thread and never waits.

Must not know: how KV travels, how it is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from decant_proto.v1 import node_pb2, types_pb2
from google.protobuf.message import DecodeError

from engine import port as engine_port
from engine.config import EngineConfig
from engine.port import Cancel, EngineEvent, Mode, ReleaseKv, RequestKey, Submit
from foundation.ids import TransferId
from foundation.log import get_logger, naming
from foundation.metrics import NodeMetrics
from foundation.tracing import NO_TRACER, Attributes, Span, Tracer
from kv_transfer.port import PrefillRequest, PrefillTransfers, SettledToken
from node.detail import RecentFailures
from node.router_stream import Attachment
from node.wire import sampling_from_wire, unsound_sampling

WAITING_A_SEAT = 4
"""Requests that may wait for each sequence of a step; beyond that an Ask is refused with a retry hint."""
RETRY_AFTER_S = 1.0
CONTEXT_LIMITS = frozenset({"prompt_too_long", "prompt_exceeds_kv_cache", "prompt_empty", "nothing_to_generate"})

log = get_logger()


class Stage(Enum):
    QUEUED = "queued"
    """The engine has it and holds no block for the transfer yet."""
    COMPUTING = "computing"
    """Blocks are the transfer's; some KV is still missing."""
    COMPUTED = "computed"
    """All KV stands, and the first token was drawn where any had to be computed."""
    FAILED = "failed"
    """The engine gave it up; the transfer has not released it yet."""


@dataclass(slots=True, eq=False)
class _Prefill:
    transfer: TransferId
    length: int
    declined: bool
    """The decode node draws the first token."""
    arrived_at: float
    span: Span
    stage: Stage = Stage.QUEUED


def request_key(transfer: TransferId) -> RequestKey:
    return RequestKey(str(transfer))


class PrefillService:
    """Implements `kv_transfer.port.PrefillListener` and, for routers, `node.router_stream.RequestHandler`."""

    def __init__(
        self,
        post: Callable[[engine_port.Command], None],
        config: EngineConfig,
        vocabulary_size: int,
        metrics: NodeMetrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._tracer = tracer
        self._post = post
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._metrics = metrics
        self._transfers: PrefillTransfers | None = None
        self._loop = asyncio.get_running_loop()
        self._prefills: dict[RequestKey, _Prefill] = {}
        self.failures = RecentFailures(self._loop.time)
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def use(self, transfers: PrefillTransfers) -> None:
        self._transfers = transfers

    def drain(self) -> None:
        """New Asks are refused from now on; `idle` is set when the last transfer has been released."""
        self.draining = True

    # From the transfers.

    def prefill(self, request: PrefillRequest) -> None:
        transfers = self._answerer()
        sampling = types_pb2.SamplingParameters()
        try:
            sampling.ParseFromString(request.sampling)
        except DecodeError:
            transfers.refuse(request.transfer, "invalid_sampling", 0.0)
            return
        refusal, retry_after_s = self._refusal(request, sampling)
        if refusal is not None:
            span = self._begin_span(request)
            log.info("prefill refused", reason=refusal, **naming(request.transfer), **span.log_ids)
            span.end(f"refused: {refusal}")
            transfers.refuse(request.transfer, refusal, retry_after_s)
            return
        key = request_key(request.transfer)
        assert key not in self._prefills, f"{key} asked twice"
        declined = request.choices > 1 or bool(sampling.grammar)
        length = len(request.prompt) + len(request.settled)
        span = self._begin_span(request)
        self._prefills[key] = _Prefill(request.transfer, length, declined, self._loop.time(), span)
        self.idle.clear()
        self._metrics.prompt_tokens_total.inc(len(request.prompt))
        self._post(
            Submit(
                key=key,
                prompt=request.prompt,
                sampling=replace(sampling_from_wire(sampling), grammar=""),
                mode=Mode.PREFILL_ONLY,
                settled=request.settled,
                choice_index=sampling.choice_index,
            )
        )

    def _begin_span(self, request: PrefillRequest) -> Span:
        attributes: Attributes = {
            "gen_ai.request.id": request.transfer.request,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "decant.attempt": request.transfer.attempt,
            "decant.transfer.try": request.transfer.try_number,
        }
        return self._tracer.begin("prefill", request.traceparent, "server", attributes)

    def _refusal(self, request: PrefillRequest, sampling: types_pb2.SamplingParameters) -> tuple[str | None, float]:
        if self.draining:
            return "draining", RETRY_AFTER_S
        if len(self._prefills) >= (1 + WAITING_A_SEAT) * self._config.max_num_seqs:
            return "overloaded", RETRY_AFTER_S
        if sampling.max_tokens < 1 or unsound_sampling(sampling, self._vocabulary_size) is not None:
            return "invalid_sampling", 0.0
        if not request.prompt:
            return "prompt_empty", 0.0
        if max(request.prompt + request.settled) >= self._vocabulary_size:
            return "token_outside_vocabulary", 0.0
        return None, 0.0

    def released(self, transfer: TransferId, reason: str) -> None:
        prefill = self._prefills.pop(request_key(transfer), None)
        if prefill is None:
            return
        match prefill.stage:
            case Stage.COMPUTED:
                self._post(ReleaseKv(request_key(transfer)))
            case Stage.QUEUED | Stage.COMPUTING:
                self._post(Cancel(request_key(transfer)))
            case Stage.FAILED:
                pass
            case _:
                assert_never(prefill.stage)
        self._metrics.e2e_request_latency_seconds.observe(self._loop.time() - prefill.arrived_at)
        prefill.span.set({"decant.released": reason})
        prefill.span.end("" if prefill.stage is Stage.COMPUTED else reason)
        if not self._prefills:
            self.idle.set()

    # From the engine.

    def engine_events(self, events: Sequence[EngineEvent]) -> None:
        """All events of one step; unknown keys are transfers that were released before the engine knew."""
        for event in events:
            prefill = self._prefills.get(event.key)
            if prefill is None or prefill.stage is Stage.FAILED:
                continue
            match event:
                case engine_port.PrefillReserved():
                    self._reserved(prefill, event)
                case engine_port.KvLayersComputed(computed_positions=positions, end_layer=end_layer):
                    self._answerer().layers_computed(prefill.transfer, positions, end_layer)
                case engine_port.KvComputed(computed_positions=positions):
                    self._answerer().computed(prefill.transfer, positions)
                case engine_port.TokenSampled():
                    self._sampled(prefill, event)
                case engine_port.RequestFailed(reason=reason):
                    self._failed(prefill, reason)
                case engine_port.KvReserved() | engine_port.KvUnavailable() | engine_port.PromptScored():
                    raise AssertionError(f"{type(event).__name__} on a prefill node")
                case _:
                    assert_never(event)

    def _reserved(self, prefill: _Prefill, event: engine_port.PrefillReserved) -> None:
        prefill.stage = Stage.COMPUTING
        self._metrics.prefix_cached_tokens_total.inc(event.cached_positions)
        prefill.span.event("blocks_reserved", {"decant.prompt.cached_tokens": event.cached_positions})
        self._answerer().reserved(
            prefill.transfer, event.block_ids, event.owner_words, event.cached_positions, prefill.length
        )
        if event.cached_positions == prefill.length:
            prefill.declined = True
            self._computed(prefill)
            self._answerer().first_token(prefill.transfer, None)

    def _sampled(self, prefill: _Prefill, event: engine_port.TokenSampled) -> None:
        """The engine says KvComputed for the whole history before it says the token."""
        self._computed(prefill)
        self._metrics.time_to_first_token_seconds.observe(self._loop.time() - prefill.arrived_at)
        if prefill.declined:
            self._answerer().first_token(prefill.transfer, None)
            return
        self._metrics.generation_tokens_total.inc()
        top = tuple((entry.token_id, entry.logprob) for entry in event.top_logprobs)
        self._answerer().first_token(prefill.transfer, (SettledToken(event.token_id, event.logprob, top),))

    def _computed(self, prefill: _Prefill) -> None:
        prefill.stage = Stage.COMPUTED
        prefill.span.event("first_token", {"decant.declined": prefill.declined})

    def _failed(self, prefill: _Prefill, reason: str) -> None:
        log.warning("prefill failed", reason=reason, **naming(prefill.transfer), **prefill.span.log_ids)
        self.failures.note("prefill", reason, prefill.transfer.request, "")
        prefill.span.end(reason)
        if prefill.stage is not Stage.QUEUED:
            prefill.stage = Stage.FAILED
            self._answerer().failed(prefill.transfer, reason)
            return
        prefill.stage = Stage.FAILED
        retry_after_s = 0.0 if reason in CONTEXT_LIMITS else RETRY_AFTER_S
        self._answerer().refuse(prefill.transfer, reason, retry_after_s)

    def _answerer(self) -> PrefillTransfers:
        assert self._transfers is not None, "the transfers are given before they may ask"
        return self._transfers

    # From routers, who only listen here: a prefill node takes its work from decode nodes.

    def submit(self, attachment: Attachment, message: node_pb2.Submit) -> None:
        failure = node_pb2.RequestOutput(
            request_id=message.request_id,
            attempt=message.attempt,
            finish_reason=types_pb2.FINISH_REASON_FAILED,
            failure="not_a_decode_node",
            retryable=True,
        )
        attachment.send(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=[failure])))

    def cancel(self, attachment: Attachment, message: node_pb2.Cancel) -> None:
        self._metrics.dropped_total.count("stale_attempt")

    def detached(self, attachment: Attachment, reason: str) -> None:
        """Its requests come over the transfers; nothing ends here."""
