"""One attempt's spans on its decode node: the attempt itself, and each try to get its KV from a prefill node.

Must not know: how spans are recorded, the attempt's table.
"""

from __future__ import annotations

from decant_proto.v1 import node_pb2

from foundation.ids import AttemptId
from foundation.tracing import NO_SPAN, Span, Tracer
from kv_transfer.port import TransferAccount


class AttemptTrace:
    def __init__(self, tracer: Tracer, attempt: AttemptId, submit: node_pb2.Submit) -> None:
        self._tracer = tracer
        self._attempt = tracer.begin(
            "decode",
            submit.traceparent,
            "server",
            {
                "gen_ai.request.id": attempt.request,
                "gen_ai.usage.input_tokens": len(submit.prompt_token_ids),
                "decant.attempt": attempt.attempt,
                "decant.settled_tokens": len(submit.settled_token_ids),
            },
        )
        self._transfer: Span = NO_SPAN
        self._failure = ""

    @property
    def log_ids(self) -> dict[str, str]:
        return self._attempt.log_ids

    def transfer(self, try_number: int, prefill_node: str) -> str:
        """A try begins; the trace context for its prefill node."""
        self._transfer = self._tracer.begin(
            "transfer",
            self._attempt.traceparent,
            "client",
            {"decant.transfer.try": try_number, "decant.prefill_node": prefill_node},
        )
        return self._transfer.traceparent

    def transfer_over(self, account: TransferAccount, failure: str) -> None:
        """`failure`: why not all of its KV came; what is missing is then computed here, or asked of the next."""
        self._transfer.set(
            {
                "decant.transfer.bytes": account.payload_bytes,
                "decant.transfer.parcels": account.parcels,
                "decant.transfer.lane": account.lane,
                "decant.transfer.from_position": account.from_position,
                "decant.transfer.verified_positions": account.verified_positions,
            }
        )
        self._transfer.end(failure)

    def local_prefill(self, reason: str, recomputed: int) -> None:
        self._attempt.event(
            "local_prefill", {"decant.fallback.reason": reason, "decant.fallback.recomputed_tokens": recomputed}
        )

    def first_token(self, after_s: float) -> None:
        self._attempt.event("first_token")
        self._attempt.set({"gen_ai.latency.time_to_first_token": after_s})

    def prompt(self, cached: int, transferred: int, computed: int) -> None:
        """Where the prompt's KV came from, in tokens."""
        self._attempt.set(
            {
                "decant.prompt.cached_tokens": cached,
                "decant.prompt.transferred_tokens": transferred,
                "decant.prompt.computed_tokens": computed,
            }
        )

    def failed(self, reason: str) -> None:
        self._failure = reason

    def end(self) -> None:
        self._attempt.end(self._failure)
