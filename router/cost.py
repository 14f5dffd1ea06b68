"""When to disaggregate: the predicted time to first token of a pair (P, D), against that of D alone. Pure.

    alone    = work ahead on D / speed of D + missing on D / speed of D
    together = work ahead on P / speed of P + missing on P / speed of P + exposed transfer
    exposed  = fixed cost + max(0, bytes / bandwidth - time in which P computes)

Work and what is missing are counted in prompt tokens, speeds in tokens a second as nodes measure their own. The transfer of one
chunk overlaps the computing of the next, so only what the wire needs longer than the computing is seen. A node that has not
been measured yet is taken to be as fast as the other, and a lane that has not been to be fast: both get measured by being used.
The smaller time wins. Source and limits: docs/cost-model.md.

Must not know: nodes, clocks, protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIXED_TRANSFER_S = 0.003
"""Messages of the control plane, reservation and commit, which no bandwidth makes shorter (measured on one host)."""


class Choice(Enum):
    """Why a prompt is computed where it is; the values are labels of metrics."""

    PREFILL_IS_FASTER = "prefill_is_faster"
    DECODE_IS_FASTER = "decode_is_faster"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True, slots=True)
class Work:
    """What a node would have to do before the prompt's first token, in prompt tokens."""

    ahead_tokens: int
    missing_tokens: int
    tokens_per_second: float
    """0: not measured yet."""


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
    together_s = prefill.ahead_tokens / prefill_speed + computing_s + exposed_s
    choice = Choice.PREFILL_IS_FASTER if together_s < alone_s else Choice.DECODE_IS_FASTER
    return Prediction(choice, alone_s, together_s)


def alone(decode: Work, tokens_per_second: float) -> float:
    """Seconds until D has computed the prompt itself."""
    return (decode.ahead_tokens + decode.missing_tokens) / tokens_per_second
