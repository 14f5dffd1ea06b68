"""What keeps a process from being ready, and since when; the same on routers and nodes.

Each check is a function that names its problem or says None; it is asked whenever somebody wants to know. A part that knows
since when it has been stuck says so itself; for the others the time counts from when the problem was first seen. Liveness is
no matter of checks: it is only that the process answers.

Must not know: HTTP, gRPC, what the parts are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Now = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    since_s: float
    """Seconds since it began, or since it was first seen."""
    detail: str = ""

    def for_people(self) -> dict[str, str | float]:
        """As /health shows it."""
        shown: dict[str, str | float] = {"reason": self.name, "since_s": round(self.since_s, 3)}
        return shown | {"detail": self.detail} if self.detail else shown


@dataclass(frozen=True, slots=True)
class Wrong:
    """What a check found that does not know since when; `detail` may change without a new beginning."""

    name: str
    detail: str = ""


Check = Callable[[], str | Wrong | Problem | None]


class Health:
    def __init__(self, now: Now) -> None:
        self._now = now
        self._checks: list[Check] = []
        self._seen_at: dict[str, float] = {}

    def add(self, check: Check) -> None:
        self._checks.append(check)

    def problems(self) -> tuple[Problem, ...]:
        """Empty when the process is ready."""
        now, found, seen_at = self._now(), [], {}
        for check in self._checks:
            finding = check()
            if isinstance(finding, str):
                finding = Wrong(finding)
            if isinstance(finding, Wrong):
                since = seen_at[finding.name] = self._seen_at.get(finding.name, now)
                finding = Problem(finding.name, now - since, finding.detail)
            if finding is not None:
                found.append(finding)
        self._seen_at = seen_at
        return tuple(found)
