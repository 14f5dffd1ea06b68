"""The engine's state as others want it: metrics for Prometheus, status for routers, progress for health.

`EngineStatus` is a snapshot with running totals; what is counted here is what was added since the last look.

Must not know: roles, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from decant_proto.v1 import node_pb2

from engine.graphs.select import GraphStatistics
from engine.port import EngineStatus
from foundation.health import Problem
from foundation.ids import NodeId
from foundation.metrics import NodeMetrics
from node.health import serves_alone

NO_LANES: Mapping[NodeId, float] = MappingProxyType({})


class EngineFeed:
    def __init__(
        self,
        status: Callable[[], EngineStatus],
        metrics: NodeMetrics,
        graphs: Callable[[], GraphStatistics] = GraphStatistics,
    ) -> None:
        """`graphs`: what has run on a GPU so far; never anything on a CPU."""
        self._status = status
        self._graphs = graphs
        self._graphs_seen = GraphStatistics()
        self._metrics = metrics
        self._steps = 0
        self._step_tokens = 0
        self._skips: dict[str, int] = {}
        self._preemptions = 0
        self._load = (0, 0)

    def load_changed(self) -> bool:
        """Whether running or waiting differ from the last time this was asked."""
        status = self._status()
        before, self._load = self._load, (status.running, status.waiting)
        return before != self._load

    def after_step(self) -> None:
        status = self._status()
        steps, self._steps = status.steps - self._steps, status.steps
        tokens, self._step_tokens = status.step_tokens - self._step_tokens, status.step_tokens
        for _ in range(steps):  # more than one when a step had nothing to report, or this thread was late
            self._metrics.step_tokens.observe(tokens / steps)
        self._metrics.preemptions_total.inc(status.preemptions - self._preemptions)
        self._preemptions = status.preemptions
        for reason, total in status.skips.items():
            self._metrics.scheduler_skips_total.count(reason, total - self._skips.get(reason, 0))
            self._skips[reason] = total

    def before_exposition(self) -> None:
        self._count_graphs()
        status = self._status()
        self._metrics.requests_running.set(status.running)
        self._metrics.requests_waiting.set(status.waiting)
        self._metrics.kv_blocks.set(free=status.blocks_free, cached=status.blocks_cached, in_use=status.blocks_in_use)

    def _count_graphs(self) -> None:
        now, seen, metrics = self._graphs().copy(), self._graphs_seen, self._metrics
        for (mode, _), steps in (now.steps - seen.steps).items():
            metrics.graph_steps_total.count(mode.value, steps)
        for reason, steps in (now.fallbacks - seen.fallbacks).items():
            metrics.graph_fallbacks_total.count(reason.value, steps)
        metrics.graph_padding_tokens_total.inc(now.padded_tokens - seen.padded_tokens)
        self._graphs_seen = now

    def node_status(
        self,
        problems: Sequence[Problem],
        draining: bool,
        epoch: int,
        lanes: Mapping[NodeId, float] = NO_LANES,
        broken_lanes: Iterable[NodeId] = (),
    ) -> node_pb2.NodeStatus:
        """`lanes`: bytes a second from each peer."""
        status = self._status()
        return node_pb2.NodeStatus(
            ready=not problems,
            not_ready_reasons=[problem.name for problem in problems],
            serves_alone=serves_alone(problems),
            broken_lanes=broken_lanes,
            draining=draining,
            running=status.running,
            waiting=status.waiting,
            queued_tokens=status.queued_tokens,
            engine_steps=status.steps,
            blocks_total=status.blocks_total,
            blocks_free=status.blocks_free + status.blocks_cached,
            epoch=epoch,
            has_work=status.has_work,
            prompt_tokens_per_second=status.tokens_per_second,
            lanes=[node_pb2.LaneSpeed(node_id=node, bytes_per_second=speed) for node, speed in lanes.items()],
        )
