"""Tickets that open nothing are refused on a real control stream, by name, and each refusal is counted."""

from __future__ import annotations

import pytest
from driver_pair import MASTER, driver_pair, until

from foundation.ids import NodeId, RequestId, TransferId
from foundation.keys import MasterKeys
from foundation.metrics import DROPPED_REASONS
from foundation.ticket import EPOCH_S, TicketRefusal

pytestmark = pytest.mark.sockets

TOKENS = tuple(range(60))


async def test_f09_forged_replayed_and_expired_tickets_are_refused_and_counted() -> None:
    async with driver_pair() as pair:
        good = pair.begin(TOKENS)
        assert (await pair.outcome(good))[0] == "committed"
        await until(lambda: not pair.decode.side.transfers and not pair.prefill.side.transfers)
        used = pair.ticket(good, TOKENS)
        pair.decode_engine.outcomes.pop(good)
        pair.decode_engine.tokens.pop(good)
        assert (await pair.outcome(pair.begin_as(good, TOKENS, used)))[0] == "refused: ticket_already_used"
        transfer = TransferId(RequestId("forged"), 1, 1)
        body = pair.ticket(transfer, TOKENS)[:-32]
        forged = body + bytes(32)
        assert (await pair.outcome(pair.begin_as(transfer, TOKENS, forged)))[0] == "refused: ticket_forged"
        transfer = TransferId(RequestId("expired"), 1, 1)
        old = pair.ticket(transfer, TOKENS)
        pair.prefill._gate._started_s -= 2 * EPOCH_S  # as if the node had been up for two epochs more
        assert (await pair.outcome(pair.begin_as(transfer, TOKENS, old)))[0] == "refused: ticket_expired"
        refused = {name: count for name, count in pair.prefill_watcher.drops.items() if name.startswith("ticket_")}
        assert refused == {"ticket_already_used": 1, "ticket_forged": 1, "ticket_expired": 1}
        await pair.at_rest()


def test_every_refusal_of_a_ticket_has_a_label_of_its_own() -> None:
    assert {refusal.value for refusal in TicketRefusal} <= set(DROPPED_REASONS)
    assert isinstance(MASTER, MasterKeys)
    assert MASTER.for_node(NodeId("p0")) != MASTER.for_node(NodeId("p1"))
