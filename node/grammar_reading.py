"""Grammars are read beside the engine's thread, and only for so long: for some, of a few words, the library needs hours.

A Submit with a grammar waits here until that has been read, and so does every later command of its request; all others pass. What
is not read in time is refused as invalid. Its thread cannot be stopped, and there are few of them: while none is left, grammars
that nobody has begun to read are refused as overload, and the node serves everything else.

Must not know: what a grammar says, roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from engine.port import Command, RequestKey, Submit
from foundation.log import get_logger

MOST_READERS = 2
READ_WITHIN_S = 10.0
"""Large ones take a tenth of a second; a machine under load may take much longer for that."""
REMEMBERED_REFUSALS = 256

log = get_logger()


@dataclass(slots=True, eq=False)
class _Waiting:
    grammar: str
    commands: list[Command]
    limit: asyncio.TimerHandle
    begun: bool = False


class GrammarReading:
    """On the asyncio thread. `read` is called on others, `post` with commands that have waited, `refuse` with a reason."""

    def __init__(
        self,
        read: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Command], None],
        refuse: Callable[[RequestKey, str], None],
        read_within_s: float = READ_WITHIN_S,
    ) -> None:
        self._read = read
        self._loop = loop
        self._post = post
        self._refuse = refuse
        self._read_within_s = read_within_s
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._wanted: SimpleQueue[tuple[RequestKey, str]] = SimpleQueue()
        self._readers = 0
        self._refused: deque[str] = deque(maxlen=REMEMBERED_REFUSALS)

    def hold(self, command: Command) -> bool:
        """Whether the command waits here."""
        waiting = self._waiting.get(command.key)
        if waiting is not None:
            waiting.commands.append(command)
            return True
        if not isinstance(command, Submit) or not command.sampling.grammar:
            return False
        grammar = command.sampling.grammar
        if grammar in self._refused:
            self._loop.call_soon(self._refuse, command.key, "invalid_grammar")
            return True
        self._waiting[command.key] = _Waiting(grammar, [command], self._limit(command.key))
        self._wanted.put((command.key, grammar))
        if self._readers < MOST_READERS:
            self._readers += 1
            threading.Thread(target=self._serve, name="grammar reader", daemon=True).start()
        return True

    def _limit(self, key: RequestKey) -> asyncio.TimerHandle:
        return self._loop.call_later(self._read_within_s, self._too_long, key)

    def _serve(self) -> None:
        """A reader's thread, for the process's life."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            while True:
                key, grammar = self._wanted.get()
                self._loop.call_soon_threadsafe(self._begun, key)
                self._read(grammar)
                self._loop.call_soon_threadsafe(self._done, key)

    def _begun(self, key: RequestKey) -> None:
        if (waiting := self._waiting.get(key)) is not None:
            waiting.begun = True
            waiting.limit.cancel()
            waiting.limit = self._limit(key)

    def _done(self, key: RequestKey) -> None:
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.limit.cancel()
            for command in waiting.commands:
                self._post(command)

    def _too_long(self, key: RequestKey) -> None:
        waiting = self._waiting.pop(key)
        log.error("grammar not read", request=key, begun=waiting.begun, limit_s=self._read_within_s)
        if waiting.begun:
            self._refused.append(waiting.grammar)
        self._refuse(key, "invalid_grammar" if waiting.begun else "overloaded")
