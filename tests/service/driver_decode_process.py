"""A decode driver with the fake engine in a process of its own: begins one transfer, as argv[1] (JSON) says, and waits."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys

from driver_pair import FINGERPRINT, LIMITS, MASTER, SAMPLING, WHOLE, FakeDecodeEngine, Watcher, make_pool, use_ucx

from foundation.ids import Incarnation, NodeId, RequestId, TransferId
from foundation.ticket import Ticket, digest_of_fingerprint, digest_of_tokens, sign_ticket
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import EngineProgress, NodeIdentity
from kv_transfer.faults import faults_of_process
from kv_transfer.port import BeginTransfer


async def main() -> None:
    wanted = json.loads(sys.argv[1])
    prompt = tuple(wanted["tokens"])
    identity = NodeIdentity(NodeId("d9"), Incarnation(secrets.randbits(64)), FINGERPRINT, 0.1)
    engine = FakeDecodeEngine(make_pool(WHOLE, 1))
    engine.driver = DecodeDriver(
        identity, engine.pool, LIMITS, use_ucx(), engine, lambda: EngineProgress(0, False), Watcher(),
        faults_of_process(enabled=True),
    )  # fmt: skip
    transfer = TransferId(RequestId("from-d9"), 1, 1)
    ticket = Ticket(
        transfer.attempt_id, 1, identity.incarnation, Incarnation(wanted["prefill_incarnation"]), 0,
        digest_of_fingerprint(FINGERPRINT), digest_of_tokens(prompt, ()),
    )  # fmt: skip
    signed = sign_ticket(ticket, MASTER.for_node(NodeId("p0")))
    address = wanted["control_address"]
    engine.driver.begin(BeginTransfer(transfer, NodeId("p0"), address, signed, prompt, (), SAMPLING, 60.0))
    await asyncio.Event().wait()


asyncio.run(main())
