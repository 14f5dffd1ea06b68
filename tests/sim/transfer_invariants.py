"""The invariants of docs/protocol.md, as far as a `transfer_world` can see them: of a state, and of what a machine asks for."""

from __future__ import annotations

from typing import Any

from transfer_world import Receive, World

from foundation.ids import CreditNumber, TransferId
from kv_transfer.protocol import events
from kv_transfer.protocol.credit import SlotState
from kv_transfer.protocol.effects import (
    CloseSession,
    Count,
    Gather,
    NodeCommitted,
    NodeEnded,
    NodeFirstToken,
    NodeReleased,
    Scatter,
    Send,
    SendParcel,
)
from kv_transfer.protocol.messages import Credits
from kv_transfer.protocol.sending import SendingState


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


WRITABLE = {SlotState.POSTED, SlotState.CANCELLING, SlotState.QUARANTINED}


def check_writable(stage: Any, receive: Receive) -> None:
    arena = stage.d.arenas.get(receive.session)
    require(arena is not None, "I3: bytes land in an arena that was given back")
    slot = arena.taken.get(CreditNumber(receive.credit))
    owned = slot is not None and slot.index == receive.slot and slot.state in WRITABLE
    require(
        owned,
        f"I3: bytes of credit {receive.credit} land in a slot that is {slot.state.name if slot else 'not its own'}",
    )


def check_d_effect(stage: Any, before: Any, event: Any, effect: Any) -> None:
    match effect:
        case Send() if isinstance(effect.envelope.message, Credits):
            _check_credits(stage, effect.envelope.message)
        case Count(reason="gone_with_credits"):
            require(False, "I6: P has forgotten a transfer, and nobody knows which credits were used")
        case Scatter():
            require(stage.outcomes[effect.transfer] == "open", "I1: a scatter into blocks that were given back")
        case NodeFirstToken():
            require(effect.transfer not in stage.tokens, "a first token was taken twice")
        case NodeCommitted():
            _check_outcome(stage, effect.transfer)
            _check_committed(stage, effect)
        case NodeEnded():
            _check_outcome(stage, effect.transfer)
            _check_prefix(stage, effect)
        case CloseSession():
            own_end = isinstance(event, events.End | events.Reserved | events.Unavailable | events.Scattered)
            require(not own_end, "I9: one transfer's end closed the session of all")
        case _:
            pass


def _check_credits(stage: Any, message: Credits) -> None:
    require(message.transfer in stage.reserved, "I1: credits before a reservation")
    posted = {receive.credit for receive in stage.posted}
    posted |= {moving.receive.credit for moving in stage.moving}
    for credit in message.credits:
        require(credit.number in posted, "a credit was granted before its receive was posted")


def _check_outcome(stage: Any, name: TransferId) -> None:
    require(stage.outcomes[name] == "open", f"I5: {name} ended twice")
    scattering = any(content.transfer == name for _, content in stage.scatters)
    require(not scattering, "I2: an end was told while a scatter was open")


def _check_committed(stage: Any, effect: NodeCommitted) -> None:
    parcels = stage.d.transfers[effect.transfer].parcels if effect.transfer in stage.d.transfers else ()
    wanted = stage.plan.positions - stage.plan.cached
    require(len(parcels) == wanted * stage.plan.parcels_per_position, "committed against no plan")
    for index in range(len(parcels)):
        require((effect.transfer, index) in stage.blocks, f"I2: committed without parcel {index}")
    require(effect.transfer in stage.tokens, "committed without a first token")
    if stage.p is not None and effect.transfer in stage.p.transfers:
        require(stage.p.transfers[effect.transfer].sealed, "I5: D committed what P has not sealed")


def _check_prefix(stage: Any, effect: NodeEnded) -> None:
    first = stage.plan.cached * stage.plan.parcels_per_position
    for index in range(effect.verified_positions * stage.plan.parcels_per_position - first):
        require((effect.transfer, index) in stage.blocks, f"I2: parcel {index} counts as computed and is not there")


def check_p_effect(stage: Any, effect: Any) -> None:
    match effect:
        case Gather():
            require(effect.transfer in stage.computing, "I1: a gather from blocks that were given back")
            require(_is_written(stage, effect), "I2: a gather of KV that is not written")
        case NodeReleased():
            require(effect.transfer in stage.computing, f"I5: {effect.transfer} was released twice")
            gathering = any(content.transfer == effect.transfer for _, content in stage.gathers)
            require(not gathering, "I1: blocks were given back under an open gather")
        case SendParcel():
            content = stage.sending_memory[effect.slot]
            require(content.credit == effect.credit, "I4: a parcel was sent under another's credit")
        case _:
            pass


def _is_written(stage: Any, effect: Gather) -> bool:
    """All layers of the chunks that are done, and of the next one those that P was told of."""
    parcel, chunk = effect.parcel, stage.plan.chunk
    early = parcel.end_layer <= stage.ahead.get(effect.transfer, 0)
    chunks = stage.computing[effect.transfer] - 1 + early
    return bool(parcel.end_position <= chunks * chunk)


def check(world: World) -> None:
    """The invariants of a state."""
    if world.d is not None:
        for arena in world.d.arenas.values():
            arena.check()
        for receive in [*world.posted, *(moving.receive for moving in world.moving | world.ghosts)]:
            check_writable(world, receive)
        for receive, _ in world.scatters:
            slot = world.d.arenas[receive.session].taken.get(CreditNumber(receive.credit))
            require(slot is not None and slot.index == receive.slot, "I1: a slot was given away under its scatter")
        _check_posted(world)
    if world.p is not None:
        _check_sending(world)


def _check_posted(world: World) -> None:
    """Whatever D believes to be posted is posted: no slot waits for what cannot come."""
    assert world.d is not None
    open_receives = {(r.session, r.credit) for r in world.posted | world.cancelled}
    open_receives |= {(m.receive.session, m.receive.credit) for m in world.moving}
    for arena in world.d.arenas.values():
        for slot in arena.taken.values():
            if slot.state in (SlotState.POSTED, SlotState.CANCELLING):
                require((arena.session, slot.credit) in open_receives, "I6: a credit is posted nowhere")


def _check_sending(world: World) -> None:
    assert world.p is not None
    gathering = {slot for slot, _ in world.gathers}
    sending = {slot for slot, _ in world.sends}
    world.p.sending.check()
    for index, slot in enumerate(world.p.sending.slots):
        if slot.state is SendingState.FREE:
            require(index not in gathering | sending, "I1: a free sending slot is in use")
