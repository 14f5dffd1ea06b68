"""A small closed world around the real protocol machines: one D, one P, a control stream, a data plane, two nodes.

A `World` is immutable and hashable; `actions` names everything that can happen next, `apply` makes it happen and checks the
invariants that concern what was done; `check` checks those of a state. The machines are the real ones; streams, lanes and
nodes are models of what docs/protocol.md says about them:

- control stream: first in, first out; a cut loses any tail of either direction, and each side notices on its own time;
- data plane: a message waits until its receive is matched, then is written, then completes; what is matched cannot be
  cancelled; the sender's completion may come at any time; `lane` says what closing D's endpoint proves;
- deadlines: an event, allowed whenever nothing else could happen, and out of the blue as often as the budget says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, SlotIndex, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.port import BeginTransfer, SettledToken
from kv_transfer.protocol import decode_side, events, prefill_side
from kv_transfer.protocol.credit import SlotState
from kv_transfer.protocol.decode_turn import DecodeSide
from kv_transfer.protocol.effects import (
    CancelReceive,
    CloseSession,
    CloseStream,
    Count,
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
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Credits, Envelope, Hello
from kv_transfer.protocol.prefill_turn import PrefillSide
from kv_transfer.protocol.sending import SendingState, new_sending_slots
from kv_transfer.protocol.table import Table

D, P = NodeId("D"), NodeId("P")
TRAILER_BYTES = 8
Action = tuple[Any, ...]


class Content(NamedTuple):
    """What a parcel's bytes and seed amount to: equal contents are equal digests."""

    session: int
    credit: int
    transfer: TransferId
    parcel_index: int

    @property
    def digest(self) -> int:
        return (
            10_000 * self.session + 1_000 * self.transfer.attempt + 100 * self.transfer.try_number + self.parcel_index
        )


class Message(NamedTuple):
    session: int
    credit: int
    content: Content


class Receive(NamedTuple):
    session: int
    credit: int
    slot: int


class Moving(NamedTuple):
    """A matched message: its bytes are on their way into the slot."""

    receive: Receive
    content: Content


@dataclass(frozen=True)
class Plan:
    """What the world is made of: constant. `cached[i]` is what D holds of the i-th transfer's positions already."""

    transfers: tuple[TransferId, ...]
    positions: int = 2
    chunk: int = 1
    cached: int = 0
    slots: int = 2
    sending_slots: int = 2
    lane: str = "close_fences"  # | "receiver_reads" | "sender_writes"
    parcels_per_position: int = 1
    declines: bool = False
    one_by_one: bool = False  # a transfer begins when the one before has ended


class Budget(NamedTuple):
    """How often each misfortune may still happen."""

    abort: int = 0
    cut: int = 0
    crash_p: int = 0
    crash_d: int = 0
    repeat: int = 0
    endpoint: int = 0
    prefill_fails: int = 0
    unavailable: int = 0
    deadline: int = 0
    corrupt: int = 0
    wrong_source: int = 0
    send_refused: int = 0
    receive_fails: int = 0


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True, slots=True)
class World:
    plan: Plan = field(compare=False, hash=False)
    d: DecodeSide | None
    p: PrefillSide | None
    budget: Budget
    to_begin: tuple[TransferId, ...]
    d_incarnation: int = 1
    p_incarnation: int = 1
    next_session: int = 1
    stream: str = "none"
    to_p: tuple[Envelope, ...] = ()
    to_d: tuple[Envelope, ...] = ()
    d_hears_loss: str = ""  # "" | "orderly": after what was sent | "abrupt": at any moment, what was sent is lost
    p_hears_loss: str = ""
    lanes_d: frozenset[int] = frozenset()
    lanes_p: frozenset[int] = frozenset()
    lanes_live: frozenset[int] = frozenset()
    d_broken: frozenset[int] = frozenset()
    p_broken: frozenset[int] = frozenset()
    d_fences: frozenset[int] = frozenset()
    p_fences: frozenset[int] = frozenset()
    posted: frozenset[Receive] = frozenset()
    flight: frozenset[Message] = frozenset()
    moving: frozenset[Moving] = frozenset()
    ghosts: frozenset[Moving] = frozenset()
    cancelled: frozenset[Receive] = frozenset()
    sends: frozenset[tuple[int, int]] = frozenset()
    gathers: frozenset[tuple[int, Content]] = frozenset()
    sending_memory: Table[int, Content] = field(default_factory=Table)
    memory: Table[tuple[int, int], Content] = field(default_factory=Table)
    scatters: frozenset[tuple[Receive, Content]] = frozenset()
    reserving: frozenset[TransferId] = frozenset()
    reserved: frozenset[TransferId] = frozenset()
    computing: Table[TransferId, int] = field(default_factory=Table)
    blocks: frozenset[tuple[TransferId, int]] = frozenset()
    tokens: frozenset[TransferId] = frozenset()
    outcomes: Table[TransferId, str] = field(default_factory=Table)


def one_parcel_a_position(
    from_position: int, end_position: int, source: KvLayout, target: KvLayout, slot_bytes: int
) -> tuple[ParcelName, ...]:
    """The cut of this world: every position's layers are one parcel, or as many as there are layers."""
    step = 1 if slot_bytes < source.token_bytes else source.layers
    return tuple(
        ParcelName(position, position + 1, layer, layer + step, 0, 1)
        for position in range(from_position, end_position)
        for layer in range(0, source.layers, step)
    )


def _local(plan: Plan, node: NodeId, incarnation: int) -> LocalNode:
    layout = KvLayout(layers=plan.parcels_per_position, kv_heads=1, head_dim=1, dtype="float32", block_size=1)
    fingerprint = Fingerprint("w", "a", "t", 1, "float32", "none", "r", 1)
    hello = Hello(
        node_id=node,
        protocol_major=1,
        protocol_minor=0,
        fingerprint=fingerprint,
        layout=layout,
        slot_bytes=8,
        step_limit_s=0.5,
        data_address="" if node == D else "p:1",
        session=0,
        digest="test",
    )
    return LocalNode(
        incarnation=Incarnation(1000 * (1 + (node == P)) + incarnation),
        hello=hello,
        trailer_bytes=TRAILER_BYTES,
        digest_of_all=sum,
        cut=one_parcel_a_position,
    )


def new_world(plan: Plan, budget: Budget) -> World:
    return World(plan, _new_d(plan, 1), _new_p(plan, 1), budget, plan.transfers)


def _new_d(plan: Plan, incarnation: int) -> DecodeSide:
    return DecodeSide(_local(plan, D, incarnation))


def _new_p(plan: Plan, incarnation: int) -> PrefillSide:
    return PrefillSide(_local(plan, P, incarnation), new_sending_slots(plan.sending_slots, plan.sending_slots))


def transfer(request: str, attempt: int = 1, try_number: int = 1) -> TransferId:
    return TransferId(RequestId(request), attempt, try_number)


def scatter_refusal(expected: Content, found: Content | None) -> str:
    """What verify + scatter finds: the seed is D's own, so only the very parcel that was granted verifies."""
    return "" if found == expected else "bad_digest"


# --- what can happen ----------------------------------------------------------------------------------------------


def actions(world: World) -> list[Action]:
    """All that can happen next: progress, misfortunes as the budget allows, and deadlines when nothing else moves."""
    progress = list(_progress(world))
    found = progress + list(_misfortunes(world))
    if not progress or world.budget.deadline:
        found += list(_deadlines(world, free=not progress))
    return found


def is_progress(action: Action) -> bool:
    """Whether an action is what a quiet world does by itself."""
    return action[0] not in MISFORTUNES


MISFORTUNES = {
    "abort",
    "cut",
    "crash_p",
    "crash_d",
    "repeat_to_p",
    "repeat_to_d",
    "endpoint",
    "prefill_fails",
    "unavailable",
    "corrupt",
    "wrong_source",
    "send_refused",
    "receive_fails",
    "early_deadline",
}


def _progress(world: World) -> Iterator[Action]:
    if world.d is not None:
        if not (world.plan.one_by_one and "open" in world.outcomes.values()):
            yield from (("begin", name) for name in world.to_begin[:1])
        yield from _stream_progress(world)
        if world.to_d:
            yield ("to_d",)
        if world.d_hears_loss == "abrupt" or (world.d_hears_loss and not world.to_d):
            yield ("d_hears_loss",)
        yield from (("d_broken", session) for session in world.d_broken)
        yield from (("d_fenced", session) for session in world.d_fences if _d_fence_is_due(world, session))
        yield from (("landed", moving) for moving in world.moving)
        yield from (("cancelled", receive) for receive in world.cancelled)
        yield from (("scattered", *scatter) for scatter in world.scatters)
        yield from (("reserved", name) for name in world.reserving)
    else:
        yield ("restart_d",)
    yield from (("match", message, receive) for message, receive in _matches(world))
    yield from (("ghost", moving) for moving in world.ghosts)
    if world.p is not None:
        if world.to_p:
            yield ("to_p",)
        if world.p_hears_loss == "abrupt" or (world.p_hears_loss and not world.to_p):
            yield ("p_hears_loss",)
        yield from (("p_broken", session) for session in world.p_broken)
        yield from (("p_fenced", session) for session in world.p_fences if _p_fence_is_due(world, session))
        yield from (("gathered", *gather) for gather in world.gathers)
        yield from (("sent", *send) for send in world.sends)
        yield from (("prefill", name) for name, stage in world.computing.items() if stage < _last_stage(world.plan))
    else:
        yield ("restart_p",)


def _stream_progress(world: World) -> Iterator[Action]:
    p_free = world.p is not None and not world.p_hears_loss
    if world.stream == "dialling" and p_free and not world.d_hears_loss:
        yield ("connect",)
    for session in world.lanes_d:
        if session in world.lanes_p:
            yield ("lane", session)
        elif world.p is None or D not in world.p.peers or world.p.peers[D].session != session:
            yield ("lane_fails", session)


def _matches(world: World) -> Iterator[tuple[Message, Receive]]:
    receives = {(receive.session, receive.credit): receive for receive in world.posted}
    for message in world.flight:
        if receive := receives.get((message.session, message.credit)):
            yield message, receive


def _d_fence_is_due(world: World, session: int) -> bool:
    return not any(moving.receive.session == session for moving in world.moving | world.ghosts)


_p_fence_is_due = _d_fence_is_due


def _misfortunes(world: World) -> Iterator[Action]:
    budget = world.budget
    live = tuple(world.d.transfers) if world.d is not None else ()
    if budget.abort:
        yield from (("abort", name) for name in live)
    if budget.cut and world.stream == "up":
        yield ("cut",)
    if budget.crash_p and world.p is not None:
        yield ("crash_p",)
    if budget.crash_d and world.d is not None:
        yield ("crash_d",)
    if budget.repeat and world.to_p and world.p is not None:
        yield ("repeat_to_p",)
    if budget.repeat and world.to_d and world.d is not None:
        yield ("repeat_to_d",)
    if budget.endpoint:
        yield from (("endpoint", session) for session in world.lanes_live)
    if budget.prefill_fails and world.p is not None:
        yield from (("prefill_fails", name) for name in world.computing)
    if budget.unavailable and world.d is not None:
        yield from (("unavailable", name) for name in world.reserving)
    if budget.corrupt:
        yield from (("corrupt", message) for message in world.flight)
    if budget.wrong_source and world.p is not None:
        yield from (("wrong_source", *gather) for gather in world.gathers)
    if budget.send_refused and world.p is not None:
        yield from (("send_refused", message) for message in world.flight if _sending_slot(world, message) is not None)
    if budget.receive_fails and world.d is not None:
        yield from (("receive_fails", moving) for moving in world.moving)


def _sending_slot(world: World, message: Message) -> int | None:
    return next((slot for slot, session in world.sends if world.sending_memory.get(slot) == message.content), None)


def _deadlines(world: World, *, free: bool) -> Iterator[Action]:
    kind = "deadline" if free else "early_deadline"
    if world.d is not None:
        if P in world.d.peers and not (free and world.d.peers[P].state.name == "READY"):
            yield (kind, "D", events.Silent(P))
        yield from ((kind, "D", events.Stalled(name)) for name in world.d.transfers)
        if free and P in world.d.peers and not world.d.transfers and not world.to_begin:
            yield (kind, "D", events.Idle(P))
        if free and any(arena.unresolved and P not in world.d.peers for arena in world.d.arenas.values()):
            yield (kind, "D", events.Beat(0, False, True))
    if world.p is not None:
        if D in world.p.peers and not (free and world.p.peers[D].state.name == "READY"):
            yield (kind, "P", events.Silent(D))
        yield from ((kind, "P", events.Stalled(name)) for name in world.p.transfers)
        yield from ((kind, "P", events.LeaseExpired(name)) for name in world.p.transfers)


def _last_stage(plan: Plan) -> int:
    """0 asked, 1 reserved, then one for each chunk, then the token."""
    return 2 + -(-plan.positions // plan.chunk)


# --- making it happen ---------------------------------------------------------------------------------------------


class Stage:
    """A world being changed by one action; `log` holds (side, event) and (side, effect) in order."""

    def __init__(self, world: World) -> None:
        self.__dict__.update({f.name: getattr(world, f.name) for f in fields(World)})
        self.log: list[tuple[str, str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def world(self) -> World:
        return World(**{f.name: getattr(self, f.name) for f in fields(World)})

    def tell_d(self, event: Any) -> None:
        self.log.append(("D", "event", event))
        before = self.d
        self.d, effects = decode_side.handle(self.d, event)
        for effect in effects:
            self.log.append(("D", "effect", effect))
            _check_d_effect(self, before, event, effect)
            _run_d_effect(self, effect)

    def tell_p(self, event: Any) -> None:
        self.log.append(("P", "event", event))
        self.p, effects = prefill_side.handle(self.p, event)
        for effect in effects:
            self.log.append(("P", "effect", effect))
            _check_p_effect(self, effect)
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
    _check_writable(stage, moving.receive)
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
    positions = min(stage.plan.positions, stage.plan.chunk * (reached - 1))
    if reached == 1:
        stage.tell_p(events.PrefillReserved(name, 0, stage.plan.positions))
    elif reached < _last_stage(stage.plan):
        stage.tell_p(events.Computed(name, positions))
    else:
        tokens = None if stage.plan.declines else (SettledToken(7),)
        stage.tell_p(events.TokenSampled(name, tokens))


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
        stage.d_fences |= stage.lanes_live
    stage.lanes_live = stage.lanes_p = stage.p_broken = stage.p_fences = frozenset()
    stage.gathers, stage.sends, stage.sending_memory, stage.computing = frozenset(), frozenset(), Table(), Table()


def _restart_p(stage: Stage) -> None:
    stage.p_incarnation += 1
    stage.p = _new_p(stage.plan, stage.p_incarnation)


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
    stage.d = _new_d(stage.plan, stage.d_incarnation)


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


# --- invariants ---------------------------------------------------------------------------------------------------

WRITABLE = {SlotState.POSTED, SlotState.CANCELLING, SlotState.QUARANTINED}


def _check_writable(stage: Stage, receive: Receive) -> None:
    arena = stage.d.arenas.get(receive.session)
    require(arena is not None, "I3: bytes land in an arena that was given back")
    slot = arena.slots[receive.slot]
    owned = slot.state in WRITABLE and slot.credit == receive.credit
    require(owned, f"I3: bytes of credit {receive.credit} land in a slot that is {slot.state.name}")


def _check_d_effect(stage: Stage, before: Any, event: Any, effect: Any) -> None:
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


def _check_credits(stage: Stage, message: Credits) -> None:
    require(message.transfer in stage.reserved, "I1: credits before a reservation")
    posted = {receive.credit for receive in stage.posted}
    posted |= {moving.receive.credit for moving in stage.moving}
    for credit in message.credits:
        require(credit.number in posted, "a credit was granted before its receive was posted")


def _check_outcome(stage: Stage, name: TransferId) -> None:
    require(stage.outcomes[name] == "open", f"I5: {name} ended twice")
    scattering = any(content.transfer == name for _, content in stage.scatters)
    require(not scattering, "I2: an end was told while a scatter was open")


def _check_committed(stage: Stage, effect: NodeCommitted) -> None:
    parcels = stage.d.transfers[effect.transfer].parcels if effect.transfer in stage.d.transfers else ()
    wanted = stage.plan.positions - stage.plan.cached
    require(len(parcels) == wanted * stage.plan.parcels_per_position, "committed against no plan")
    for index in range(len(parcels)):
        require((effect.transfer, index) in stage.blocks, f"I2: committed without parcel {index}")
    require(effect.transfer in stage.tokens, "committed without a first token")
    if stage.p is not None and effect.transfer in stage.p.transfers:
        require(stage.p.transfers[effect.transfer].sealed, "I5: D committed what P has not sealed")


def _check_prefix(stage: Stage, effect: NodeEnded) -> None:
    first = stage.plan.cached * stage.plan.parcels_per_position
    for index in range(effect.verified_positions * stage.plan.parcels_per_position - first):
        require((effect.transfer, index) in stage.blocks, f"I2: parcel {index} counts as computed and is not there")


def _check_p_effect(stage: Stage, effect: Any) -> None:
    match effect:
        case Gather():
            require(effect.transfer in stage.computing, "I1: a gather from blocks that were given back")
        case NodeReleased():
            require(effect.transfer in stage.computing, f"I5: {effect.transfer} was released twice")
            gathering = any(content.transfer == effect.transfer for _, content in stage.gathers)
            require(not gathering, "I1: blocks were given back under an open gather")
        case SendParcel():
            content = stage.sending_memory[effect.slot]
            require(content.credit == effect.credit, "I4: a parcel was sent under another's credit")
        case _:
            pass


def check(world: World) -> None:
    """The invariants of a state."""
    if world.d is not None:
        for arena in world.d.arenas.values():
            arena.check()
        for receive in [*world.posted, *(moving.receive for moving in world.moving | world.ghosts)]:
            _check_writable(world, receive)  # type: ignore[arg-type]
        for receive, _ in world.scatters:
            arena = world.d.arenas[receive.session]
            require(arena.slots[receive.slot].credit == receive.credit, "I1: a slot was given away under its scatter")
        _check_posted(world)
    if world.p is not None:
        _check_sending(world)


def _check_posted(world: World) -> None:
    """Whatever D believes to be posted is posted: no slot waits for what cannot come."""
    assert world.d is not None
    open_receives = {(r.session, r.credit) for r in world.posted | world.cancelled}
    open_receives |= {(m.receive.session, m.receive.credit) for m in world.moving}
    for arena in world.d.arenas.values():
        for slot in arena.slots:
            if slot.state in (SlotState.POSTED, SlotState.CANCELLING):
                require((arena.session, slot.credit) in open_receives, "I6: a credit is posted nowhere")


def _check_sending(world: World) -> None:
    assert world.p is not None
    gathering = {slot for slot, _ in world.gathers}
    sending = {slot for slot, _ in world.sends}
    for index, slot in enumerate(world.p.sending.slots):
        if slot.state is SendingState.FREE:
            require(index not in gathering | sending, "I1: a free sending slot is in use")


def at_rest(world: World) -> bool:
    """I8: nothing of any transfer is left on either side, and every begun transfer has its one outcome."""
    if world.d is None or world.p is None or world.to_begin:
        return False
    return (
        not world.d.transfers
        and not world.p.transfers
        and all(arena.settled for arena in world.d.arenas.values())
        and not any(arena.quarantined for arena in world.d.arenas.values())
        and not world.p.closing
        and all(slot.state is SendingState.FREE for slot in world.p.sending.slots)
        and not world.computing
        and not any(message.session in world.lanes_live for message in world.flight)
        and "open" not in world.outcomes.values()
    )


def waits_for_nobody(world: World) -> bool:
    """I7: only a deadline could move this world, although nobody hangs: something was not said. (Where only P's word or a
    process's end fences a lane, D has to dial again to hear it, and that is timed.)"""
    if world.plan.lane == "sender_writes" or at_rest(world):
        return False
    return not any(True for _ in _progress(world))


def run_quietly(world: World, limit: int = 500) -> World:
    """The world after everything that happens by itself has happened, first things first."""
    for _ in range(limit):
        progress = [action for action in actions(world) if is_progress(action)]
        if not progress or at_rest(world):
            return world
        world, _log = apply(world, progress[0])
        check(world)
    raise Violation("the world does not come to rest")
