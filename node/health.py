"""What keeps a node from being ready, and since when. Liveness is only that this thread answers.

Each check is a function that names its problem or says None; it is asked whenever somebody wants to know.

Must not know: HTTP, gRPC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Check = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    since_s: float
    """Seconds since it was first seen."""


class Health:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._checks: list[Check] = []
        self._seen_at: dict[str, float] = {}

    def add(self, check: Check) -> None:
        self._checks.append(check)

    def problems(self) -> tuple[Problem, ...]:
        """Empty when the node is ready."""
        now = self._now()
        names = [name for check in self._checks if (name := check()) is not None]
        self._seen_at = {name: self._seen_at.get(name, now) for name in names}
        return tuple(Problem(name, now - since) for name, since in self._seen_at.items())


class EngineProgress:
    """Notices an engine that has work and makes no step. Being slow is no problem; making no progress is."""

    def __init__(self, now: Callable[[], float], limit_s: float) -> None:
        self._now = now
        self._limit_s = limit_s
        self._steps = -1
        self._advanced_at = now()

    def observe(self, steps: int, has_work: bool) -> str | None:
        if steps != self._steps or not has_work:
            self._steps = steps
            self._advanced_at = self._now()
        return "engine_stalled" if self._now() - self._advanced_at > self._limit_s else None
