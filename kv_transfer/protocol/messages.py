"""What the two sides of a pair say to each other on the control plane; docs/protocol.md tells when.

Each class mirrors the message of the same name in proto/decant_proto/v1/transfer.proto; `kv_transfer.wire` translates.
Within one stream messages arrive in order. Every message travels in an `Envelope` that names both incarnations.

Must not know: protobuf, gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, NodeId, SessionNonce, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.port import SettledToken

# --- about the pair -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every stream, from both sides. P echoes D's session number and adds its data address."""

    node_id: NodeId
    protocol_major: int
    protocol_minor: int
    fingerprint: Fingerprint
    layout: KvLayout
    slot_bytes: int
    step_limit_s: float
    data_address: str
    session: int
    digest: str


@dataclass(frozen=True, slots=True)
class HelloRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class LaneReport:
    """The lane's self-test, as measured by the side that received."""

    lane: str
    gigabytes_per_second: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    engine_steps: int
    has_work: bool
    leases: tuple[TransferId, ...] = ()


@dataclass(frozen=True, slots=True)
class WrongIncarnation:
    current: Incarnation


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """From D: this session is over, close your endpoint. From P: it is closed and the device is synchronised (a fence)."""

    session: int


@dataclass(frozen=True, slots=True)
class SyncedTransfer:
    """`credits`: D names how many it has granted, P how many it has received."""

    transfer: TransferId
    state: str
    credits: int
    sealed: bool
    first_token: bool


@dataclass(frozen=True, slots=True)
class Sync:
    """After the Hello on a stream that continues a session: all live transfers, as this side sees them."""

    transfers: tuple[SyncedTransfer, ...]


# --- about one transfer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """`sampling` is a serialized decant.v1.SamplingParameters."""

    transfer: TransferId
    ticket: bytes
    prompt: tuple[int, ...]
    settled: tuple[int, ...]
    sampling: bytes
    choices: int
    deadline_s: float
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Refused:
    transfer: TransferId
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """KV of [0, ready_positions) is computed, and will be of [0, expected_positions). Both only grow or stay."""

    transfer: TransferId
    ready_positions: int
    expected_positions: int


@dataclass(frozen=True, slots=True)
class Credit:
    number: CreditNumber
    length: int


@dataclass(frozen=True, slots=True)
class Credits:
    """The i-th credit carries parcel `first_parcel` + i of the cut that `from_position` and `slot_bytes` fix.

    The first one follows the reservation at once, even with no credit in it.
    """

    transfer: TransferId
    from_position: int
    slot_bytes: int
    first_parcel: int
    credits: tuple[Credit, ...]
    nonce: SessionNonce


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One token for each choice, all at `position`; None: declined. Always before `Sealed`."""

    transfer: TransferId
    position: int
    tokens: tuple[SettledToken, ...] | None


@dataclass(frozen=True, slots=True)
class SealedParcel:
    name: ParcelName
    digest: int


@dataclass(frozen=True, slots=True)
class Sealed:
    transfer: TransferId
    parcels: tuple[SealedParcel, ...]
    digest_of_all: int


@dataclass(frozen=True, slots=True)
class Committed:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Released:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Abort:
    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The credits that P has used or is using; it will start no further send of this transfer. D answers with Gone."""

    transfer: TransferId
    used_credits: tuple[CreditNumber, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """The sender of this knows no such transfer (any more). Terminal for its receiver."""

    transfer: TransferId


PairMessage: TypeAlias = Hello | HelloRefused | LaneReport | Heartbeat | WrongIncarnation | SessionClosed | Sync
FromDecode: TypeAlias = Ask | Credits | Committed | Abort
FromPrefill: TypeAlias = Accepted | Refused | Offer | FirstToken | Sealed | Released | Failed | Drained
TransferMessage: TypeAlias = FromDecode | FromPrefill | Gone
Message: TypeAlias = PairMessage | TransferMessage


@dataclass(frozen=True, slots=True)
class Envelope:
    """`addressee` is 0 only in D's first Hello, when it does not know yet whom it dials."""

    sender: Incarnation
    addressee: Incarnation
    message: Message
