"""D's half of one transfer: its states, its table, and what it decides alone.

    ASKED -> RESERVED -> LANDING -> COMMITTED -> CLOSED
    ASKED | RESERVED | LANDING -> ENDING -> CLOSED

It owns the blocks that the node has reserved, from RESERVED until the node has been told `committed` or `ended`. What it
has been granted lives in the arena (`credit`), not here. CLOSED is never stored: a closed transfer is forgotten, and
whoever still speaks of it is answered `Gone`.

Must not know: slots, peers, other transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import auto

from foundation.ids import NodeId, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName, partition_error, verified_prefix
from kv_transfer.port import BeginTransfer
from kv_transfer.protocol.digests import Digests
from kv_transfer.protocol.events import End, Reserved, Stalled, Unavailable
from kv_transfer.protocol.messages import (
    Accepted,
    Drained,
    Failed,
    FirstToken,
    Gone,
    Offer,
    Refused,
    Released,
    Sealed,
    SyncedTransfer,
)
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.state import State


class DecodeState(State):
    ASKED = auto()
    RESERVED = auto()
    LANDING = auto()
    COMMITTED = auto()
    ENDING = auto()
    CLOSED = auto()


class CreditsSent:
    """P has been told from_position: the cut is fixed."""


class ParcelVerified:
    """A parcel was verified, scattered, and the device has finished."""


class ParcelRefused:
    """What landed is not the parcel that was granted, or nothing usable landed."""


class Whole:
    """The verified parcels are exactly what was wanted, and the manifest says so too."""


class BadManifest:
    """The manifest contradicts D's own plan or what D has verified."""


class CreditsUnused:
    """P will never send some parcels that were granted, although it has sealed."""


class SessionOver:
    """No message of this session will come any more."""


class Settled:
    """The node has been told, and P will use no further credit."""


_S = DecodeState
_LIVE = (_S.ASKED, _S.RESERVED, _S.LANDING)

DECODE_TRANSITIONS: dict[tuple[DecodeState, type], DecodeState] = {
    (_S.ASKED, Accepted): _S.ASKED,
    (_S.ASKED, Reserved): _S.RESERVED,
    (_S.RESERVED, CreditsSent): _S.LANDING,
    (_S.LANDING, CreditsSent): _S.LANDING,
    (_S.LANDING, Sealed): _S.LANDING,
    (_S.LANDING, ParcelVerified): _S.LANDING,
    (_S.LANDING, Whole): _S.COMMITTED,
    (_S.COMMITTED, Released): _S.CLOSED,
    (_S.COMMITTED, Gone): _S.CLOSED,
    (_S.COMMITTED, Stalled): _S.CLOSED,
    (_S.COMMITTED, SessionOver): _S.CLOSED,
    (_S.ASKED, Unavailable): _S.ENDING,
    (_S.LANDING, ParcelRefused): _S.ENDING,
    (_S.LANDING, BadManifest): _S.ENDING,
    (_S.LANDING, Drained): _S.LANDING,
    (_S.LANDING, CreditsUnused): _S.ENDING,
    (_S.ENDING, ParcelVerified): _S.ENDING,
    (_S.ENDING, ParcelRefused): _S.ENDING,
    (_S.ENDING, Refused): _S.ENDING,
    (_S.ENDING, Failed): _S.ENDING,
    (_S.ENDING, Drained): _S.ENDING,
    (_S.ENDING, Gone): _S.ENDING,
    (_S.ENDING, End): _S.ENDING,
    (_S.ENDING, SessionOver): _S.ENDING,
    (_S.ENDING, Settled): _S.CLOSED,
    (_S.ASKED, Refused): _S.ENDING,
    **{(state, same): state for state in _LIVE for same in (Offer, FirstToken)},
    **{(state, ending): _S.ENDING for state in _LIVE for ending in (Failed, Gone, End, Stalled, SessionOver)},
}


@dataclass(frozen=True, slots=True)
class DecodeTransfer:
    """`expected_positions` is 0 before the first Offer; `parcels` is the cut, fixed at RESERVED, of which the first
    `granted` have been given a credit; `verified` maps parcel index to digest. `turn` orders transfers by reservation.
    `void_failure` is what P said after it had sealed: no failure by itself, but the reason if a parcel does not come."""

    request: BeginTransfer
    state: DecodeState = DecodeState.ASKED
    session: int = 0
    ready_positions: int = 0
    expected_positions: int = 0
    turn: int = 0
    from_position: int = 0
    end_position: int = 0
    slot_bytes: int = 0
    parcels: tuple[ParcelName, ...] = ()
    granted: int = 0
    verified: Digests = field(default_factory=Digests)
    manifest: Sealed | None = None
    first_token: bool = False
    void_failure: str = ""
    end_reason: str = ""
    drained: bool = False
    reported: bool = False

    @property
    def id(self) -> TransferId:
        return self.request.transfer

    @property
    def peer(self) -> NodeId:
        return self.request.prefill_node

    @property
    def first_token_position(self) -> int:
        return len(self.request.prompt) + len(self.request.settled)

    @property
    def verified_positions(self) -> int:
        """End of the unbroken prefix, D's own cached one included, that is proven and in its blocks."""
        return verified_prefix(self.parcels, self.verified, self.end_position)

    def accepts(self, step: type) -> bool:
        return (self.state, step) in DECODE_TRANSITIONS

    def take(self, step: type) -> DecodeTransfer:
        assert self.accepts(step), f"transfer {self.id} is {self.state.name} and cannot take {step.__name__}"
        state = DECODE_TRANSITIONS[self.state, step]
        return self if state is self.state else replace(self, state=state)

    def synced(self) -> SyncedTransfer:
        sealed = self.manifest is not None
        return SyncedTransfer(self.id, self.state.name, self.granted, sealed, self.first_token)


def manifest_error(
    transfer: DecodeTransfer, manifest: Sealed, digest_of_all: Callable[[Sequence[int]], int]
) -> str | None:
    """Why a manifest cannot be that of this transfer: it must name exactly the parcels of D's own plan, in order."""
    if not transfer.first_token:
        return "sealed_before_first_token"
    if tuple(parcel.name for parcel in manifest.parcels) != transfer.parcels:
        return "bad_manifest"
    if manifest.digest_of_all != digest_of_all([parcel.digest for parcel in manifest.parcels]):
        return "bad_manifest"
    return None


def verdict(transfer: DecodeTransfer, layout: KvLayout) -> type[Whole | BadManifest] | None:
    """Whether the transfer can commit. None: not yet. Each verified digest must be the manifest's, and the verified
    parcels must *partition* wanted positions x layers x heads: counting them is not enough."""
    if transfer.manifest is None or len(transfer.verified) < len(transfer.parcels):
        return None
    sealed = transfer.manifest.parcels
    if any(sealed[index].digest != digest for index, digest in transfer.verified.items()):
        return BadManifest
    wanted = ParcelName(transfer.from_position, transfer.end_position, 0, layout.layers, 0, layout.kv_heads)
    if partition_error([transfer.parcels[index] for index in transfer.verified], wanted):
        return BadManifest
    return Whole
