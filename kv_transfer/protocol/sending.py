"""P's sending slots: shared by all its sessions, each at most `slots_per_session` of them, so that a hung D holds only its share.

    FREE -> GATHERING -> SENDING -> FREE
            GATHERING -> FREE            the transfer ended, or the gather refused its source
            SENDING -> FREE              the send is over, or its session's endpoint is destroyed (fence)

Must not know: why a transfer ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from foundation.ids import CreditNumber, RequestId, SlotIndex, TransferId
from kv_transfer.protocol.record import replace


class SendingState(Enum):
    FREE = auto()
    GATHERING = auto()
    SENDING = auto()


class SendingStep(Enum):
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
    slots_per_session: int
    slots: tuple[SendingSlot, ...]

    def available(self, session: int) -> bool:
        used = sum(slot.session == session for slot in self.slots if slot.state is not SendingState.FREE)
        return used < self.slots_per_session and any(slot.state is SendingState.FREE for slot in self.slots)

    def gather(
        self, session: int, transfer: TransferId, parcel_index: int, credit: CreditNumber
    ) -> tuple[SendingSlots, SlotIndex]:
        index = next(index for index, slot in enumerate(self.slots) if slot.state is SendingState.FREE)
        state = _step(self.slots[index].state, SendingStep.GATHER)
        return self._with(index, SendingSlot(state, session, transfer, parcel_index, credit)), SlotIndex(index)

    def take(self, index: SlotIndex, step: SendingStep) -> SendingSlots:
        slot = self.slots[index]
        state = _step(slot.state, step)
        return self._with(index, FREE_SENDING_SLOT if state is SendingState.FREE else replace(slot, state=state))

    def fence(self, session: int) -> SendingSlots:
        sending = self
        for index, slot in enumerate(self.slots):
            if slot.session == session and slot.state is SendingState.SENDING:
                sending = sending.take(SlotIndex(index), SendingStep.FENCE)
        return sending

    def sends(self, session: int, credit: CreditNumber) -> bool:
        """Whether a send under this credit is open."""
        return any(
            slot.credit == credit and slot.session == session and slot.state is SendingState.SENDING
            for slot in self.slots
        )

    def gathers_open(self, transfer: TransferId) -> bool:
        return any(slot.state is SendingState.GATHERING and slot.transfer == transfer for slot in self.slots)

    def _with(self, index: int, slot: SendingSlot) -> SendingSlots:
        return replace(self, slots=(*self.slots[:index], slot, *self.slots[index + 1 :]))


def new_sending_slots(slots: int, slots_per_session: int) -> SendingSlots:
    assert 1 <= slots_per_session <= slots
    return SendingSlots(slots_per_session, (FREE_SENDING_SLOT,) * slots)


def _step(state: SendingState, step: SendingStep) -> SendingState:
    assert (state, step) in SENDING_TRANSITIONS, f"a sending slot that is {state.name} cannot take {step.name}"
    return SENDING_TRANSITIONS[state, step]
