"""A small closed world around the real protocol machines: one D, one P, a control stream, a data plane, two nodes.

A `World` is immutable and hashable; `actions` names everything that can happen next, `transfer_actions.apply` makes it happen,
`transfer_invariants.check` checks what must hold in every state. The machines are the real ones; streams, lanes and
nodes are models of what docs/protocol.md says about them:

- control stream: first in, first out; a cut loses any tail of either direction, and each side notices on its own time;
- data plane: a message waits until its receive is matched, then is written, then completes; what is matched cannot be
  cancelled; the sender's completion may come at any time; `lane` says what closing D's endpoint proves;
- deadlines: an event, allowed whenever nothing else could happen, and out of the blue as often as the budget says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foundation.fingerprint import Fingerprint
from foundation.ids import Incarnation, NodeId, RequestId, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.protocol import events
from kv_transfer.protocol.decode_turn import DecodeSide
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Envelope, Hello
from kv_transfer.protocol.peer import PeerState
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
    by_layer: bool = False  # P is told of a chunk's early layers while later ones are computed
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
    ahead: Table[TransferId, int] = field(default_factory=Table)
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
    return World(plan, new_d(plan, 1), new_p(plan, 1), budget, plan.transfers)


def new_d(plan: Plan, incarnation: int) -> DecodeSide:
    return DecodeSide(_local(plan, D, incarnation))


def new_p(plan: Plan, incarnation: int) -> PrefillSide:
    return PrefillSide(_local(plan, P, incarnation), new_sending_slots(plan.sending_slots, plan.sending_slots))


def transfer(request: str, attempt: int = 1, try_number: int = 1) -> TransferId:
    return TransferId(RequestId(request), attempt, try_number)


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
        yield from (("d_fenced", session) for session in world.d_fences if _fence_is_due(world, session))
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
        yield from (("p_fenced", session) for session in world.p_fences if _fence_is_due(world, session))
        yield from (("gathered", *gather) for gather in world.gathers)
        yield from (("sent", *send) for send in world.sends)
        yield from (("prefill", name) for name, stage in world.computing.items() if stage < last_stage(world.plan))
        yield from (("layers", name) for name in world.computing if _computes_further_layers(world, name))
    else:
        yield ("restart_p",)


def _computes_further_layers(world: World, name: TransferId) -> bool:
    plan = world.plan
    in_a_chunk = 1 <= world.computing[name] < last_stage(plan) - 1
    return plan.by_layer and in_a_chunk and world.ahead.get(name, 0) + 1 < plan.parcels_per_position


def _stream_progress(world: World) -> Iterator[Action]:
    p_free = world.p is not None and not world.p_hears_loss
    if world.stream == "dialling" and p_free and not world.d_hears_loss:
        yield ("connect",)
    if world.stream == "dialling" and world.p is None and world.d is not None and _connecting(world.d):
        yield ("refused",)
    for session in world.lanes_d:
        if session in world.lanes_p:
            yield ("lane", session)
        elif world.p is None or D not in world.p.peers or world.p.peers[D].session != session:
            yield ("lane_fails", session)


def _connecting(side: DecodeSide) -> bool:
    return P in side.peers and side.peers[P].state is PeerState.CONNECTING


def _matches(world: World) -> Iterator[tuple[Message, Receive]]:
    receives = {(receive.session, receive.credit): receive for receive in world.posted}
    for message in world.flight:
        if receive := receives.get((message.session, message.credit)):
            yield message, receive


def _fence_is_due(world: World, session: int) -> bool:
    return not any(moving.receive.session == session for moving in world.moving | world.ghosts)


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


def last_stage(plan: Plan) -> int:
    """0 asked, 1 reserved, then one for each chunk, then the token."""
    return 2 + -(-plan.positions // plan.chunk)


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
