"""The prefill node's process: an engine, the sending half of the transfers, and the service that joins them.

Only a node's main knows both engine and transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from foundation.ids import NodeId
from foundation.keys import MasterKeys, NodeKeys, read_key_file
from kv_transfer.driver import MeteredTransfers
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.transport.base import Transport
from node.detail import TransfersNow
from node.host import NodeParts, run_node
from node.options import PrefillOptions
from node.transfer_setup import (
    engine_progress,
    faults_wanted,
    listen_for_data,
    node_identity,
    open_transport,
    transfer_limits,
)
from prefill_node.service import PrefillService

KV_TRANSFER = "decant.v1.KvTransfer"


def run(options: PrefillOptions) -> int:
    """Serve until told to stop; the process's exit code. Raises StartError before it serves."""
    keys = read_key_file(Path(options.key_file))
    return run_node(options, lambda parts: PrefillRole(options, keys, parts))


class PrefillRole:
    """Implements `node.host.Role`."""

    def __init__(self, options: PrefillOptions, keys: MasterKeys | NodeKeys, parts: NodeParts) -> None:
        self._options = options
        self._parts = parts
        self._keys = keys.for_node(parts.entry.node_id) if isinstance(keys, MasterKeys) else keys
        self.service = PrefillService(
            parts.engine.post,
            parts.ready.config,
            parts.ready.parts.fingerprint.vocabulary_size,
            parts.metrics,
            parts.tracer,
        )
        self._observer = MeteredTransfers(parts.metrics)
        self._transport: Transport | None = None
        self._driver: PrefillDriver | None = None

    @property
    def epoch(self) -> int:
        return 0 if self._driver is None else self._driver.epoch

    @property
    def lanes(self) -> Mapping[NodeId, float]:
        return {}

    @property
    def broken_lanes(self) -> Iterable[NodeId]:
        return ()

    def transfers_now(self) -> TransfersNow:
        if self._driver is None:
            return TransfersNow()
        observer = self._observer
        return TransfersNow(
            self._driver.progress(), observer.lanes, slots=observer.slot_states, moved_bytes=observer.moved_bytes
        )

    async def start(self) -> None:
        self._transport = open_transport(self._parts.ready.pool)
        transport = self._transport
        self._parts.metrics.data_port_refusals.set_function(lambda: transport.strangers_refused)
        data_address = await listen_for_data(self._transport, self._options)
        self._driver = PrefillDriver(
            node_identity(self._parts),
            self._parts.ready.pool,
            transfer_limits(self._parts, self._options, quarantine_arenas=1),
            self._transport,
            data_address,
            self._keys,
            self.service,
            lambda: engine_progress(self._parts.engine.status()),
            self._observer,
            faults_wanted(self._options),
        )
        self.service.use(self._driver)
        self._parts.endpoint.add(lambda driver, server: driver.register(server), self._driver, [KV_TRANSFER])

    async def stop(self) -> None:
        if self._driver is not None:
            await self._driver.close()
        if self._transport is not None:
            await self._transport.close()
