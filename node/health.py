"""What can be wrong with a node that only a node has: an engine that stands still, and lanes over which no KV comes.

Must not know: HTTP, gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foundation.health import Now, Problem
from foundation.ids import NodeId

DATA_PLANE = "data_plane"
"""The one problem with which a decode node can still serve: it computes prompts itself."""

LANE_FAILURES_BEFORE_BROKEN = 2
FIRST_REST_S = 2.0
LONGEST_REST_S = 30.0
LANE_REMEMBERED_S = 300.0
"""Longer than any lane rests. Peers come and go under new names, and one that has gone is no lane that works."""


def serves_alone(problems: Iterable[Problem]) -> bool:
    """Whether nothing is wrong but that no KV comes in: then a decode node is not ready, but better than none."""
    names = {problem.name for problem in problems}
    return names == {DATA_PLANE}


class EngineProgress:
    """Notices an engine that has work and makes no step. Being slow is no problem; making no progress is."""

    def __init__(self, now: Now, limit_s: float) -> None:
        self._now = now
        self._limit_s = limit_s
        self._steps = -1
        self._advanced_at = now()

    def observe(self, steps: int, has_work: bool) -> Problem | None:
        now = self._now()
        if steps != self._steps or not has_work:
            self._steps = steps
            self._advanced_at = now
        still_s = now - self._advanced_at
        return Problem("engine_stalled", still_s, f"no step after step {steps}") if still_s > self._limit_s else None


@dataclass(slots=True)
class _Lane:
    """How the lane from one prefill node has behaved of late. `rests_until`: nobody should use it before."""

    told_at: float
    failures: int = 0
    failed_at: float = 0.0
    reason: str = ""
    since: float = 0.0
    rests_until: float = 0.0
    worked: bool = False


class LaneHealth:
    """Which prefill nodes no KV comes from, told by how transfers ended: a circuit breaker for each lane.

    A lane that failed twice in a row rests, for longer each time; afterwards one more failure breaks it again, one success
    mends it. A lane that was measured slower than `floor_bytes_per_second` (0: no floor) rests for `slow_rest_s`, by when its
    idle session is over and the next one measures anew.
    """

    FAILURES = frozenset(
        {
            *("transfer_stalled", "dial_timeout", "unreachable", "not_expected", "ucx_unavailable"),
            *("lane_cannot_fence", "self_test_failed", "self_test_timeout"),
        }
    )
    """Reasons of a transfer's end that the data plane is to blame for, not the peer."""

    def __init__(self, now: Now, floor_bytes_per_second: float = 0.0, slow_rest_s: float = 90.0) -> None:
        self._now = now
        self._floor = floor_bytes_per_second
        self._slow_rest_s = slow_rest_s
        self._lanes: dict[NodeId, _Lane] = {}

    def measured(self, peer: NodeId, bytes_per_second: float) -> None:
        if bytes_per_second < self._floor:
            reason = f"{bytes_per_second / 1e9:.3g} GB/s, less than {self._floor / 1e9:.3g}"
            self._break(peer, f"lane_too_slow: {reason}", self._slow_rest_s)

    def committed(self, peer: NodeId) -> None:
        if not self._lane(peer).reason.startswith("lane_too_slow"):
            self._lanes[peer] = _Lane(self._now(), worked=True)

    def ended(self, peer: NodeId, reason: str, seconds: float) -> None:
        """A transfer ended without its KV, for this reason, after so long. Those that were under way together fail once."""
        if reason not in self.FAILURES:
            return
        now, lane = self._now(), self._lane(peer)
        if lane.failures and now - seconds < lane.failed_at:
            return
        lane.failures += 1
        lane.failed_at = now
        lane.worked = False
        if lane.failures >= LANE_FAILURES_BEFORE_BROKEN:
            doublings = lane.failures - LANE_FAILURES_BEFORE_BROKEN
            self._break(peer, reason, min(FIRST_REST_S * 2 ** min(doublings, 8), LONGEST_REST_S))

    def broken(self) -> dict[NodeId, str]:
        """Prefill nodes that should not be asked for KV now, each with the reason."""
        now = self._now()
        return {peer: lane.reason for peer, lane in self._lanes.items() if lane.rests_until > now}

    def check(self) -> Problem | None:
        """A problem of this node only when no lane works: others are a matter between two nodes."""
        now, broken = self._now(), self.broken()
        works = (lane.worked and now - lane.told_at < LANE_REMEMBERED_S for lane in self._lanes.values())
        if not broken or any(works):
            return None
        since_s = now - min(self._lanes[peer].since for peer in broken)
        return Problem(DATA_PLANE, since_s, ", ".join(f"{peer}: {reason}" for peer, reason in sorted(broken.items())))

    def _lane(self, peer: NodeId) -> _Lane:
        now = self._now()
        self._lanes = {known: lane for known, lane in self._lanes.items() if now - lane.told_at < LANE_REMEMBERED_S}
        lane = self._lanes.setdefault(peer, _Lane(now))
        lane.told_at = now
        return lane

    def _break(self, peer: NodeId, reason: str, rest_s: float) -> None:
        now, lane = self._now(), self._lane(peer)
        if not lane.reason:
            lane.since = now
        lane.reason, lane.worked, lane.rests_until = reason, False, now + rest_s
