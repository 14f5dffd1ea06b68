"""The decode node's process: an engine, the receiving half of the transfers, and the service that joins them.

Only a node's main knows both engine and transfers.
"""

from __future__ import annotations

from collections.abc import Mapping

from decode_node.service import DecodeService
from foundation.ids import NodeId
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import MeteredTransfers
from kv_transfer.transport.base import Transport
from node.host import NodeParts, run_node
from node.options import DecodeOptions
from node.transfer_setup import (
    engine_progress,
    faults_wanted,
    kv_pool,
    node_identity,
    open_transport,
    transfer_limits,
    ucx_ports,
)


def run(options: DecodeOptions) -> int:
    """Serve until told to stop; the process's exit code. Raises StartError before it serves."""
    return run_node(options, lambda parts: DecodeRole(options, parts))


class DecodeRole:
    """Implements `node.host.Role`."""

    epoch = 0

    def __init__(self, options: DecodeOptions, parts: NodeParts) -> None:
        self._options = options
        self._parts = parts
        self.service = DecodeService(
            parts.engine.post, parts.ready.config, parts.ready.parts.fingerprint.vocabulary_size, parts.metrics
        )
        self._transport: Transport | None = None
        self._driver: DecodeDriver | None = None
        self._observer = MeteredTransfers(parts.metrics)

    @property
    def lanes(self) -> Mapping[NodeId, float]:
        return self._observer.bytes_per_second

    async def start(self) -> None:
        self._transport = open_transport(data_ports=ucx_ports(self._options))
        self._driver = DecodeDriver(
            node_identity(self._parts),
            kv_pool(self._parts),
            transfer_limits(self._options, self._options.quarantine_arenas),
            self._transport,
            self.service,
            lambda: engine_progress(self._parts.engine.status()),
            self._observer,
            faults_wanted(self._options),
        )
        self.service.use(self._driver)
        self._parts.health.add(self._quarantine_problem)

    def _quarantine_problem(self) -> str | None:
        """Peers lost in mid-transfer hold all the arenas that may wait for proof: no new peer can pair."""
        assert self._driver is not None
        waiting = sum(arena.quarantined for arena in self._driver.side.arenas.values())
        return "quarantine_full" if waiting >= self._options.quarantine_arenas else None

    async def stop(self) -> None:
        if self._driver is not None:
            await self._driver.close()
        if self._transport is not None:
            await self._transport.close()
