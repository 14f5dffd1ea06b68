"""D's slots and the credits on them: one arena for each session.

A credit is D's permission to send exactly one parcel into one slot. It is resolved in exactly one way: *landed* (D's own
receive completed), *unused* (P's `Drained` does not name it, so no message will ever match), or *fenced*. Nothing here
knows time: a slot is free on proof, or it is not free.

    FREE -> POSTED -> LANDED -> SCATTERING -> FREE
            POSTED -> CANCELLING -> FREE            known unused; the cancelled receive still has to say so
            POSTED | CANCELLING -> QUARANTINED -> FREE     the session is lost; its own completion or a fence frees it

Must not know: why a transfer ended, what a parcel holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import auto

from foundation.ids import CreditNumber, Incarnation, NodeId, SessionNonce, SlotIndex, TransferId
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.state import State
from kv_transfer.protocol.table import Table

CREDIT_NUMBER_LIMIT = 1 << 24
"""Credit numbers have 24 bits of the tag; a session ends before they wrap."""


class SlotState(State):
    FREE = auto()
    POSTED = auto()
    CANCELLING = auto()
    LANDED = auto()
    SCATTERING = auto()
    QUARANTINED = auto()


class SlotStep(State):
    GRANT = auto()
    LAND = auto()
    SCATTER = auto()
    DROP = auto()
    FINISH = auto()
    KNOWN_UNUSED = auto()
    CANCELLED = auto()
    FAILED = auto()
    QUARANTINE = auto()
    FENCE = auto()


SLOT_TRANSITIONS: dict[tuple[SlotState, SlotStep], SlotState] = {
    (SlotState.FREE, SlotStep.GRANT): SlotState.POSTED,
    (SlotState.POSTED, SlotStep.LAND): SlotState.LANDED,
    (SlotState.POSTED, SlotStep.FAILED): SlotState.FREE,
    (SlotState.POSTED, SlotStep.KNOWN_UNUSED): SlotState.CANCELLING,
    (SlotState.POSTED, SlotStep.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.CANCELLING, SlotStep.CANCELLED): SlotState.FREE,
    (SlotState.CANCELLING, SlotStep.LAND): SlotState.LANDED,
    (SlotState.CANCELLING, SlotStep.FAILED): SlotState.FREE,
    (SlotState.CANCELLING, SlotStep.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.LANDED, SlotStep.SCATTER): SlotState.SCATTERING,
    (SlotState.LANDED, SlotStep.DROP): SlotState.FREE,
    (SlotState.SCATTERING, SlotStep.FINISH): SlotState.FREE,
    (SlotState.QUARANTINED, SlotStep.LAND): SlotState.FREE,
    (SlotState.QUARANTINED, SlotStep.CANCELLED): SlotState.FREE,
    (SlotState.QUARANTINED, SlotStep.FAILED): SlotState.FREE,
    (SlotState.QUARANTINED, SlotStep.FENCE): SlotState.FREE,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One that is not FREE, and whose it is."""

    index: SlotIndex
    state: SlotState
    credit: CreditNumber
    transfer: TransferId
    parcel_index: int
    length: int


def all_free(slots: int) -> tuple[SlotIndex, ...]:
    return tuple(SlotIndex(index) for index in range(slots))


@dataclass(frozen=True, slots=True)
class Arena:
    """D's staging for one session. `slot_bytes` is the largest payload; `credits_returned` counts resolved credits.

    A slot is `free` (the lowest first) or `taken` under its credit; `posted_bytes` are those of all that are POSTED. What happens
    for each parcel copies references to slots and searches none.
    """

    peer: NodeId
    control_address: str
    incarnation: Incarnation
    session: int
    nonce: SessionNonce
    slot_bytes: int
    granted_bytes_limit: int
    free: tuple[SlotIndex, ...]
    taken: Table[CreditNumber, Slot] = field(default_factory=Table)
    posted_bytes: int = 0
    next_number: int = 0
    credits_returned: int = 0
    quarantined: bool = False

    @property
    def slots(self) -> int:
        return len(self.free) + len(self.taken)

    @property
    def worth_granting(self) -> bool:
        """A quarter of the slots is free: a message for each slot costs either side as much as the parcel itself. (TCP moves its
        window in such steps for the same reason.) The rest keeps the link busy meanwhile, and each of it frees a slot at last:
        parcels that P has yet to compute have half of them at most."""
        return len(self.free) >= max(1, self.slots // 4)

    @property
    def settled(self) -> bool:
        """Nothing can touch this memory any more."""
        return not self.taken

    @property
    def unresolved(self) -> int:
        return sum(slot.state is SlotState.QUARANTINED for slot in self.taken.values())

    def may_grant(self, length: int) -> bool:
        """One credit more, of this length: a slot is free and what is in flight stays within what the link can carry."""
        if not self.free:
            return False
        return self.posted_bytes == 0 or self.posted_bytes + length <= self.granted_bytes_limit

    def grant(self, transfer: TransferId, parcel_index: int, length: int) -> tuple[Arena, SlotIndex, CreditNumber]:
        index, credit = self.free[0], CreditNumber(self.next_number)
        state = step(SlotState.FREE, SlotStep.GRANT)
        granted = replace(
            self,
            free=self.free[1:],
            taken=self.taken.put(credit, Slot(index, state, credit, transfer, parcel_index, length)),
            posted_bytes=self.posted_bytes + length,
            next_number=self.next_number + 1,
        )
        return granted, index, credit

    def take(self, credit: CreditNumber, *slot_steps: SlotStep) -> Arena:
        """The credit's slot one step further, or several."""
        slot = self.taken.get(credit)
        assert slot is not None, f"{slot_steps} for credit {credit} of session {self.session}, which is resolved"
        state = slot.state
        for slot_step in slot_steps:
            state = step(state, slot_step)
        posted_bytes = self.posted_bytes - (slot.length if slot.state is SlotState.POSTED else 0)
        if state is not SlotState.FREE:
            taken = self.taken.put(credit, replace(slot, state=state))
            return replace(self, taken=taken, posted_bytes=posted_bytes)
        return replace(
            self,
            free=tuple(sorted((*self.free, slot.index))),
            taken=self.taken.drop(credit),
            posted_bytes=posted_bytes,
            credits_returned=self.credits_returned + 1,
        )

    def quarantine(self) -> Arena:
        """The session is lost: what may still be written waits for proof; what has landed is D's own and goes on."""
        return replace(self._take_all(SlotStep.QUARANTINE, SlotState.POSTED, SlotState.CANCELLING), quarantined=True)

    def fence(self) -> Arena:
        """Nothing can write into this arena any more."""
        assert self.quarantined, f"session {self.session} is fenced while it lives"
        return self._take_all(SlotStep.FENCE, SlotState.QUARANTINED)

    def slots_of(self, transfer: TransferId) -> Iterator[Slot]:
        return (slot for slot in self.taken.values() if slot.transfer == transfer)

    def scatters_open(self, transfer: TransferId) -> bool:
        return any(slot.state is SlotState.SCATTERING for slot in self.slots_of(transfer))

    def check(self) -> None:
        """Every credit that was granted is accounted for once."""
        indexes = (*self.free, *(slot.index for slot in self.taken.values()))
        assert sorted(indexes) == list(range(self.slots)), f"a slot is lost, or taken twice: {indexes}"
        assert all(credit == slot.credit < self.next_number for credit, slot in self.taken.items())
        assert self.next_number == self.credits_returned + len(self.taken), f"credits leaked in session {self.session}"
        posted = (slot.length for slot in self.taken.values() if slot.state is SlotState.POSTED)
        assert self.posted_bytes == sum(posted), f"{self.posted_bytes} bytes are not what is posted"
        assert self.quarantined or not self.unresolved

    def _take_all(self, slot_step: SlotStep, *states: SlotState) -> Arena:
        arena = self
        for slot in self.taken.values():
            if slot.state in states:
                arena = arena.take(slot.credit, slot_step)
        return arena


def step(state: SlotState, slot_step: SlotStep) -> SlotState:
    following = SLOT_TRANSITIONS.get((state, slot_step))
    assert following is not None, f"a slot that is {state.name} cannot take {slot_step.name}"
    return following
