"""A prefill driver with the fake engine in a process of its own, so that a test can kill or stop it.

argv: control port, 0 for any. Writes one JSON line with its control address and incarnation to stdout; serves until its stdin
is closed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys

import grpc
from driver_pair import FINGERPRINT, LIMITS, MASTER, WHOLE, FakePrefillEngine, Watcher, make_pool, use_ucx

from foundation.ids import Incarnation, NodeId
from kv_transfer.driver import NodeIdentity
from kv_transfer.faults import faults_of_process
from kv_transfer.prefill_driver import PrefillDriver


async def main() -> None:
    transport = use_ucx()
    data_address = await transport.listen("127.0.0.1", 0)
    identity = NodeIdentity(NodeId("p0"), Incarnation(secrets.randbits(64)), FINGERPRINT, 0.1)
    engine = FakePrefillEngine(make_pool(WHOLE, 2))
    engine.driver = PrefillDriver(
        identity, engine.pool, LIMITS, transport, data_address, MASTER.for_node(identity.node_id), engine,
        engine.progress, Watcher(), faults_of_process(enabled=True),
    )  # fmt: skip
    server = grpc.aio.server()
    engine.driver.register(server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    sys.stdout.write(json.dumps({"control_address": f"127.0.0.1:{port}", "incarnation": identity.incarnation}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await engine.driver.close()
    await server.stop(0)
    await transport.close()


asyncio.run(main())
