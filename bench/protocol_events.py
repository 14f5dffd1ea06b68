"""Events a second that the protocol machines handle on one core: `python -m bench.protocol_events`, one line a side.

A quiet pair moves the KV of many transfers at once (the KV shape of an 8B model, 2,048 tokens in chunks of 512, slots of
4 MiB). The run is recorded once; then each side's own events are handled again and again, with nothing around the machines,
and the thread's CPU time is taken, so that a busy machine slows the figure less than it slows the clock. The best and the
median of the rounds are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, SlotIndex, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer.digest import KIND, TRAILER_BYTES, manifest_digest
from kv_transfer.port import BeginTransfer, SettledToken
from kv_transfer.protocol import decode_side, effects, events, prefill_side
from kv_transfer.protocol.decode_turn import DecodeSide
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Hello
from kv_transfer.protocol.prefill_turn import PrefillSide
from kv_transfer.protocol.sending import new_sending_slots

D, P = NodeId("D"), NodeId("P")
LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16, layer_group=32)
SLOT_BYTES = 4 << 20
SLOTS = 16
POSITIONS, CHUNK = 2048, 512
SESSION, NONCE = 1, SessionNonce(1)


def local(node: NodeId, incarnation: int) -> LocalNode:
    fingerprint = Fingerprint("weights", "architecture", "tokenizer", 1, "bfloat16", "none", "rope", 1)
    hello = Hello(node, 1, 0, fingerprint, LAYOUT, SLOT_BYTES, 0.5, "" if node == D else "p:1", 0, KIND)
    return LocalNode(Incarnation(incarnation), hello, TRAILER_BYTES, manifest_digest, unreserved_positions=1 << 30)


@dataclass
class Pair:
    """Both sides, and what has not happened yet. Every operation ends at once, in the order in which it began."""

    decode: DecodeSide
    prefill: PrefillSide
    waiting: deque[tuple[NodeId, Any]] = field(default_factory=deque)
    handled: dict[NodeId, list[Any]] = field(default_factory=lambda: {D: [], P: []})
    digests: dict[CreditNumber, int] = field(default_factory=dict)
    committed: int = 0

    def run(self, first: Iterable[tuple[NodeId, Any]]) -> None:
        self.waiting.extend(first)
        while self.waiting:
            node, event = self.waiting.popleft()
            self.handled[node].append(event)
            if node == D:
                self.decode, decode_effects = decode_side.handle(self.decode, event)
                self.waiting.extend(following for effect in decode_effects for following in self._decode(effect))
            else:
                self.prefill, prefill_effects = prefill_side.handle(self.prefill, event)
                self.waiting.extend(following for effect in prefill_effects for following in self._prefill(effect))

    def _decode(self, effect: effects.DecodeEffect) -> Iterable[tuple[NodeId, Any]]:
        match effect:
            case effects.OpenStream():
                yield P, events.StreamOpened(D, 0)
                yield D, events.StreamOpened(P, SESSION)
            case effects.Send(envelope=envelope):
                yield P, events.MessageReceived(D, envelope)
            case effects.OpenLane():
                yield P, events.LaneOpened(D, SESSION, NONCE, 0, 0, "tcp", 1e10)
                yield D, events.LaneOpened(P, SESSION, NONCE, SLOTS, SLOT_BYTES, "tcp", 1e10)
            case effects.NodeReserve(transfer=transfer, end_position=end_position):
                yield D, events.Reserved(transfer, 0, end_position)
            case effects.Scatter(credit=credit):
                yield D, events.Scattered(P, SESSION, credit, self.digests.pop(credit))
            case effects.NodeCommitted():
                self.committed += 1

    def _prefill(self, effect: effects.PrefillEffect) -> Iterable[tuple[NodeId, Any]]:
        match effect:
            case effects.Send(envelope=envelope):
                yield D, events.MessageReceived(P, envelope)
            case effects.Gather(slot=slot, credit=credit):
                self.digests[credit] = credit + 1
                yield P, events.Gathered(SlotIndex(slot), credit + 1)
            case effects.SendParcel(slot=slot, credit=credit):
                yield P, events.Sent(slot)
                yield D, events.Landed(P, SESSION, credit)
            case effects.NodePrefill(ask=ask):
                yield P, events.PrefillReserved(ask.transfer, 0, POSITIONS)
                for computed in range(CHUNK, POSITIONS + 1, CHUNK):
                    yield P, events.Computed(ask.transfer, computed)
                yield P, events.TokenSampled(ask.transfer, (SettledToken(7),))


def new_sides() -> tuple[DecodeSide, PrefillSide]:
    return DecodeSide(local(D, 1)), PrefillSide(local(P, 2), new_sending_slots(SLOTS, SLOTS))


def recorded(transfers: int) -> Pair:
    pair = Pair(*new_sides())
    history = tuple(range(POSITIONS))
    begins = [
        events.Begin(BeginTransfer(TransferId(RequestId(f"r{number}"), 1, 1), P, "p:0", b"", history, (), b"", 600.0))
        for number in range(transfers)
    ]
    pair.run((D, begin) for begin in begins)
    assert pair.committed == transfers, f"{pair.committed} of {transfers} transfers committed"
    assert not pair.decode.transfers, "a transfer is left on D"
    assert not pair.prefill.transfers, "a transfer is left on P"
    return pair


def events_per_second(handle: Callable[[Any, Any], tuple[Any, Any]], side: Any, happened: list[Any]) -> float:
    began_s = time.thread_time()
    for event in happened:
        side, _ = handle(side, event)
    return len(happened) / (time.thread_time() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", type=int, default=32, help="transfers at once")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    pair = recorded(arguments.transfers)
    decode, prefill = new_sides()
    for name, handle, side, happened in (
        ("decode", decode_side.handle, decode, pair.handled[D]),
        ("prefill", prefill_side.handle, prefill, pair.handled[P]),
    ):
        rates = [events_per_second(handle, side, happened) for _ in range(arguments.rounds)]
        print(  # noqa: T201
            f"{name} side: {max(rates):,.0f} events/s at best, {statistics.median(rates):,.0f} in the median "
            f"({len(happened)} events of {arguments.transfers} transfers at once, {arguments.rounds} rounds, one core)"
        )


if __name__ == "__main__":
    main()
