"""Whether a node may be given work, judged from what its stream says and since when. Pure; time is an argument.

    CONNECTING --hello--> READY --silent for half the limit--> SUSPECT --silent for the limit--> LOST
         ^                  ^-------------anything heard----------+                                |
         +--------------------------------------- dial again -------------------------------------+

Slow is not dead: a node that speaks but whose engine has work and takes no step for longer than its own step limit is *stalled*,
which is as good as lost for its requests. A heartbeat alone proves nothing.

Must not know: sockets, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from foundation.ids import NodeId


class LinkState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Status:
    """A node's own account of itself (decant.v1.NodeStatus)."""

    ready: bool = False
    not_ready_reasons: tuple[str, ...] = ()
    draining: bool = False
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    engine_steps: int = 0
    has_work: bool = False
    blocks_total: int = 0
    blocks_free: int = 0
    epoch: int = 0
    tokens_per_second: float = 0.0
    lanes: Mapping[NodeId, float] = field(default_factory=dict)
    serves_alone: bool = False
    """Not ready, but only because no KV comes to it: it can still compute prompts itself."""
    broken_lanes: frozenset[NodeId] = frozenset()


@dataclass(slots=True)
class NodeHealth:
    silence_limit_s: float
    step_limit_s: float = 0.0
    """How long one step of the node's engine may take, as it says in its hello."""
    state: LinkState = LinkState.CONNECTING
    status: Status | None = None
    heard_s: float = 0.0
    progress_s: float = 0.0
    """When the engine was last seen to take a step, or to have no work."""
    refused_as: str | None = "node_connecting"
    refused_since_s: float = 0.0

    def connected(self, now_s: float, step_limit_s: float) -> None:
        self.state = LinkState.READY
        self.step_limit_s = step_limit_s
        self.status = None
        self.heard_s = self.progress_s = now_s

    def heard(self, now_s: float) -> None:
        self.heard_s = now_s
        if self.state is LinkState.SUSPECT:
            self.state = LinkState.READY

    def reported(self, status: Status, now_s: float) -> None:
        self.heard(now_s)
        before = self.status
        if before is None or not status.has_work or not before.has_work or status.engine_steps != before.engine_steps:
            self.progress_s = now_s
        self.status = status

    def not_watched(self, stopped_s: float, spare_s: float, now_s: float) -> None:
        """This process did not run for so long. That time does not count, what was counted before does; and `spare_s` is left at
        least, for what the node said meanwhile to be read."""
        self.heard_s = min(now_s, max(self.heard_s + stopped_s, now_s - self.silence_limit_s + spare_s))
        self.progress_s = min(now_s, max(self.progress_s + stopped_s, now_s - self._progress_limit_s + spare_s))

    def tick(self, now_s: float) -> None:
        """Call at least every quarter of the silence limit."""
        silent_s = now_s - self.heard_s
        if self.state in (LinkState.READY, LinkState.SUSPECT):
            if silent_s >= self.silence_limit_s:
                self.state = LinkState.LOST
            elif silent_s >= self.silence_limit_s / 2:
                self.state = LinkState.SUSPECT

    def broken(self) -> None:
        """The stream has ended."""
        self.state = LinkState.LOST

    def dialling(self) -> None:
        self.state = LinkState.CONNECTING

    def stalled(self, now_s: float) -> bool:
        """Its engine has work and has taken no step for longer than one step and a silence may last."""
        working = self.status is not None and self.status.has_work
        return working and now_s - self.progress_s >= self._progress_limit_s

    @property
    def _progress_limit_s(self) -> float:
        return self.silence_limit_s + self.step_limit_s

    def refused_for_s(self, now_s: float, refusal: str | None) -> float:
        """How long it has been refused for this reason, as far as anybody looked; `refusal` is what it is now."""
        if refusal != self.refused_as:
            self.refused_as, self.refused_since_s = refusal, now_s
        return now_s - self.refused_since_s

    def refusal(self, now_s: float) -> str | None:
        """Why no new work goes there now, by name; None when it may."""
        if self.state is not LinkState.READY:
            return f"node_{self.state.value}"
        if self.status is None:
            return "node_silent"
        if self.status.draining:
            return "node_draining"
        if not self.status.ready and not self.status.serves_alone:
            return "node_not_ready"
        if self.stalled(now_s):
            return "node_stalled"
        return None
