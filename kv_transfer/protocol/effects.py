"""What a side of the protocol wants done: what `handle(state, event)` returns, to be executed in this order.

The rim (`kv_transfer.driver`) submits each effect and never waits for it; its completion comes back as an event.
Two orders matter and are kept by the rim: a `PostReceive` is posted before a later `Send` leaves, and a `Send` leaves
after the ones before it.

Must not know: how anything is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from foundation.ids import CreditNumber, NodeId, SessionNonce, SlotIndex, TransferId
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.port import SettledToken
from kv_transfer.protocol.messages import Ask, Envelope

# --- the pair -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStream:
    """D: dial until it succeeds (`StreamOpened`), with backoff, or until `CloseStream`."""

    peer: NodeId
    control_address: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End the control stream, or stop dialling, after what was sent before; no event of it follows."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Send:
    peer: NodeId
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Connect (D) or await (P, `data_address` empty) the session's endpoint, draw an arena (D), run the self-test.
    Answer with `LaneOpened` or `LaneFailed`."""

    peer: NodeId
    session: int
    data_address: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Destroy the session's endpoint. `Fenced` follows if the lane can prove it, on P always. Idempotent."""

    peer: NodeId
    session: int


@dataclass(frozen=True, slots=True)
class ReleaseArena:
    """D: nothing can touch the session's arena any more; its memory may be used again."""

    peer: NodeId
    session: int


@dataclass(frozen=True, slots=True)
class QuarantineArena:
    """D: the session is lost with unresolved credits; the arena waits for `ReleaseArena`. For metrics and readiness."""

    peer: NodeId
    session: int
    unresolved_credits: int


@dataclass(frozen=True, slots=True)
class LaneMeasured:
    """The other side's figure, for log and metrics."""

    peer: NodeId
    lane: str
    gigabytes_per_second: float


@dataclass(frozen=True, slots=True)
class Count:
    """Something that changed nothing, or a failure: a metric label. `peer` is whom it is about."""

    peer: NodeId
    reason: str


# --- data plane on D ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Post a receive of `length` bytes into the slot under tag (nonce, credit)."""

    peer: NodeId
    session: int
    nonce: SessionNonce
    credit: CreditNumber
    slot: SlotIndex
    length: int


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """This credit is known to be unused: no message will ever match. `ReceiveCancelled` (or `Landed`) follows."""

    peer: NodeId
    session: int
    credit: CreditNumber


@dataclass(frozen=True, slots=True)
class Scatter:
    """Verify the slot under the seed of D's own plan and scatter it into the transfer's blocks; `Scattered` follows."""

    peer: NodeId
    session: int
    credit: CreditNumber
    slot: SlotIndex
    transfer: TransferId
    parcel_index: int
    parcel: ParcelName


# --- data plane on P ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gather:
    """Gather the parcel into the sending slot, sealed under (session, credit); `Gathered` follows."""

    peer: NodeId
    session: int
    transfer: TransferId
    parcel_index: int
    parcel: ParcelName
    credit: CreditNumber
    slot: SlotIndex


@dataclass(frozen=True, slots=True)
class SendParcel:
    """Send the slot's first `length` bytes under tag (nonce, credit); `Sent`, `SendRefused` or `SendFailed` follows."""

    peer: NodeId
    session: int
    nonce: SessionNonce
    credit: CreditNumber
    slot: SlotIndex
    length: int


# --- towards D's node (kv_transfer.port.DecodeListener) -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeReserve:
    transfer: TransferId
    end_position: int


@dataclass(frozen=True, slots=True)
class NodeFirstToken:
    transfer: TransferId
    token: SettledToken | None


@dataclass(frozen=True, slots=True)
class NodeCommitted:
    transfer: TransferId
    from_position: int
    verified_positions: int
    parcels: int


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """No scatter into the transfer's blocks is open and none will be launched. [0, verified_positions) is proven."""

    transfer: TransferId
    reason: str
    from_position: int
    verified_positions: int
    parcels: int


# --- towards P's node (kv_transfer.port.PrefillListener) ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodePrefill:
    ask: Ask


@dataclass(frozen=True, slots=True)
class NodeReleased:
    """No gather of the transfer is open and none will be launched."""

    transfer: TransferId
    reason: str


PairEffect: TypeAlias = (
    OpenStream | CloseStream | Send | OpenLane | CloseSession | ReleaseArena | QuarantineArena | LaneMeasured | Count
)
DecodeEffect: TypeAlias = (
    PairEffect | PostReceive | CancelReceive | Scatter | NodeReserve | NodeFirstToken | NodeCommitted | NodeEnded
)
PrefillEffect: TypeAlias = PairEffect | Gather | SendParcel | NodePrefill | NodeReleased
