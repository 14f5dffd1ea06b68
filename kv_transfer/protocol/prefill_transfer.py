"""P's half of one transfer: its states, its table, and what it knows.

    QUEUED -> RESERVED -> SENDING -> SEALED -> RELEASED
    QUEUED | RESERVED | SENDING | SEALED -> ENDING -> RELEASED

The node owns the blocks; the transfer pins them from RESERVED until the node has been told `released`, which is never
before the last open gather has finished. RELEASED is never stored. ENDING lasts until D has answered `Drained` with `Gone`:
until then P is the only one who knows which credits were used, and a broken stream must not lose that.

Early layers of a step's positions may leave before the step has ended; the last layers never do. So a position whose every parcel
has left was computed by a step that ended well, and of one that failed D's unbroken verified prefix holds no position.

Must not know: sending slots, peers, other transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import auto

from foundation.ids import CreditNumber, NodeId, SessionNonce, TransferId
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.protocol.digests import Digests
from kv_transfer.protocol.events import (
    Computed,
    LayersComputed,
    LeaseExpired,
    PrefillFailed,
    PrefillRefused,
    PrefillReserved,
    SendRefused,
    Stalled,
    TokenSampled,
)
from kv_transfer.protocol.messages import (
    Abort,
    Ask,
    Committed,
    Credit,
    Credits,
    FirstToken,
    Gone,
    Sealed,
    SealedParcel,
    SyncedTransfer,
)
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.state import State


class PrefillState(State):
    QUEUED = auto()
    RESERVED = auto()
    SENDING = auto()
    SEALED = auto()
    RELEASED = auto()
    ENDING = auto()


class ParcelGathered:
    """A parcel lies in its sending slot and is handed to the transport."""


class GatherRefused:
    """The source blocks were not this transfer's any more."""


class AllSent:
    """Every parcel has been handed to the transport, and the first token is known."""


class BadCredits:
    """Credits that do not fit P's own cut."""


class Superseded:
    """A higher attempt, or a later try, of the same request has come."""


class SessionOver:
    """No message of this session will come any more."""


class Settled:
    """The node has been told, and D has forgotten the transfer."""


_S = PrefillState
_LIVE = (_S.QUEUED, _S.RESERVED, _S.SENDING, _S.SEALED)

PREFILL_TRANSITIONS: dict[tuple[PrefillState, type], PrefillState] = {
    (_S.QUEUED, PrefillReserved): _S.RESERVED,
    (_S.QUEUED, PrefillRefused): _S.RELEASED,
    (_S.RESERVED, Credits): _S.SENDING,
    (_S.SENDING, Credits): _S.SENDING,
    (_S.SENDING, ParcelGathered): _S.SENDING,
    (_S.SENDING, AllSent): _S.SEALED,
    (_S.SEALED, Committed): _S.RELEASED,
    (_S.ENDING, Committed): _S.RELEASED,
    (_S.ENDING, Gone): _S.ENDING,
    (_S.ENDING, Abort): _S.ENDING,
    (_S.ENDING, SessionOver): _S.ENDING,
    (_S.ENDING, SendRefused): _S.ENDING,
    (_S.ENDING, Settled): _S.RELEASED,
    (_S.SENDING, GatherRefused): _S.ENDING,
    (_S.SENDING, BadCredits): _S.ENDING,
    (_S.RESERVED, BadCredits): _S.ENDING,
    (_S.SENDING, SendRefused): _S.ENDING,
    (_S.SEALED, SendRefused): _S.ENDING,
    (_S.RESERVED, Stalled): _S.ENDING,
    (_S.SENDING, Stalled): _S.ENDING,
    **{
        (state, same): state for state in (_S.RESERVED, _S.SENDING) for same in (LayersComputed, Computed, TokenSampled)
    },
    **{(state, PrefillFailed): _S.ENDING for state in (_S.QUEUED, _S.RESERVED, _S.SENDING)},
    **{
        (state, ending): _S.ENDING for state in _LIVE for ending in (Abort, Gone, LeaseExpired, Superseded, SessionOver)
    },
}


@dataclass(frozen=True, slots=True)
class PrefillTransfer:
    """`credits[i]` carries `parcels[i]`; the first `gathering` of them have been given a sending slot. `digests` maps the
    index of each parcel that was handed to the transport to its digest. Of positions before `ahead_positions` the first
    `ahead_layers` layers are computed as well. `renewals` counts lease renewals (deadlines only)."""

    ask: Ask
    peer: NodeId
    session: int
    turn: int
    state: PrefillState = PrefillState.QUEUED
    computed_positions: int = 0
    ahead_positions: int = 0
    ahead_layers: int = 0
    expected_positions: int = 0
    from_position: int = 0
    slot_bytes: int = 0
    nonce: SessionNonce | None = None
    parcels: tuple[ParcelName, ...] = ()
    credits: tuple[Credit, ...] = ()
    gathering: int = 0
    digests: Digests = field(default_factory=Digests)
    first_token: FirstToken | None = None
    sealed: bool = False
    end_reason: str = ""
    acknowledged: bool = False
    reported: bool = False
    renewals: int = field(default=0, compare=False)

    @property
    def id(self) -> TransferId:
        return self.ask.transfer

    @property
    def history_positions(self) -> int:
        """Length of prompt and settled tokens, and so the position of the first token."""
        return len(self.ask.prompt) + len(self.ask.settled)

    @property
    def used(self) -> frozenset[CreditNumber]:
        """The credits under which a parcel was handed to the transport."""
        return frozenset(self.credits[index].number for index in self.digests)

    def is_computed(self, parcel: ParcelName) -> bool:
        ahead = parcel.end_position <= self.ahead_positions and parcel.end_layer <= self.ahead_layers
        return ahead or parcel.end_position <= self.computed_positions

    @property
    def next_is_ready(self) -> bool:
        """The next parcel in order has its credit, and its KV is computed."""
        return (
            self.state is PrefillState.SENDING
            and self.gathering < len(self.credits)
            and self.is_computed(self.parcels[self.gathering])
        )

    @property
    def waits_for_credits(self) -> bool:
        """D knows that the next parcel in order is computed, and has given no credit for it: it is D's turn. D may hold back
        credits for layers that are ahead."""
        return (
            self.state is PrefillState.SENDING
            and self.gathering == len(self.credits) < len(self.parcels)
            and self.parcels[self.gathering].end_position <= self.computed_positions
        )

    @property
    def all_sent(self) -> bool:
        return (
            self.state is PrefillState.SENDING
            and self.first_token is not None
            and len(self.digests) == len(self.parcels)
        )

    def accepts(self, step: type) -> bool:
        return (self.state, step) in PREFILL_TRANSITIONS

    def take(self, step: type) -> PrefillTransfer:
        assert self.accepts(step), f"transfer {self.id} is {self.state.name} and cannot take {step.__name__}"
        state = PREFILL_TRANSITIONS[self.state, step]
        return self if state is self.state else replace(self, state=state)

    def manifest(self) -> tuple[SealedParcel, ...]:
        return tuple(SealedParcel(name, self.digests[index]) for index, name in enumerate(self.parcels))

    def sealed_message(self, digest_of_all: int) -> Sealed:
        return Sealed(self.id, self.manifest(), digest_of_all)

    def synced(self) -> SyncedTransfer:
        return SyncedTransfer(self.id, self.state.name, len(self.credits), self.sealed, self.first_token is not None)
