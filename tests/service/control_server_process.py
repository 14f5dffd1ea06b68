"""A prefill node's control server in a process of its own: talks on every stream without a pause, and ends it after a while."""

from __future__ import annotations

import asyncio
import sys

import grpc

from foundation.ids import Incarnation, NodeId
from kv_transfer.control_server import ControlServer
from kv_transfer.protocol.events import StreamLost, StreamOpened
from kv_transfer.protocol.messages import Envelope, Heartbeat

TALKS_FOR_S = 0.3
BEAT = Envelope(Incarnation(2), Incarnation(1), Heartbeat(1, True, ()))


async def main() -> None:
    talks: set[asyncio.Task[None]] = set()

    async def talk(peer: NodeId) -> None:
        ends_s = asyncio.get_running_loop().time() + TALKS_FOR_S
        while asyncio.get_running_loop().time() < ends_s:
            control.send(peer, BEAT)
            await asyncio.sleep(0.005)
        control.close(peer)

    def heard(event: StreamOpened | StreamLost) -> None:
        if isinstance(event, StreamOpened):
            talks.add(asyncio.create_task(talk(event.peer)))

    control = ControlServer(heard, lambda peer, envelope: None, lambda peer, reason: None, 5.0)
    server = grpc.aio.server()
    control.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
