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
from dataclasses import dataclass
from enum import Enum, auto

from foundation.ids import CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, SlotIndex, TransferId
from kv_transfer.protocol.record import replace

CREDIT_NUMBER_LIMIT = 1 << 24
"""Credit numbers have 24 bits of the tag; a session ends before they wrap."""


class SlotState(Enum):
    FREE = auto()
    POSTED = auto()
    CANCELLING = auto()
    LANDED = auto()
    SCATTERING = auto()
    QUARANTINED = auto()


class SlotStep(Enum):
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
    """`credit` and what follows it say whose the slot is, unless it is FREE."""

    state: SlotState
    credit: CreditNumber
    transfer: TransferId
    parcel_index: int
    length: int


FREE_SLOT = Slot(SlotState.FREE, CreditNumber(-1), TransferId(RequestId(""), 0, 0), -1, 0)


@dataclass(frozen=True, slots=True)
class Arena:
    """D's staging for one session. `slot_bytes` is the largest payload; `credits_returned` counts resolved credits."""

    peer: NodeId
    control_address: str
    incarnation: Incarnation
    session: int
    nonce: SessionNonce
    slot_bytes: int
    granted_bytes_limit: int
    slots: tuple[Slot, ...]
    next_number: int = 0
    credits_returned: int = 0
    quarantined: bool = False

    @property
    def free_slots(self) -> int:
        return sum(slot.state is SlotState.FREE for slot in self.slots)

    @property
    def worth_granting(self) -> bool:
        """A quarter of the slots is free: a message for each slot costs either side as much as the parcel itself. (TCP moves its
        window in such steps for the same reason.) The rest keeps the link busy meanwhile, and each of it frees a slot at last:
        parcels that P has yet to compute have half of them at most."""
        return self.free_slots >= max(1, len(self.slots) // 4)

    @property
    def settled(self) -> bool:
        """Nothing can touch this memory any more."""
        return all(slot.state is SlotState.FREE for slot in self.slots)

    @property
    def unresolved(self) -> int:
        return sum(slot.state is SlotState.QUARANTINED for slot in self.slots)

    def may_grant(self, length: int) -> bool:
        """One credit more, of this length: a slot is free and what is in flight stays within what the link can carry."""
        if self.free_slots == 0:
            return False
        in_flight = sum(slot.length for slot in self.slots if slot.state is SlotState.POSTED)
        return in_flight == 0 or in_flight + length <= self.granted_bytes_limit

    def grant(self, transfer: TransferId, parcel_index: int, length: int) -> tuple[Arena, SlotIndex, CreditNumber]:
        index = next(index for index, slot in enumerate(self.slots) if slot.state is SlotState.FREE)
        credit = CreditNumber(self.next_number)
        posted = Slot(step(self.slots[index].state, SlotStep.GRANT), credit, transfer, parcel_index, length)
        granted = replace(self, slots=self._slots_with(index, posted), next_number=self.next_number + 1)
        return granted, SlotIndex(index), credit

    def index_of(self, credit: CreditNumber) -> SlotIndex | None:
        """Where an unresolved credit stands."""
        for index, slot in enumerate(self.slots):
            if slot.credit == credit:
                return SlotIndex(index)
        return None

    def take(self, credit: CreditNumber, slot_step: SlotStep) -> Arena:
        """The credit's slot one step further."""
        index = self.index_of(credit)
        assert index is not None, f"{slot_step.name} for credit {credit} of session {self.session}, which is resolved"
        slot = self.slots[index]
        state = step(slot.state, slot_step)
        if state is SlotState.FREE:
            returned = self.credits_returned + 1
            return replace(self, slots=self._slots_with(index, FREE_SLOT), credits_returned=returned)
        return replace(self, slots=self._slots_with(index, replace(slot, state=state)))

    def quarantine(self) -> Arena:
        """The session is lost: what may still be written waits for proof; what has landed is D's own and goes on."""
        return replace(self._take_all(SlotStep.QUARANTINE, SlotState.POSTED, SlotState.CANCELLING), quarantined=True)

    def fence(self) -> Arena:
        """Nothing can write into this arena any more."""
        assert self.quarantined, f"session {self.session} is fenced while it lives"
        return self._take_all(SlotStep.FENCE, SlotState.QUARANTINED)

    def slots_of(self, transfer: TransferId) -> Iterator[Slot]:
        return (slot for slot in self.slots if slot.transfer == transfer and slot.state is not SlotState.FREE)

    def scatters_open(self, transfer: TransferId) -> bool:
        return any(slot.state is SlotState.SCATTERING for slot in self.slots_of(transfer))

    def check(self) -> None:
        """Every credit that was granted is accounted for once."""
        taken = [slot.credit for slot in self.slots if slot.state is not SlotState.FREE]
        assert len(taken) == len(set(taken)), f"one credit on two slots: {taken}"
        assert all(credit < self.next_number for credit in taken)
        assert self.next_number == self.credits_returned + len(taken), f"credits leaked in session {self.session}"
        assert self.quarantined or not self.unresolved

    def _take_all(self, slot_step: SlotStep, *states: SlotState) -> Arena:
        arena = self
        for slot in self.slots:
            if slot.state in states:
                arena = arena.take(slot.credit, slot_step)
        return arena

    def _slots_with(self, index: int, slot: Slot) -> tuple[Slot, ...]:
        return (*self.slots[:index], slot, *self.slots[index + 1 :])


def step(state: SlotState, slot_step: SlotStep) -> SlotState:
    assert (state, slot_step) in SLOT_TRANSITIONS, f"a slot that is {state.name} cannot take {slot_step.name}"
    return SLOT_TRANSITIONS[state, slot_step]
