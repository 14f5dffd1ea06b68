"""What each action of a `transfer_world` does: `apply(world, action) -> (world, log)`.

A `Stage` is a world while one action changes it. The machines are told what happened, their effects are carried out on the
modelled streams, lanes and nodes, and what an effect must not do is checked on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transfer_invariants import Violation, check, check_d_effect, check_p_effect, check_writable, require
from transfer_world import (
    Action,
    Content,
    D,
    Message,
    Moving,
    P,
    Receive,
    World,
    actions,
    at_rest,
    is_progress,
    last_stage,
    new_d,
    new_p,
)

from foundation.ids import CreditNumber, SessionNonce, SlotIndex, TransferId
from kv_transfer.port import BeginTransfer, SettledToken
from kv_transfer.protocol import decode_side, events, prefill_side
from kv_transfer.protocol.effects import (
    CancelReceive,
    CloseSession,
    CloseStream,
    Gather,
    NodeCommitted,
    NodeEnded,
    NodeFirstToken,
    NodePrefill,
    NodeReleased,
    NodeReserve,
    OpenLane,
    OpenStream,
    PostReceive,
    Scatter,
    Send,
    SendParcel,
)
from kv_transfer.protocol.table import Table


def scatter_refusal(expected: Content, found: Content | None) -> str:
    """What verify + scatter finds: the seed is D's own, so only the very parcel that was granted verifies."""
    return "" if found == expected else "bad_digest"


# --- making it happen ---------------------------------------------------------------------------------------------

WORLD_FIELDS = tuple(field.name for field in fields(World))


class Stage:
    if TYPE_CHECKING:  # it has the fields of World, whatever they are
        d: Any
        p: Any

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    """A world being changed by one action; `log` holds (side, event) and (side, effect) in order."""

    def __init__(self, world: World) -> None:
        self.__dict__.update({name: getattr(world, name) for name in WORLD_FIELDS})
        self.log: list[tuple[str, str, Any]] = []

    def world(self) -> World:
        return World(*[getattr(self, name) for name in WORLD_FIELDS])

    def tell_d(self, event: Any) -> None:
        self.log.append(("D", "event", event))
        before = self.d
        self.d, effects = decode_side.handle(self.d, event)
        for effect in effects:
            self.log.append(("D", "effect", effect))
            check_d_effect(self, before, event, effect)
            _run_d_effect(self, effect)

    def tell_p(self, event: Any) -> None:
        self.log.append(("P", "event", event))
        self.p, effects = prefill_side.handle(self.p, event)
        for effect in effects:
            self.log.append(("P", "effect", effect))
            check_p_effect(self, effect)
            _run_p_effect(self, effect)


def apply(world: World, action: Action) -> tuple[World, list[tuple[str, str, Any]]]:
    stage = Stage(world)
    ACTIONS[action[0]](stage, *action[1:])
    return stage.world(), stage.log


def _begin(stage: Stage, name: TransferId) -> None:
    stage.to_begin = tuple(other for other in stage.to_begin if other != name)
    history = tuple(range(stage.plan.positions))
    stage.outcomes = stage.outcomes.put(name, "open")
    stage.tell_d(events.Begin(BeginTransfer(name, P, "p:0", b"t", history, (), b"", 600.0)))


def _connect(stage: Stage) -> None:
    stage.stream, stage.to_p, stage.to_d = "up", (), ()
    stage.tell_p(events.StreamOpened(D, 0))
    session, stage.next_session = stage.next_session, stage.next_session + 1
    stage.tell_d(events.StreamOpened(P, session))


def _refused(stage: Stage) -> None:
    """P's process is gone, and its machine says so."""
    stage.tell_d(events.DialRefused(P, "dial_refused"))


def _to_p(stage: Stage) -> None:
    envelope, stage.to_p = stage.to_p[0], stage.to_p[1:]
    stage.tell_p(events.MessageReceived(D, envelope))


def _to_d(stage: Stage) -> None:
    envelope, stage.to_d = stage.to_d[0], stage.to_d[1:]
    stage.tell_d(events.MessageReceived(P, envelope))


def _repeat_to_p(stage: Stage) -> None:
    _spend(stage, "repeat")
    stage.tell_p(events.MessageReceived(D, stage.to_p[0]))


def _repeat_to_d(stage: Stage) -> None:
    _spend(stage, "repeat")
    stage.tell_d(events.MessageReceived(P, stage.to_d[0]))


def _spend(stage: Stage, what: str) -> None:
    stage.budget = stage.budget._replace(**{what: getattr(stage.budget, what) - 1})


def _d_hears_loss(stage: Stage) -> None:
    stage.d_hears_loss, stage.to_d = "", ()
    stage.tell_d(events.StreamLost(P, "reset"))


def _p_hears_loss(stage: Stage) -> None:
    stage.p_hears_loss, stage.to_p = "", ()
    stage.tell_p(events.StreamLost(D, "reset"))


def _cut(stage: Stage) -> None:
    _spend(stage, "cut")
    stage.stream, stage.d_hears_loss, stage.p_hears_loss = "none", "abrupt", "abrupt"


def _lane(stage: Stage, session: int) -> None:
    stage.lanes_d -= {session}
    stage.lanes_p -= {session}
    stage.lanes_live |= {session}
    nonce = SessionNonce(500 + session)
    slots, bytes_per_second = stage.plan.slots, 1e9
    stage.tell_p(events.LaneOpened(D, session, nonce, 0, 0, stage.plan.lane, bytes_per_second))
    slot_bytes = 8
    stage.tell_d(events.LaneOpened(P, session, nonce, slots, slot_bytes, stage.plan.lane, bytes_per_second))


def _lane_fails(stage: Stage, session: int) -> None:
    stage.lanes_d -= {session}
    stage.tell_d(events.LaneFailed(P, session, "unreachable"))


def _match(stage: Stage, message: Message, receive: Receive) -> None:
    stage.flight -= {message}
    stage.posted -= {receive}
    stage.moving |= {Moving(receive, message.content)}


def _written(stage: Stage, moving: Moving) -> None:
    """Bytes land: into a slot that this credit still owns, or the protocol has given memory away too early."""
    check_writable(stage, moving.receive)
    stage.memory = stage.memory.put((moving.receive.session, moving.receive.slot), moving.content)


def _landed(stage: Stage, moving: Moving) -> None:
    stage.moving -= {moving}
    _written(stage, moving)
    stage.tell_d(events.Landed(P, moving.receive.session, CreditNumber(moving.receive.credit)))


def _ghost(stage: Stage, moving: Moving) -> None:
    stage.ghosts -= {moving}
    if stage.d is not None:
        _written(stage, moving)


def _receive_fails(stage: Stage, moving: Moving) -> None:
    _spend(stage, "receive_fails")
    stage.moving -= {moving}
    stage.tell_d(events.ReceiveFailed(P, moving.receive.session, CreditNumber(moving.receive.credit), "truncated"))


def _cancelled(stage: Stage, receive: Receive) -> None:
    stage.cancelled -= {receive}
    stage.tell_d(events.ReceiveCancelled(P, receive.session, CreditNumber(receive.credit)))


def _scattered(stage: Stage, receive: Receive, expected: Content) -> None:
    stage.scatters -= {(receive, expected)}
    refusal = scatter_refusal(expected, stage.memory.get((receive.session, receive.slot)))
    if not refusal:
        found = stage.memory[receive.session, receive.slot]
        require(found == expected, "I2: a parcel was verified that is not the one that was granted")
        stage.blocks |= {(expected.transfer, expected.parcel_index)}
    credit = CreditNumber(receive.credit)
    stage.tell_d(events.Scattered(P, receive.session, credit, expected.digest, refusal))


def _corrupt(stage: Stage, message: Message) -> None:
    _spend(stage, "corrupt")
    damaged = message.content._replace(parcel_index=message.content.parcel_index + 50)
    stage.flight = stage.flight - {message} | {message._replace(content=damaged)}


def _gathered(stage: Stage, slot: int, content: Content) -> None:
    stage.gathers -= {(slot, content)}
    stage.sending_memory = stage.sending_memory.put(slot, content)
    stage.tell_p(events.Gathered(SlotIndex(slot), content.digest))


def _wrong_source(stage: Stage, slot: int, content: Content) -> None:
    _spend(stage, "wrong_source")
    stage.gathers -= {(slot, content)}
    stage.tell_p(events.Gathered(SlotIndex(slot), 0, "wrong_source"))


def _sent(stage: Stage, slot: int, session: int) -> None:
    stage.sends -= {(slot, session)}
    stage.tell_p(events.Sent(SlotIndex(slot)))


def _send_refused(stage: Stage, message: Message) -> None:
    _spend(stage, "send_refused")
    slot = next(slot for slot, _ in stage.sends if stage.sending_memory.get(slot) == message.content)
    stage.flight -= {message}
    stage.sends = frozenset(send for send in stage.sends if send[0] != slot)
    stage.tell_p(events.SendRefused(SlotIndex(slot), "no_memory"))


def _node_reserved(stage: Stage, name: TransferId) -> None:
    stage.reserving -= {name}
    stage.reserved |= {name}
    stage.tell_d(events.Reserved(name, stage.plan.cached, stage.plan.positions))


def _unavailable(stage: Stage, name: TransferId) -> None:
    _spend(stage, "unavailable")
    stage.reserving -= {name}
    stage.tell_d(events.Unavailable(name, "no_blocks"))


def _prefill(stage: Stage, name: TransferId) -> None:
    reached = stage.computing[name] + 1
    stage.computing = stage.computing.put(name, reached)
    _forget_ahead(stage, name)
    positions = min(stage.plan.positions, stage.plan.chunk * (reached - 1))
    if reached == 1:
        stage.tell_p(events.PrefillReserved(name, 0, stage.plan.positions))
    elif reached < last_stage(stage.plan):
        stage.tell_p(events.Computed(name, positions))
    else:
        tokens = None if stage.plan.declines else (SettledToken(7),)
        stage.tell_p(events.TokenSampled(name, tokens))


def _layers(stage: Stage, name: TransferId) -> None:
    """One more layer of the chunk that is being computed."""
    end_layer = stage.ahead.get(name, 0) + 1
    stage.ahead = stage.ahead.put(name, end_layer)
    positions = min(stage.plan.positions, stage.plan.chunk * stage.computing[name])
    stage.tell_p(events.LayersComputed(name, positions, end_layer))


def _forget_ahead(stage: Stage, name: TransferId) -> None:
    if name in stage.ahead:
        stage.ahead = stage.ahead.drop(name)


def _prefill_fails(stage: Stage, name: TransferId) -> None:
    _spend(stage, "prefill_fails")
    stage.tell_p(events.PrefillFailed(name, "out_of_memory"))


def _abort(stage: Stage, name: TransferId) -> None:
    _spend(stage, "abort")
    stage.tell_d(events.End(name, "cancelled"))


def _endpoint(stage: Stage, session: int) -> None:
    """Both ends may hear of it, at any time; nothing further of it is matched."""
    _spend(stage, "endpoint")
    stage.lanes_live -= {session}
    stage.d_broken |= {session}
    stage.p_broken |= {session}


def _d_broken(stage: Stage, session: int) -> None:
    stage.d_broken -= {session}
    stage.tell_d(events.EndpointLost(P, session, "endpoint_lost"))


def _p_broken(stage: Stage, session: int) -> None:
    stage.p_broken -= {session}
    stage.tell_p(events.EndpointLost(D, session, "endpoint_lost"))


def _d_fenced(stage: Stage, session: int) -> None:
    stage.d_fences -= {session}
    stage.tell_d(events.Fenced(P, session))


def _p_fenced(stage: Stage, session: int) -> None:
    stage.p_fences -= {session}
    stage.sends = frozenset(send for send in stage.sends if send[1] != session)
    stage.tell_p(events.Fenced(D, session))


def _crash_p(stage: Stage) -> None:
    _spend(stage, "crash_p")
    stage.p, stage.to_p, stage.p_hears_loss = None, (), ""
    if stage.stream == "up":
        stage.d_hears_loss, stage.stream = "abrupt", "none"
    stage.d_broken |= stage.lanes_live
    if stage.plan.lane == "sender_writes":
        # the process is gone; the rim proves that its device work has drained
        stage.d_fences |= frozenset(stage.d.arenas) if stage.d is not None else frozenset()
    stage.lanes_live = stage.lanes_p = stage.p_broken = stage.p_fences = frozenset()
    stage.gathers, stage.sends, stage.sending_memory, stage.computing = frozenset(), frozenset(), Table(), Table()
    stage.ahead = Table()


def _restart_p(stage: Stage) -> None:
    stage.p_incarnation += 1
    stage.p = new_p(stage.plan, stage.p_incarnation)


def _crash_d(stage: Stage) -> None:
    _spend(stage, "crash_d")
    stage.d, stage.to_d, stage.d_hears_loss = None, (), ""
    if stage.stream == "up":
        stage.p_hears_loss = "abrupt"
    stage.stream = "none"
    stage.p_broken |= stage.lanes_live
    stage.lanes_live = stage.lanes_d = stage.d_broken = stage.d_fences = frozenset()
    stage.posted = stage.moving = stage.ghosts = stage.cancelled = stage.scatters = frozenset()
    stage.memory, stage.reserving = Table(), frozenset()
    for name, outcome in stage.outcomes.items():
        if outcome == "open":
            stage.outcomes = stage.outcomes.put(name, "crashed")


def _restart_d(stage: Stage) -> None:
    stage.d_incarnation += 1
    stage.d = new_d(stage.plan, stage.d_incarnation)


def _deadline(stage: Stage, side: str, event: Any) -> None:
    stage.tell_d(event) if side == "D" else stage.tell_p(event)


def _early_deadline(stage: Stage, side: str, event: Any) -> None:
    _spend(stage, "deadline")
    _deadline(stage, side, event)


ACTIONS: dict[str, Callable[..., None]] = {
    "begin": _begin,
    "connect": _connect,
    "lane": _lane,
    "lane_fails": _lane_fails,
    "to_p": _to_p,
    "to_d": _to_d,
    "refused": _refused,
    "repeat_to_p": _repeat_to_p,
    "repeat_to_d": _repeat_to_d,
    "cut": _cut,
    "d_hears_loss": _d_hears_loss,
    "p_hears_loss": _p_hears_loss,
    "match": _match,
    "landed": _landed,
    "ghost": _ghost,
    "receive_fails": _receive_fails,
    "cancelled": _cancelled,
    "scattered": _scattered,
    "corrupt": _corrupt,
    "gathered": _gathered,
    "wrong_source": _wrong_source,
    "sent": _sent,
    "send_refused": _send_refused,
    "reserved": _node_reserved,
    "unavailable": _unavailable,
    "prefill": _prefill,
    "layers": _layers,
    "prefill_fails": _prefill_fails,
    "abort": _abort,
    "endpoint": _endpoint,
    "d_broken": _d_broken,
    "p_broken": _p_broken,
    "d_fenced": _d_fenced,
    "p_fenced": _p_fenced,
    "crash_p": _crash_p,
    "restart_p": _restart_p,
    "crash_d": _crash_d,
    "restart_d": _restart_d,
    "deadline": _deadline,
    "early_deadline": _early_deadline,
}


# --- effects ------------------------------------------------------------------------------------------------------


def _run_d_effect(stage: Stage, effect: Any) -> None:
    match effect:
        case Send():
            if stage.stream == "up":
                stage.to_p += (effect.envelope,)
        case OpenStream():
            stage.stream = "dialling"
        case CloseStream():
            if stage.stream == "up":
                stage.p_hears_loss = "orderly"
            stage.stream, stage.to_d, stage.d_hears_loss = "none", (), ""
        case OpenLane():
            stage.lanes_d |= {effect.session}
        case CloseSession():
            _d_closes(stage, effect.session)
        case PostReceive():
            stage.posted |= {Receive(effect.session, effect.credit, effect.slot)}
        case CancelReceive():
            _cancel(stage, effect)
        case Scatter():
            receive = Receive(effect.session, effect.credit, effect.slot)
            content = Content(effect.session, effect.credit, effect.transfer, effect.parcel_index)
            stage.scatters |= {(receive, content)}
        case NodeReserve():
            stage.reserving |= {effect.transfer}
        case NodeFirstToken():
            stage.tokens |= {effect.transfer}
        case NodeCommitted():
            stage.outcomes = stage.outcomes.put(effect.transfer, "committed")
        case NodeEnded():
            stage.outcomes = stage.outcomes.put(effect.transfer, f"ended {effect.verified_positions}")
        case _:
            pass


def _cancel(stage: Stage, effect: CancelReceive) -> None:
    for receive in stage.posted:
        if (receive.session, receive.credit) == (effect.session, effect.credit):
            stage.posted -= {receive}
            stage.cancelled |= {receive}
            return


def _d_closes(stage: Stage, session: int) -> None:
    """What destroying D's endpoint does, by lane. Receives that are not matched end without a trace."""
    stage.lanes_d -= {session}
    stage.d_broken -= {session}
    was_live = session in stage.lanes_live
    stage.lanes_live -= {session}
    stage.posted = frozenset(receive for receive in stage.posted if receive.session != session)
    stage.cancelled = frozenset(receive for receive in stage.cancelled if receive.session != session)
    mine = frozenset(moving for moving in stage.moving if moving.receive.session == session)
    if stage.plan.lane == "close_fences":
        stage.moving -= mine
        stage.d_fences |= {session}
    elif stage.plan.lane == "receiver_reads":
        stage.d_fences |= {session}
    else:
        stage.moving -= mine
        stage.ghosts |= mine
    if was_live and stage.p is not None:
        stage.p_broken |= {session}


def _run_p_effect(stage: Stage, effect: Any) -> None:
    match effect:
        case Send():
            if stage.stream == "up":
                stage.to_d += (effect.envelope,)
        case CloseStream():
            if stage.stream == "up":
                stage.stream, stage.d_hears_loss = "none", "orderly"
            stage.to_p, stage.p_hears_loss = (), ""
        case OpenLane():
            stage.lanes_p |= {effect.session}
        case CloseSession():
            _p_closes(stage, effect.session)
        case Gather():
            content = Content(effect.session, effect.credit, effect.transfer, effect.parcel_index)
            stage.gathers |= {(effect.slot, content)}
        case SendParcel():
            stage.flight |= {Message(effect.session, effect.credit, stage.sending_memory[effect.slot])}
            stage.sends |= {(effect.slot, effect.session)}
        case NodePrefill():
            stage.computing = stage.computing.put(effect.ask.transfer, 0)
        case NodeReleased():
            stage.computing = stage.computing.drop(effect.transfer)
            _forget_ahead(stage, effect.transfer)
        case _:
            pass


def _p_closes(stage: Stage, session: int) -> None:
    stage.lanes_p -= {session}
    stage.p_broken -= {session}
    if session in stage.lanes_live and stage.d is not None:
        stage.d_broken |= {session}
    stage.lanes_live -= {session}
    stage.flight = frozenset(message for message in stage.flight if message.session != session)
    stage.p_fences |= {session}


def run_quietly(world: World, limit: int = 500) -> World:
    """The world after everything that happens by itself has happened, first things first."""
    for _ in range(limit):
        progress = [action for action in actions(world) if is_progress(action)]
        if not progress or at_rest(world):
            return world
        world, _log = apply(world, progress[0])
        check(world)
    raise Violation("the world does not come to rest")
