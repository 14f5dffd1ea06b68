"""The far side of a transport test in a process of its own, so that it can be stopped and killed.

Reads one JSON command a line on stdin and answers each with one line; news of operations come as lines of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from typing import Any

import numpy as np

from kv_transfer.transport.base import DataSession, ReceiveOutcome, SendOutcome, Tag
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment


def pattern(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes from 1 to 255: a landed byte is never zero."""
    return np.resize(np.random.default_rng(seed).integers(1, 256, min(size, 99_991), dtype=np.uint8), size)


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
                (await self._sessions[session]).send(Tag(tag), pattern(size, seed), self._sent)
            case {"do": "receive", "session": session, "tag": tag, "size": size, "seed": seed}:
                buffer = np.zeros(size, np.uint8)
                (await self._sessions[session]).post_receive(Tag(tag), buffer, partial(self._received, buffer, seed))
            case {"do": "close", "session": session}:
                return type(await (await self._sessions[session]).close()).__name__
            case {"do": "strangers"}:
                return self._transport.strangers_refused
            case _:
                raise AssertionError(f"unknown command {command}")
        return None

    def _sent(self, outcome: SendOutcome) -> None:
        say(tag=outcome.tag, outcome=type(outcome).__name__)

    def _received(self, buffer: np.ndarray[Any, np.dtype[np.uint8]], seed: int, outcome: ReceiveOutcome) -> None:
        right = bool(np.array_equal(buffer, pattern(buffer.size, seed)))
        say(tag=outcome.tag, outcome=type(outcome).__name__, right=right)


async def main() -> None:
    apply_ucx_environment(ucx_environment(os.environ["FAR_SIDE_LANES"]))
    far_side = FarSide(UcxTransport())
    say(ready=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        say(number=command["number"], answer=await far_side.obey(command))


if __name__ == "__main__":
    asyncio.run(main())
