"""P's sending slots: shared by all its sessions, each at most `slots_per_session` of them, so that a hung D holds only its share.

    FREE -> GATHERING -> SENDING -> FREE
            GATHERING -> FREE            the transfer ended, or the gather refused its source
            SENDING -> FREE              the send is over, or its session's endpoint is destroyed (fence)

Must not know: why a transfer ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import auto

from foundation.ids import CreditNumber, RequestId, SlotIndex, TransferId
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.state import State
from kv_transfer.protocol.table import Table


class SendingState(State):
    FREE = auto()
    GATHERING = auto()
    SENDING = auto()


class SendingStep(State):
    GATHER = auto()
    DROP = auto()
    SEND = auto()
    SENT = auto()
    FENCE = auto()


SENDING_TRANSITIONS: dict[tuple[SendingState, SendingStep], SendingState] = {
    (SendingState.FREE, SendingStep.GATHER): SendingState.GATHERING,
    (SendingState.GATHERING, SendingStep.DROP): SendingState.FREE,
    (SendingState.GATHERING, SendingStep.SEND): SendingState.SENDING,
    (SendingState.SENDING, SendingStep.SENT): SendingState.FREE,
    (SendingState.SENDING, SendingStep.FENCE): SendingState.FREE,
}


@dataclass(frozen=True, slots=True)
class SendingSlot:
    state: SendingState
    session: int
    transfer: TransferId
    parcel_index: int
    credit: CreditNumber


FREE_SENDING_SLOT = SendingSlot(SendingState.FREE, 0, TransferId(RequestId(""), 0, 0), -1, CreditNumber(-1))


@dataclass(frozen=True, slots=True)
class SendingSlots:
    """`free` names the free slots, the lowest first, `held` those of each session: a parcel's events look at no other."""

    slots_per_session: int
    slots: tuple[SendingSlot, ...]
    free: tuple[SlotIndex, ...]
    held: Table[int, tuple[SlotIndex, ...]] = field(default_factory=Table)

    def available(self, session: int) -> bool:
        return bool(self.free) and len(self._held(session)) < self.slots_per_session

    def gather(
        self, session: int, transfer: TransferId, parcel_index: int, credit: CreditNumber
    ) -> tuple[SendingSlots, SlotIndex]:
        index = self.free[0]
        state = _step(SendingState.FREE, SendingStep.GATHER)
        gathering = replace(
            self,
            slots=self._slots_with(index, SendingSlot(state, session, transfer, parcel_index, credit)),
            free=self.free[1:],
            held=self.held.put(session, _sorted(*self._held(session), index)),
        )
        return gathering, index

    def take(self, index: SlotIndex, step: SendingStep) -> SendingSlots:
        slot = self.slots[index]
        state = _step(slot.state, step)
        if state is not SendingState.FREE:
            return replace(self, slots=self._slots_with(index, replace(slot, state=state)))
        others = tuple(held for held in self._held(slot.session) if held != index)
        return replace(
            self,
            slots=self._slots_with(index, FREE_SENDING_SLOT),
            free=_sorted(*self.free, index),
            held=self.held.put(slot.session, others) if others else self.held.drop(slot.session),
        )

    def fence(self, session: int) -> SendingSlots:
        sending = self
        for index in self._held(session):
            if self.slots[index].state is SendingState.SENDING:
                sending = sending.take(index, SendingStep.FENCE)
        return sending

    def sends(self, session: int, credit: CreditNumber) -> bool:
        """Whether a send under this credit is open."""
        slots = (self.slots[index] for index in self._held(session))
        return any(slot.credit == credit and slot.state is SendingState.SENDING for slot in slots)

    def gathers_open(self, session: int, transfer: TransferId) -> bool:
        slots = (self.slots[index] for index in self._held(session))
        return any(slot.transfer == transfer and slot.state is SendingState.GATHERING for slot in slots)

    def check(self) -> None:
        """Every slot is free or its session's, and stands in one place."""
        held = ((index, session) for session, indexes in self.held.items() for index in indexes)
        assert sorted((*held, *((index, 0) for index in self.free))) == [
            (index, slot.session) for index, slot in enumerate(self.slots)
        ], f"{self.free} are free, {self.held} held of {self.slots}"

    def _held(self, session: int) -> tuple[SlotIndex, ...]:
        return self.held.get(session, ())

    def _slots_with(self, index: int, slot: SendingSlot) -> tuple[SendingSlot, ...]:
        return (*self.slots[:index], slot, *self.slots[index + 1 :])


def new_sending_slots(slots: int, slots_per_session: int) -> SendingSlots:
    assert 1 <= slots_per_session <= slots
    free = tuple(SlotIndex(index) for index in range(slots))
    return SendingSlots(slots_per_session, (FREE_SENDING_SLOT,) * slots, free)


def _step(state: SendingState, step: SendingStep) -> SendingState:
    following = SENDING_TRANSITIONS.get((state, step))
    assert following is not None, f"a sending slot that is {state.name} cannot take {step.name}"
    return following


def _sorted(*indexes: SlotIndex) -> tuple[SlotIndex, ...]:
    return tuple(sorted(indexes))
