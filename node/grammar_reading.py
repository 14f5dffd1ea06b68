"""Grammars are read beside the engine's thread, and only for so long: for some, of a few words, the library needs hours.

A Submit with a grammar waits here until that has been read, and so does every later command of its request; all others pass. A
fork waits for the request whose KV it shares, too. What cannot be read in time is refused as invalid. Readers are few: what none
of them has begun in time is refused as overload.

Must not know: what a grammar says, how it is read in time, roles.
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
BEGUN_WITHIN_S = 10.0
REMEMBERED_REFUSALS = 256
INVALID, OVERLOADED = "invalid_grammar", "overloaded"

log = get_logger()


@dataclass(slots=True, eq=False)
class _Waiting:
    grammar: str
    commands: list[Command]
    source: RequestKey | None
    """Which waits too, and is posted first: a fork that comes before it finds no KV to share."""
    limit: asyncio.TimerHandle
    is_read: bool = False


class GrammarReading:
    """On the asyncio thread. `read` is called on others and says whether that was possible, or raises where it could not be
    tried; `post` is called with commands that have waited, `refuse` with a reason."""

    def __init__(
        self,
        read: Callable[[str], bool],
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Command], None],
        refuse: Callable[[RequestKey, str], None],
        begun_within_s: float = BEGUN_WITHIN_S,
    ) -> None:
        self._read = read
        self._loop = loop
        self._post = post
        self._refuse = refuse
        self._begun_within_s = begun_within_s
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
            self._loop.call_soon(self._refuse, command.key, INVALID)
            return True
        self._waiting[command.key] = _Waiting(
            grammar,
            [command],
            command.fork_of if command.fork_of in self._waiting else None,
            self._loop.call_later(self._begun_within_s, self._refuse_waiting, command.key, OVERLOADED),
        )
        self._wanted.put((command.key, grammar))
        if self._readers < MOST_READERS:
            self._readers += 1
            threading.Thread(target=self._serve, name="grammar reader", daemon=True).start()
        return True

    def _serve(self) -> None:
        """A reader's thread, for the process's life."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            while True:
                key, grammar = self._wanted.get()
                if key in self._waiting:
                    self._loop.call_soon_threadsafe(self._begun, key)
                    self._loop.call_soon_threadsafe(self._done, key, self._why_refused(grammar))

    def _why_refused(self, grammar: str) -> str:
        """Empty where it is not."""
        try:
            return "" if self._read(grammar) else INVALID
        except Exception as error:  # whatever it is, the thread goes on to serve others
            log.error("grammar not read", because=str(error), exc_info=error)
            return OVERLOADED

    def _begun(self, key: RequestKey) -> None:
        if (waiting := self._waiting.get(key)) is not None:
            waiting.limit.cancel()

    def _done(self, key: RequestKey, reason: str) -> None:
        if reason:
            self._refuse_waiting(key, reason)
        elif (waiting := self._waiting.get(key)) is not None:
            waiting.is_read = True
            if waiting.source not in self._waiting:
                self._post_waiting(key)

    def _post_waiting(self, key: RequestKey) -> None:
        for command in self._waiting.pop(key).commands:
            self._post(command)
        self._post_forks(key)

    def _post_forks(self, source: RequestKey) -> None:
        for key in [key for key, waiting in self._waiting.items() if waiting.source == source and waiting.is_read]:
            self._post_waiting(key)

    def _refuse_waiting(self, key: RequestKey, reason: str) -> None:
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.limit.cancel()
            log.error("grammar not read", request=key, reason=reason)
            if reason == INVALID:
                self._refused.append(waiting.grammar)
            self._refuse(key, reason)
            self._post_forks(key)
