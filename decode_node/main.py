"""The decode node's process: an engine, the receiving half of the transfers, and the service that joins them.

Only a node's main knows both engine and transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decode_node.lane_rates import LaneRates
from decode_node.service import DecodeService
from foundation.ids import NodeId
from foundation.metrics import NodeMetrics
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import OTHER_DIRECTION, MeteredTransfers
from kv_transfer.transport.base import Transport
from node.detail import TransfersNow
from node.health import LaneHealth
from node.host import NodeParts, run_node
from node.options import DecodeOptions
from node.transfer_setup import (
    engine_progress,
    faults_wanted,
    node_identity,
    open_transport,
    transfer_limits,
    ucx_ports,
)


def run(options: DecodeOptions) -> int:
    """Serve until told to stop; the process's exit code. Raises StartError before it serves."""
    return run_node(options, lambda parts: DecodeRole(options, parts))


class _WatchedLanes(MeteredTransfers):
    """Passes on what pairing measured: to the lanes' health, and to what routers are told."""

    def __init__(self, metrics: NodeMetrics, health: LaneHealth, rates: LaneRates) -> None:
        super().__init__(metrics)
        self._health = health
        self._rates = rates

    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None:
        super().lane(peer, lane, gigabytes_per_second)
        if not lane.endswith(OTHER_DIRECTION):
            self._health.measured(peer, gigabytes_per_second * 1e9)
            self._rates.paired(peer, gigabytes_per_second * 1e9)


class DecodeRole:
    """Implements `node.host.Role`."""

    epoch = 0

    def __init__(self, options: DecodeOptions, parts: NodeParts) -> None:
        self._options = options
        self._parts = parts
        self.service = DecodeService(
            parts.engine.post,
            parts.ready.config,
            parts.ready.parts.fingerprint.vocabulary_size,
            parts.metrics,
            parts.tracer,
            1e9 * options.min_lane_gigabytes_per_second,
        )
        self._transport: Transport | None = None
        self._driver: DecodeDriver | None = None
        self._observer = _WatchedLanes(parts.metrics, self.service.lane_health, self.service.lane_rates)

    @property
    def lanes(self) -> Mapping[NodeId, float]:
        return self.service.lane_rates.current()

    @property
    def broken_lanes(self) -> Iterable[NodeId]:
        return self.service.lane_health.broken()

    def transfers_now(self) -> TransfersNow:
        if self._driver is None:
            return TransfersNow()
        observer = self._observer
        return TransfersNow(
            self._driver.progress(),
            observer.lanes,
            self.service.lane_health.broken(),
            observer.slot_states,
            observer.moved_bytes,
            self._driver.quarantined_arenas,
        )

    async def start(self) -> None:
        self._transport = open_transport(self._parts.ready.pool, data_ports=ucx_ports(self._options))
        self._driver = DecodeDriver(
            node_identity(self._parts),
            self._parts.ready.pool,
            transfer_limits(self._parts, self._options, self._options.quarantine_arenas),
            self._transport,
            self.service,
            lambda: engine_progress(self._parts.engine.status()),
            self._observer,
            faults_wanted(self._options),
            self._parts.plane,
        )
        self.service.use(self._driver)
        self._parts.health.add(self._quarantine_problem)
        self._parts.health.add(self.service.lane_health.check)

    def _quarantine_problem(self) -> str | None:
        """Peers lost in mid-transfer hold all the arenas that may wait for proof: no new peer can pair."""
        assert self._driver is not None
        waiting = self._driver.quarantined_arenas
        return "quarantine_full" if waiting >= self._options.quarantine_arenas else None

    async def stop(self) -> None:
        if self._driver is not None:
            await self._driver.close()
        if self._transport is not None:
            await self._transport.close()
