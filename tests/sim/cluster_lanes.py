"""The data plane of a simulated cluster: the memory transport between machines that can die, hang and be cut off.

It keeps all that `kv_transfer.transport.memory` models (matched receives that cannot be cancelled, late writes, stale tags,
sender-local completion) and adds time, links and the n-th effect that fails. Parcels overtake one another.

Every byte that lands is checked against the receiver's own books first: `check_landing` may refuse it.

Must not know: the protocol's states.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from cluster_clock import Process
from cluster_effects import Effects
from cluster_wires import NOBODY, Link, Wires

from kv_transfer.transport.base import (
    Bytes,
    CloseOutcome,
    DataSession,
    Lane,
    LostCallback,
    ReceiveFailed,
    ReceiveOutcome,
    SendFailed,
    SendOutcome,
    Tag,
    TransportError,
)
from kv_transfer.transport.memory import MemorySession, MemoryTransport
from kv_transfer.transport.memory_network import MemoryNetwork, Message, Receive

TURN_S = 0.002
LONGEST_CLOSING_S = 0.02
OVERTAKEN = 0.25
"""How often a message that could move is left for the next turn."""

CheckLanding = Callable[["SimulatedTransport", int, Tag], None]


class SimulatedLanes(MemoryNetwork):
    def __init__(self, wires: Wires, lane: Lane, rng: random.Random, check_landing: CheckLanding) -> None:
        super().__init__(lane, eager_bytes=64, fragment_bytes=256, wire_fragments=2)
        self.wires = wires
        self._rng = rng
        self._check_landing = check_landing
        self.posted: set[Tag] = set()
        """Every tag that was ever posted: nonces are random, so none comes twice."""

    def of_process(self, process: Process, effects: Effects) -> SimulatedTransport:
        return SimulatedTransport(self, process, effects)

    def closing_s(self) -> float:
        """Destroying an endpoint takes its time, or none at all."""
        return max(0.0, self._rng.uniform(-LONGEST_CLOSING_S / 4, LONGEST_CLOSING_S))

    def link(self, source: MemorySession, target: MemorySession) -> Link:
        return self.wires.link(_machine(source), _machine(target))

    def wake(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.wires.loop.call_later(TURN_S, self._turn, context=NOBODY)

    def _turn(self) -> None:
        self._turn_scheduled = False
        moved = [self._move_over_link(message) for message in list(self.moving)]
        if any(moved):
            self.wake()

    def _move_over_link(self, message: Message) -> bool:
        assert message.receive is not None
        link, now_s = self.link(message.sender, message.receive.session), self.wires.loop.now_s
        if link.cut and self.lane.close_fences_receives:
            return False
        if link.data_free_s > now_s or self._rng.random() < OVERTAKEN:
            return True
        if not self._move(message):
            return False
        link.data_free_s = now_s + link.slow_s
        return True

    def _land(self, message: Message, receive: Receive) -> bool:
        if message.wire and self._sink_moves(receive):
            transport = receive.session.transport
            assert isinstance(transport, SimulatedTransport)
            if transport.alive:
                self._check_landing(transport, receive.session.session, receive.tag)
        return super()._land(message, receive)


def _machine(session: MemorySession) -> str:
    assert isinstance(session.transport, SimulatedTransport)
    return session.transport.process.name


class SimulatedTransport(MemoryTransport):
    network: SimulatedLanes

    def __init__(self, network: SimulatedLanes, process: Process, effects: Effects) -> None:
        super().__init__(network)
        self.process = process
        self.effects = effects

    def tell(self, callback: Callable[[Any], None], news: Any) -> None:
        """The loop itself keeps news from whoever is stopped or dead."""
        self.network.wires.loop.call_soon(callback, news, context=self.process.context.copy())

    def new_session(self, session: int, lost: LostCallback) -> SimulatedSession:
        return SimulatedSession(self, session, lost)

    async def dial(self, address: str, session: int, lost: LostCallback, deadline_s: float) -> DataSession:
        wires, here, there = self.network.wires, self.process.name, address.partition(":")[0]
        there_and_back = (wires.link(here, there), wires.link(there, here))
        await asyncio.sleep(TURN_S + sum(link.slow_s for link in there_and_back))
        if any(link.cut for link in there_and_back):
            await asyncio.sleep(deadline_s)
            raise TransportError("dial_timeout", f"{address} did not answer")
        return await super().dial(address, session, lost, deadline_s)


class SimulatedSession(MemorySession):
    transport: SimulatedTransport

    def lose(self, reason: str) -> None:
        """That the peer is gone travels as all else does."""
        if self.peer is not None:
            self.transport.network.link(self.peer, self).carry(lambda: MemorySession.lose(self, reason))

    async def close(self) -> CloseOutcome:
        outcome = await super().close()
        if (closing_s := self.transport.network.closing_s()) > 0:
            await asyncio.sleep(closing_s)
        return outcome

    def post_receive(self, tag: Tag, buffer: Bytes, done: Callable[[ReceiveOutcome], None]) -> None:
        assert tag not in self.transport.network.posted, f"I4: tag {tag:#x} is posted for the second time"
        self.transport.network.posted.add(tag)
        if self.transport.effects.fails("post"):
            self.transport.tell(done, ReceiveFailed(tag, "post_refused"))
        else:
            super().post_receive(tag, buffer, done)

    def send(self, tag: Tag, buffer: Bytes, done: Callable[[SendOutcome], None]) -> None:
        if self.transport.effects.fails("send"):
            raise TransportError("send_refused", "an injected failure")
        if self.transport.effects.fails("deliver"):
            self.transport.tell(done, SendFailed(tag, "endpoint_failed"))
            return
        super().send(tag, buffer, done)
