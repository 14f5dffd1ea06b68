"""What must hold in a simulated cluster: the invariants of docs/protocol.md, looked at from outside all nodes.

Whoever finds one broken says so with `violated`; the simulation goes on, so that a trace shows what came of it.

Must not know: faults, routers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cluster_clock import PROCESS, Process, VirtualLoop

from engine.model.toy_kv import ToyPool, toy_kv
from engine.request import Stage
from foundation.ids import CreditNumber, TransferId
from kv_transfer import staging
from kv_transfer.driver import ParcelStage
from kv_transfer.protocol import effects as do
from kv_transfer.protocol import events as on
from kv_transfer.protocol.credit import SlotState
from kv_transfer.protocol.messages import Heartbeat, Sealed
from kv_transfer.protocol.sending import SendingState
from kv_transfer.transport.base import NUMBER_BITS, Tag

WRITABLE = (SlotState.POSTED, SlotState.CANCELLING, SlotState.QUARANTINED)
TRACE_LIMIT = 200_000


class Books:
    """`lives` by process, dead ones included. `trace` is what happened, in order, written out only if somebody asks."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.lives: dict[Process, Any] = {}
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.trace: list[tuple[float, str, Any]] = []
        self.parcel: Callable[[ParcelStage, str, str], None] = lambda stage, prefill, decode: None
        """Told of each parcel that has come to a stage, with its transfer's two nodes."""
        self._sealed: set[TransferId] = set()
        self._ended: set[tuple[Process, TransferId]] = set()

    def violated(self, what: str) -> None:
        if self.loop.over:
            return  # what the dead still say when they are cleared away
        if len(self.violations) < 20:
            self.violations.append(f"{self.loop.now_s:.4f} {what}")
        self.note("!", f"VIOLATION {what}")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violated(what)

    def note(self, who: str, what: Any) -> None:
        if len(self.trace) < TRACE_LIMIT:
            self.trace.append((self.loop.now_s, who, what))

    # --- bytes

    def check_landing(self, transport: Any, session: int, tag: Tag) -> None:
        """I3: a byte lands only in a slot whose credit is open."""
        life = self.lives[transport.process]
        if not life.decodes:
            return
        landing = life.driver._landings._landings.get(session)
        if landing is None:
            self.violated(f"I3: bytes land in an arena of {life} that was given back")
        elif landing.nonce == tag >> NUMBER_BITS:
            arena = life.driver.side.arenas.get(session)
            credit = CreditNumber(tag & ((1 << NUMBER_BITS) - 1))
            slot = arena.taken.get(credit) if arena is not None else None
            if slot is None:
                self.violated(f"I3: bytes of credit {credit} land in a slot of {life} that is free or another's")
            else:
                self.require(slot.state in WRITABLE, f"I3: bytes land in a {slot}")

    def check_scatter(self, life: Any, job: staging.Scatter) -> None:
        """I1: a scatter writes only into blocks that are reserved for a transfer and nobody else's."""
        if life.engine.status().failed is not None:
            return  # a broken engine keeps its blocks as they are, and hands none out any more
        state = life.engine.engine.scheduler._state
        written = set(job.blocks.ids[job.blocks.covering(job.parcel, life.machine.layout.block_size)].tolist())
        owners = [request for request in state.requests.values() if written & set(request.blocks)]
        self.require(
            len(owners) == 1 and owners[0].stage is Stage.RESERVED and written <= set(owners[0].blocks),
            f"I1: {life} scatters into blocks of {[(owner.key, owner.stage.value) for owner in owners]}",
        )

    # --- what the machines of the protocol say

    def decode_turn(self, driver: Any, event: Any, effects: Sequence[Any]) -> None:
        process = _here()
        for arena in driver.side.arenas.values():
            try:
                arena.check()
            except AssertionError as broken:
                self.violated(f"I6: {process}: {broken}")
        for effect in effects:
            match effect:
                case do.Send(peer=peer, envelope=envelope):
                    self._said(process, peer, envelope.message)
                case do.NodeCommitted() | do.NodeEnded():
                    self._decode_ended(driver, process, effect)
                case do.Count(peer=peer, reason=reason):
                    self.counts[reason.partition(":")[0]] += 1
                    self.require(reason != "gone_with_credits", f"I6: {peer} forgot credits that nobody can resolve")
                    self.note(process.name, effect)
                case do.NodeFirstToken() | do.PostReceive() | do.Scatter():
                    pass
                case do.CloseSession(peer=peer):
                    own_end = isinstance(event, on.End | on.Reserved | on.Unavailable | on.Scattered)
                    self.require(not own_end, f"I9: one transfer's end closes the session of {process} with {peer}")
                    self.note(process.name, effect)
                case _:
                    self.note(process.name, effect)

    def prefill_turn(self, driver: Any, event: Any, effects: Sequence[Any]) -> None:
        process = _here()
        for effect in effects:
            match effect:
                case do.Send(peer=peer, envelope=envelope):
                    self._said(process, peer, envelope.message)
                case do.Count(reason=reason):
                    self.counts[reason.partition(":")[0]] += 1
                    self.note(process.name, effect)
                case do.NodeReleased(transfer=transfer):
                    self.require((process, transfer) not in self._ended, f"I5: {transfer} is released twice")
                    self._ended.add((process, transfer))
                    self.note(process.name, effect)
                case do.Gather() | do.SendParcel() | do.NodePrefill():
                    pass
                case _:
                    self.note(process.name, effect)
        self._sealed |= {transfer.id for transfer in driver.side.transfers.values() if transfer.sealed}

    def _said(self, process: Process, peer: str, message: Any) -> None:
        if not isinstance(message, Heartbeat):
            said = f"Sealed({message.transfer})" if isinstance(message, Sealed) else message
            self.note(f"{process.name}->{peer}", said)

    def _decode_ended(self, driver: Any, process: Process, effect: do.NodeCommitted | do.NodeEnded) -> None:
        """I5: once; D commits only what P has sealed. I2: what counts as computed is what the model would have written."""
        transfer, positions = effect.transfer, effect.verified_positions
        self.note(process.name, effect)
        self.require((process, transfer) not in self._ended, f"I5: {transfer} ends twice on {process}")
        self._ended.add((process, transfer))
        if isinstance(effect, do.NodeCommitted):
            self.require(transfer in self._sealed, f"I5: {process} commits {transfer}, which P has not sealed")
        inbound = driver._inbound.get(transfer)
        if positions == 0 or inbound is None or not len(inbound.blocks.ids):
            return
        life = self.lives[process]
        history = inbound.history.token_ids[:positions]
        stands = ToyPool(life.storage).read(inbound.blocks.ids.astype(np.int32), positions)
        should = toy_kv(history, np.arange(positions), life.machine.layout)
        self.require(np.array_equal(stands, should), f"I2: {positions} positions of {transfer} count, but differ")

    # --- rest

    def live(self) -> Iterator[Any]:
        return (life for process, life in self.lives.items() if process.alive)

    def unrest(self) -> list[str]:
        """What is still under way or held, by name; empty at rest."""
        return [f"{life}: {what}" for life in self.live() for what in _unrest(life)]

    def check_rest(self) -> None:
        """I8."""
        for life in self.live():
            pool = life.engine.engine.scheduler._state.pool
            self.require(pool.free + pool.cached == pool.total, f"I8: {life} holds {pool.in_use} blocks at rest")
            life.engine.engine.scheduler.check()


def _here() -> Process:
    process = PROCESS.get()
    assert process is not None, "a machine runs outside of every process"
    return process


def _unrest(life: Any) -> Iterator[str]:
    if life.driver is None:
        yield "it starts"
        return
    side = life.driver.side
    yield from (f"transfer {transfer.id} is {transfer.state.name}" for transfer in side.transfers.values())
    yield from (f"session with {peer.node_id} is {peer.state.name}" for peer in side.peers.values())
    if not life.engine.at_rest:
        yield "its engine works"
    yield from (f"its engine has {key}" for key in life.engine.engine.scheduler._state.requests)
    if life.decodes:
        yield from (f"arena of {arena.peer}, quarantined {arena.quarantined}" for arena in side.arenas.values())
        yield from (f"attempt {attempt} of its service" for attempt in life.service._attempts)
        if life.driver.staging_drawn_bytes:
            yield f"{life.driver.staging_drawn_bytes} bytes of staging"
    else:
        yield from (f"prefill {key} of its service" for key in life.service._prefills)
        yield from (
            f"sending slot is {slot.state.name}" for slot in side.sending.slots if slot.state is not SendingState.FREE
        )
        yield from (f"session {session:x} closes" for session in side.closing)
