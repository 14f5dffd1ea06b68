"""When to disaggregate: the predicted time to first token of a pair (P, D), against that of D alone. Pure.

    alone    = (queued on D + missing on D + streams x steps) / speed of D
    together = (queued on P + missing on P) / speed of P + exposed transfer
    exposed  = fixed cost + max(0, bytes / bandwidth - time in which P computes)
    delay    = weight x streams x missing on D / speed of D

Work and what is missing are counted in prompt tokens, speeds in tokens a second as nodes measure their own. Each step in which D
computes a part of the prompt also computes one token of every stream that it decodes. The transfer of one chunk overlaps the
computing of the next, so only what the wire needs longer than the computing is seen. `delay` is what the streams on D wait while
D computes the prompt, weighed: P spares them that, so the prompt goes to P where together < alone + delay. A node that has not
been measured yet is taken to be as fast as the other, and a lane that has not been to be fast: both get measured by being used.
Source and limits: docs/cost-model.md.

Must not know: nodes, clocks, protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIXED_TRANSFER_S = 0.003
"""Messages of the control plane, reservation and commit, which no bandwidth makes shorter (measured on one host)."""

STREAM_WAIT_WEIGHT = 0.1
"""What a second that a stream is slower by weighs against a second until a first token. With 1 the sum of all waiting would be
least, and first tokens would queue for P while D has time (measured: docs/cost-model.md)."""


class Choice(Enum):
    """Why a prompt is computed where it is; the values are labels of metrics."""

    PREFILL_IS_FASTER = "prefill_is_faster"
    DECODE_IS_FASTER = "decode_is_faster"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True, slots=True)
class Work:
    """What a node would have to do before the prompt's first token, in prompt tokens."""

    queued_tokens: int
    missing_tokens: int
    tokens_per_second: float
    """0: not measured yet."""
    streams: int = 0
    """Sequences that it decodes meanwhile."""
    step_tokens: int = 0
    """Most tokens of one step; 0: unknown, and then all prompts fit into one."""

    @property
    def shared_tokens(self) -> int:
        """Of the streams, in the steps that compute what is queued and the prompt."""
        tokens = self.queued_tokens + self.missing_tokens
        steps = -(-tokens // self.step_tokens) if self.step_tokens else 1
        return self.streams * steps


@dataclass(frozen=True, slots=True)
class Transfer:
    transfer_bytes: int
    bytes_per_second: float
    """0: not measured yet."""
    fixed_s: float = FIXED_TRANSFER_S


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds to the first token either way; None where nothing has been measured."""

    choice: Choice
    alone_s: float | None
    together_s: float | None
    delay_s: float = 0.0
    """What the streams on D would wait if it computed the prompt, weighed."""

    @property
    def remote(self) -> bool:
        return self.choice is not Choice.DECODE_IS_FASTER


def predict(decode: Work, prefill: Work, transfer: Transfer) -> Prediction:
    decode_speed = decode.tokens_per_second or prefill.tokens_per_second
    prefill_speed = prefill.tokens_per_second or decode.tokens_per_second
    if not prefill_speed:
        return Prediction(Choice.UNMEASURED, None, None)
    alone_s = alone(decode, decode_speed)
    computing_s = prefill.missing_tokens / prefill_speed
    wire_s = transfer.transfer_bytes / transfer.bytes_per_second if transfer.bytes_per_second else 0.0
    exposed_s = transfer.fixed_s + max(0.0, wire_s - computing_s)
    together_s = prefill.queued_tokens / prefill_speed + computing_s + exposed_s
    delay_s = STREAM_WAIT_WEIGHT * decode.streams * decode.missing_tokens / decode_speed
    choice = Choice.PREFILL_IS_FASTER if together_s < alone_s + delay_s else Choice.DECODE_IS_FASTER
    return Prediction(choice, alone_s, together_s, delay_s)


def alone(decode: Work, tokens_per_second: float) -> float:
    """Seconds until D has computed the prompt itself."""
    return (decode.queued_tokens + decode.missing_tokens + decode.shared_tokens) / tokens_per_second
