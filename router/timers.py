"""What a request in flight waits for by the clock: its deadline, its patience while no node has room, its next look for one.

A timer that was stopped never acts, and `stop` ends all of them. One that fails ends its own request, loudly, and no other.

Must not know: journeys, nodes, what a timer's end means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from foundation.log import get_logger

log = get_logger()

PATIENCE_S = 5.0
"""A request that has shown nothing yet waits so long for a decode node."""
FAILOVER_PATIENCE_S = 30.0
"""A stream that has begun waits so long for another one."""


@dataclass(frozen=True, slots=True)
class TimerEnds:
    """What each timer does at its end, and what is done where that fails."""

    deadline_passed: Callable[[], None]
    patience_over: Callable[[], None]
    look_again: Callable[[], None]
    failed: Callable[[], None]


class RequestTimers:
    """On the running loop. The deadline is `deadline_s` from now."""

    def __init__(self, request_id: str, deadline_s: float, now: Callable[[], float], ends: TimerEnds) -> None:
        self._request_id = request_id
        self._now, self._ends = now, ends
        self._deadline_at_s = now() + deadline_s
        self._loop = asyncio.get_running_loop()
        self._deadline = self._later(deadline_s, ends.deadline_passed)
        self._patience: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def stopped(self) -> bool:
        return self._deadline.cancelled()

    @property
    def remaining_s(self) -> float:
        """Until the deadline; negative once it has passed."""
        return self._deadline_at_s - self._now()

    def wait_at_most(self, patience_s: float) -> None:
        """Patience is counted from the first of several calls."""
        if self._patience is None:
            self._patience = self._later(patience_s, self._ends.patience_over)

    def wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def look_again(self, after_s: float) -> None:
        """In place of the look that was set before."""
        self.look_no_more()
        self._next_look = self._later(after_s, self._ends.look_again)

    def look_no_more(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def soon(self, act: Callable[[], None]) -> None:
        """Behind what is being done now. `stop` does not take it back."""
        self._later(0, act)

    def stop(self) -> None:
        self._deadline.cancel()
        self.wait_no_more()
        self.look_no_more()

    def _later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, self._by_itself, act)

    def _by_itself(self, act: Callable[[], None]) -> None:
        """The root of what no node and no client asks for."""
        try:
            act()
        except Exception:
            log.exception("request failed inside the router", request=self._request_id)
            self._ends.failed()
