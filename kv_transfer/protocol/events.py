"""All that can happen to a side of the protocol: what `handle(state, event)` takes.

Completions come from the rim (`kv_transfer.driver`), once each, in the order in which they happened. Nothing here carries
a clock: a deadline that has passed is an event as well (`Silent`, `Stalled`, `LeaseExpired`; see `deadlines.py`).
Random numbers come in as fields.

Must not know: sockets, tensors, how an event came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from foundation.ids import CreditNumber, NodeId, SessionNonce, SlotIndex, TransferId
from kv_transfer.port import BeginTransfer, SettledToken
from kv_transfer.protocol.messages import Envelope

# --- streams, lanes, time: both sides -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A control stream to the peer stands; the one before it, if any, was reported lost.

    D: the dial succeeded. P: the peer's first message, a Hello, has come in and follows as `MessageReceived`.
    `fresh_session` is a new random 64-bit number (D only; P passes 0).
    """

    peer: NodeId
    fresh_session: int


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The control stream broke; after it no message of that stream is reported."""

    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class DialRefused:
    """D: no stream, and somebody has said so: the port is closed, the name unknown, the server another one. Nobody's silence is
    reported by this; dialling goes on."""

    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """`ticket_refusal` says why an Ask's ticket is not valid ("" for a valid one, and for every other message)."""

    peer: NodeId
    envelope: Envelope
    ticket_refusal: str = ""


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """The UCX endpoint of this session stands and has passed its self-test.

    D: the arena has been drawn: `slots` slots of `slot_bytes` each; `nonce` is a new random 40-bit number.
    """

    peer: NodeId
    session: int
    nonce: SessionNonce
    slots: int
    slot_bytes: int
    lane: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """No lane for this session: unreachable, refused by the self-test, or no staging memory left for an arena."""

    peer: NodeId
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndpointLost:
    """The session's UCX endpoint is broken. No fence: bytes may still land."""

    peer: NodeId
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """Proof that the session's operations are over: on D nothing can write into its arena any more, on P nothing reads
    its sending slots and the device is synchronised. Minted only by a transport."""

    peer: NodeId
    session: int


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing was heard of the peer, or no session came about, within the silence limit."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Idle:
    """The session has had no transfer for the idle limit."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Stalled:
    """The progress that this transfer's state waits for did not come within its limit."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Beat:
    """Time for a heartbeat to every peer. `renew`: and time to renew leases."""

    engine_steps: int
    has_work: bool
    renew: bool


# --- on the decode node -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    request: BeginTransfer


@dataclass(frozen=True, slots=True)
class Reserved:
    """The node holds blocks for [0, end_position), of which [0, from_position) are filled from its own cache.
    `end_position` is the one that `NodeReserve` named."""

    transfer: TransferId
    from_position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The request needs this transfer no more (cancelled, done, past its deadline)."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    """D's own receive completed: the slot holds a message."""

    peer: NodeId
    session: int
    credit: CreditNumber


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The receive is over, its operation will write nothing more, and what it left is unusable (truncated, or the post was
    refused). A receive that failed for its endpoint's sake is not over: that is `EndpointLost`."""

    peer: NodeId
    session: int
    credit: CreditNumber
    reason: str


@dataclass(frozen=True, slots=True)
class ReceiveCancelled:
    """A `CancelReceive` took effect before any match: the slot was not touched."""

    peer: NodeId
    session: int
    credit: CreditNumber


@dataclass(frozen=True, slots=True)
class Scattered:
    """Verify + scatter of one slot has finished on the device. `digest` is what D computed under its own seed from what it
    stored; `refusal` is "" or says why it is not the parcel that was granted (digest, length, header)."""

    peer: NodeId
    session: int
    credit: CreditNumber
    digest: int
    refusal: str = ""


# --- on the prefill node ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillReserved:
    """P's node holds blocks for all of [0, expected_positions); [0, cached_positions) are computed already."""

    transfer: TransferId
    cached_positions: int
    expected_positions: int


@dataclass(frozen=True, slots=True)
class PrefillRefused:
    transfer: TransferId
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """KV of layers [0, end_layer) of [0, positions) has been written, by a step that still computes later layers; all layers of
    what came before it have been. Never says so of all layers: only `Computed` does, for the step may still fail."""

    transfer: TransferId
    positions: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of [0, positions) has been written, by steps that have ended well."""

    transfer: TransferId
    positions: int


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """One token for each choice; None: this P cannot apply the request's sampling."""

    transfer: TransferId
    tokens: tuple[SettledToken, ...] | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """A parcel lies in its sending slot, under its seeded digest. `refusal`: "" or why it must not be sent (an owner word
    did not match before or after reading)."""

    slot: SlotIndex
    digest: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """Nothing reads the sending slot any more. Says nothing about D's memory."""

    slot: SlotIndex


@dataclass(frozen=True, slots=True)
class SendRefused:
    """The transport could not start the send: not one byte of it has left, nothing of it can match D's receive."""

    slot: SlotIndex
    reason: str


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Nothing reads the sending slot any more; D may hold all, some or none of it. The session's endpoint is broken."""

    slot: SlotIndex
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """D has not renewed this transfer's lease within the lease time."""

    transfer: TransferId


PairEvent: TypeAlias = (
    StreamOpened | StreamLost | MessageReceived | LaneOpened | LaneFailed | EndpointLost | Fenced | Silent | Idle
)
DecodeEvent: TypeAlias = (
    PairEvent
    | Stalled
    | Beat
    | DialRefused
    | Begin
    | Reserved
    | Unavailable
    | End
    | Landed
    | ReceiveFailed
    | ReceiveCancelled
    | Scattered
)
PrefillEvent: TypeAlias = (
    PairEvent
    | Stalled
    | Beat
    | PrefillReserved
    | PrefillRefused
    | LayersComputed
    | Computed
    | TokenSampled
    | PrefillFailed
    | Gathered
    | Sent
    | SendRefused
    | SendFailed
    | LeaseExpired
)
