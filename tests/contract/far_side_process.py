"""The far side of a transport test in a process of its own, so that it can be stopped and killed.

Reads one JSON command a line on stdin and answers each with one line; news of operations come as lines of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kv_transfer.transport.base import Bytes, DataSession, ReceiveOutcome, SendOutcome, Tag
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment


def pattern(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes from 1 to 255: a landed byte is never zero."""
    return np.resize(np.random.default_rng(seed).integers(1, 256, min(size, 99_991), dtype=np.uint8), size)


def open_sockets() -> int:
    """Of this process."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found += str(link.readlink()).startswith("socket:")
    return found


def say(**news: object) -> None:
    print(json.dumps(news), flush=True)  # noqa: T201


class FarSide:
    def __init__(self, transport: UcxTransport) -> None:
        self._transport = transport
        self._sessions: dict[int, asyncio.Future[DataSession]] = {}

    async def obey(self, command: dict[str, Any]) -> object:
        match command:
            case {"do": "listen", "port": port}:
                return await self._transport.listen("127.0.0.1", port)
            case {"do": "expect", "session": session}:
                self._sessions[session] = self._transport.expect(session, lambda reason: say(lost=reason))
            case {"do": "send", "session": session, "tag": tag, "size": size, "seed": seed}:
                (await self._sessions[session]).send(Tag(tag), self.message(size, seed), self._sent)
            case {"do": "receive", "session": session, "tag": tag, "size": size, "seed": seed}:
                buffer = self.room(size)
                (await self._sessions[session]).post_receive(Tag(tag), buffer, partial(self._received, buffer, seed))
            case {"do": "close", "session": session}:
                return type(await (await self._sessions[session]).close()).__name__
            case {"do": "give_up", "session": session}:
                self._sessions[session].cancel()
            case {"do": "renew"}:
                await self._transport.close()
                self._transport, self._sessions = UcxTransport(), {}
            case {"do": "sockets"}:
                return open_sockets()
            case {"do": "strangers"}:
                return self._transport.strangers_refused
            case _:
                raise AssertionError(f"unknown command {command}")
        return None

    def message(self, size: int, seed: int) -> Bytes:
        return pattern(size, seed)

    def room(self, size: int) -> Bytes:
        return np.zeros(size, np.uint8)

    def holds(self, buffer: Bytes, size: int, seed: int) -> bool:
        return bool(np.array_equal(buffer, pattern(size, seed)))

    def _sent(self, outcome: SendOutcome) -> None:
        say(tag=outcome.tag, outcome=type(outcome).__name__)

    def _received(self, buffer: Bytes, seed: int, outcome: ReceiveOutcome) -> None:
        say(tag=outcome.tag, outcome=type(outcome).__name__, right=self.holds(buffer, buffer.size, seed))


async def serve(make: Callable[[], FarSide]) -> None:
    """Made on the running loop."""
    far_side = make()
    say(ready=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        say(number=command["number"], answer=await far_side.obey(command))


def on_the_host() -> FarSide:
    apply_ucx_environment(ucx_environment(os.environ["FAR_SIDE_LANES"]))
    return FarSide(UcxTransport())


if __name__ == "__main__":
    asyncio.run(serve(on_the_host))
