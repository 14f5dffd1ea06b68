"""Two sides of a data plane for the contract tests: the near one in this process, the far one where it can be harmed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
from far_side_process import pattern

from kv_transfer.transport.base import Bytes, DataSession, Lane, Tag, Transport
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.transport.memory_network import MemoryNetwork
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import ucx_environment

DEADLINE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.0005)


class World(Protocol):
    lane_names: frozenset[str]
    near: Transport
    large_bytes: int
    """Long enough to be caught half-way."""

    async def listen(self, port: int = 0) -> str: ...
    async def expect(self, session: int) -> None: ...
    async def far_send(self, session: int, tag: Tag, size: int, seed: int) -> None: ...
    async def far_receive(self, session: int, tag: Tag, size: int, seed: int) -> None: ...
    async def far_outcome(self, tag: Tag) -> str: ...
    async def far_close(self, session: int) -> str: ...
    async def far_strangers(self) -> int: ...
    async def send_partly(self, session: int, tag: Tag, buffer: Bytes, seed: int) -> None:
        """The far side sends all of `buffer`'s size and is held up when a part has landed: its last byte is then still zero,
        unless this process was kept waiting meanwhile."""

    def let_go(self, tag: Tag) -> None:
        """Let what `send_partly` began go on, as far as nothing else stands in its way."""

    async def kill(self) -> None: ...
    async def stop(self) -> None: ...
    async def resume(self) -> None: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...


class MemoryWorld:
    def __init__(self, lane: Lane) -> None:
        self.lane_names = frozenset({lane.name})
        self.large_bytes = 1 << 20
        self.network = MemoryNetwork(lane)
        self.near: Transport = MemoryTransport(self.network)
        self._far = MemoryTransport(self.network)
        self._sessions: dict[int, asyncio.Future[DataSession]] = {}
        self._outcomes: dict[Tag, asyncio.Future[str]] = {}

    async def listen(self, port: int = 0) -> str:
        return await self._far.listen("127.0.0.1", port)

    async def expect(self, session: int) -> None:
        self._sessions[session] = self._far.expect(session, lambda reason: None)

    async def far_send(self, session: int, tag: Tag, size: int, seed: int) -> None:
        outcome = self._outcome(tag)
        (await self._sessions[session]).send(tag, pattern(size, seed), lambda it: outcome.set_result(type(it).__name__))

    async def far_receive(self, session: int, tag: Tag, size: int, seed: int) -> None:
        outcome, buffer = self._outcome(tag), np.zeros(size, np.uint8)

        def done(it: object) -> None:
            right = np.array_equal(buffer, pattern(size, seed))
            outcome.set_result(type(it).__name__ if right else "Wrong")

        (await self._sessions[session]).post_receive(tag, buffer, done)

    async def far_outcome(self, tag: Tag) -> str:
        return await asyncio.wait_for(self._outcome(tag), DEADLINE_S)

    async def far_close(self, session: int) -> str:
        return type(await (await self._sessions[session]).close()).__name__

    async def far_strangers(self) -> int:
        return self._far.strangers_refused

    async def send_partly(self, session: int, tag: Tag, buffer: Bytes, seed: int) -> None:
        self.network.hold(tag, buffer.size // 2)
        await self.far_send(session, tag, buffer.size, seed)
        await until(lambda: bool(buffer[buffer.size // 4]))

    def let_go(self, tag: Tag) -> None:
        self.network.release(tag)

    async def kill(self) -> None:
        self._far.kill()

    async def stop(self) -> None:
        self._far.stop()

    async def resume(self) -> None:
        self._far.resume()

    async def restart(self) -> None:
        assert not self._far.alive
        self._far = MemoryTransport(self.network)
        self._sessions.clear()

    async def close(self) -> None:
        await self.near.close()

    def _outcome(self, tag: Tag) -> asyncio.Future[str]:
        return self._outcomes.setdefault(tag, asyncio.get_running_loop().create_future())


class UcxWorld:
    """Both workers choose among `lanes`. The far side is a child process."""

    program = Path(__file__).parent / "far_side_process.py"

    def __init__(self, lanes: str, lane_names: frozenset[str]) -> None:
        self.lane_names = lane_names
        self.large_bytes = 128 << 20
        self._environment = {"FAR_SIDE_LANES": lanes, **self.environment(lanes)}
        self.near: Transport = self._new_near()
        self._harmed = False
        self._outcomes: dict[Tag, asyncio.Future[str]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ready = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    def environment(self, lanes: str) -> dict[str, str]:
        return ucx_environment(lanes)

    def transport(self) -> UcxTransport:
        return UcxTransport()

    def _new_near(self) -> UcxTransport:
        with patch.dict(os.environ, self._environment):  # UCX reads its settings here and now
            return self.transport()

    async def begin_anew(self) -> None:
        """New transports on both sides; the far one in the same process, unless that was killed or stopped."""
        await self.near.close()
        if self._harmed:
            await self.restart()
        else:
            await self._ask(do="renew")
        self._outcomes.clear()
        self.near = self._new_near()

    async def start(self) -> None:
        self._harmed = False
        environment = {**os.environ, **self._environment}
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, str(self.program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._ready.clear()
        self._reader = asyncio.create_task(self._read(self._child))
        await asyncio.wait_for(self._ready.wait(), DEADLINE_S)

    async def listen(self, port: int = 0) -> str:
        return str(await self._ask(do="listen", port=port))

    async def expect(self, session: int) -> None:
        await self._ask(do="expect", session=session)

    async def far_send(self, session: int, tag: Tag, size: int, seed: int) -> None:
        await self._ask(do="send", session=session, tag=tag, size=size, seed=seed)

    async def far_receive(self, session: int, tag: Tag, size: int, seed: int) -> None:
        await self._ask(do="receive", session=session, tag=tag, size=size, seed=seed)

    async def far_outcome(self, tag: Tag) -> str:
        return await asyncio.wait_for(self._outcome(tag), DEADLINE_S)

    async def far_close(self, session: int) -> str:
        return str(await self._ask(do="close", session=session))

    async def far_strangers(self) -> int:
        return int(await self._ask(do="strangers"))

    async def far_gives_up(self, session: int) -> None:
        """It does not expect this session any more, unless it has come."""
        await self._ask(do="give_up", session=session)

    async def far_sockets(self) -> int:
        return int(await self._ask(do="sockets"))

    async def send_partly(self, session: int, tag: Tag, buffer: Bytes, seed: int) -> None:
        await self._tell(do="send", session=session, tag=tag, size=buffer.size, seed=seed)
        await until(lambda: bool(buffer[buffer.size // 64]))
        await self.stop()

    def let_go(self, tag: Tag) -> None:
        self._go_on()

    async def kill(self) -> None:
        assert self._child is not None
        self._harmed = True
        self._child.send_signal(signal.SIGKILL)
        await self._child.wait()

    async def stop(self) -> None:
        assert self._child is not None
        self._harmed = True
        self._child.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._child.pid}/stat")
        await until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")

    async def resume(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        assert self._child is not None
        if self._child.returncode is None:
            self._child.send_signal(signal.SIGCONT)

    async def restart(self) -> None:
        await self._end_child()
        await self.start()

    async def close(self) -> None:
        await self.near.close()
        await self._end_child()

    async def _end_child(self) -> None:
        if self._child is not None and self._child.returncode is None:
            await self.kill()
        if self._reader is not None:
            await self._reader

    async def _ask(self, **command: object) -> Any:
        return await asyncio.wait_for(await self._tell(**command), DEADLINE_S)

    async def _tell(self, **command: object) -> asyncio.Future[Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        number, answer = len(self._answers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._child.stdin.write(json.dumps({"number": number, **command}).encode() + b"\n")
        await self._child.stdin.drain()
        return answer

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            match json.loads(line):
                case {"number": number, "answer": answer}:
                    self._answers[number].set_result(answer)
                case {"tag": tag, "outcome": outcome, **rest}:
                    self._outcome(Tag(tag)).set_result(outcome if rest.get("right", True) else "Wrong")
                case {"ready": True}:
                    self._ready.set()

    def _outcome(self, tag: Tag) -> asyncio.Future[str]:
        return self._outcomes.setdefault(tag, asyncio.get_running_loop().create_future())
