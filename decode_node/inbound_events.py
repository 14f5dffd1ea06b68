"""What one attempt on a decode node hears (events) and what it wants done (effects): the words of `inbound`'s table.

Must not know: clocks, sockets, protobuf, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.port import FinishReason, TokenSampled
from foundation.ids import BlockId
from kv_transfer.port import SettledToken

# Events: from the router, the transfers, the engine.


@dataclass(frozen=True, slots=True)
class Submitted:
    pass


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The router, its lapsed lease, a higher attempt or the deadline ends the attempt."""

    reason: str
    finish_reason: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    try_number: int
    end_position: int


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    try_number: int
    token: SettledToken | None


@dataclass(frozen=True, slots=True)
class Committed:
    try_number: int
    verified_positions: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    try_number: int
    reason: str
    verified_positions: int


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    block_ids: tuple[BlockId, ...]
    from_position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class BlocksUnavailable:
    reason: str


@dataclass(frozen=True, slots=True)
class Sampled:
    token: TokenSampled


@dataclass(frozen=True, slots=True)
class EngineFailed:
    reason: str


TransferEvent = BlocksWanted | FirstTokenArrived | Committed | TransferEnded
Event = Submitted | Cancelled | TransferEvent | BlocksReserved | BlocksUnavailable | Sampled | EngineFailed
EVENT_TYPES: tuple[type[Any], ...] = (
    Submitted,
    Cancelled,
    BlocksWanted,
    FirstTokenArrived,
    Committed,
    TransferEnded,
    BlocksReserved,
    BlocksUnavailable,
    Sampled,
    EngineFailed,
)


# Effects: carried out by the service, in order.


@dataclass(frozen=True, slots=True)
class SubmitToEngine:
    await_kv: bool


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    end_position: int


@dataclass(frozen=True, slots=True)
class StartEngine:
    computed_positions: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class ForgetInEngine:
    pass


@dataclass(frozen=True, slots=True)
class BeginTry:
    """Ask prefill choice number `try_number - 1`."""

    try_number: int


@dataclass(frozen=True, slots=True)
class GiveBlocks:
    try_number: int
    block_ids: tuple[BlockId, ...]
    from_position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class RefuseBlocks:
    try_number: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndTry:
    try_number: int
    reason: str


@dataclass(frozen=True, slots=True)
class EmitToken:
    position: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    prompt_account: tuple[int, int, int] | None = None
    """(cached, transferred, computed) positions of the history, once, when the engine knows them."""


@dataclass(frozen=True, slots=True)
class EmitEnd:
    """The attempt ends without a further token."""

    finish_reason: FinishReason
    reason: str


@dataclass(frozen=True, slots=True)
class CountLocalPrefill:
    reason: str
    recomputed_positions: int


@dataclass(frozen=True, slots=True)
class CountDropped:
    """Something late or stale changed nothing."""

    reason: str


Effect = (
    SubmitToEngine
    | ReserveBlocks
    | StartEngine
    | ForgetInEngine
    | BeginTry
    | GiveBlocks
    | RefuseBlocks
    | EndTry
    | EmitToken
    | EmitEnd
    | CountLocalPrefill
    | CountDropped
)
