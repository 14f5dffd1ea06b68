"""From a node's options and its engine to what its transfers are built from; the same on both roles.

Importing UCX loads its library, which reads the environment once: so it happens here, after the environment has been set.

Must not know: roles.
"""

from __future__ import annotations

import os

from engine.port import EngineStatus
from foundation.errors import ConfigurationError
from foundation.log import get_logger
from foundation.ports import lingers
from kv_transfer.driver import EngineProgress, NodeIdentity, TransferLimits
from kv_transfer.faults import Faults, faults_of_process
from kv_transfer.pool_copy import KvPool
from kv_transfer.transport.base import Transport, TransportError
from kv_transfer.transport.ucx_environment import DEFAULT_LANES, apply_ucx_environment, ucx_environment
from node.host import NodeParts
from node.options import NodeOptions

log = get_logger()


def node_identity(parts: NodeParts) -> NodeIdentity:
    return NodeIdentity(
        node_id=parts.entry.node_id,
        incarnation=parts.entry.incarnation,
        fingerprint=parts.ready.parts.fingerprint,
        step_limit_s=parts.ready.step_limit_s,
    )


def transfer_limits(options: NodeOptions, quarantine_arenas: int) -> TransferLimits:
    return TransferLimits(
        staging_bytes=options.staging_bytes,
        slot_bytes=options.slot_bytes,
        silence_limit_s=options.silence_limit_s,
        heartbeat_s=options.heartbeat_s,
        lease_s=options.lease_s,
        lease_renewal_s=min(5.0, options.lease_s / 3),
        quarantine_arenas=quarantine_arenas,
    )


def kv_pool(parts: NodeParts) -> KvPool:
    storage = parts.ready.parts.storage
    return KvPool(storage.layout, storage.pool_views(), storage.owner_words)


def engine_progress(status: EngineStatus) -> EngineProgress:
    return EngineProgress(status.steps, status.has_work)


def faults_wanted(options: NodeOptions) -> Faults:
    """None, unless this is a test that says so twice."""
    return faults_of_process(options.enable_test_faults)


def ucx_ports(options: NodeOptions) -> str | None:
    """The one port on which UCX's own connections arrive at a decode node; None, any, while that port cannot be had.

    UCX listens without SO_REUSEADDR, so that for up to a minute after a kill it could not listen where its former life did.
    """
    if lingers(options.data_port):
        log.warning("data port lingers", data_port=options.data_port, instead="UCX listens on a port of its own choice")
        return None
    return f"{options.data_port}-{options.data_port}"


def open_transport(data_ports: str | None = None) -> Transport:
    """The UCX data plane. `data_ports`: `first-last`, where UCX's own TCP connections may arrive; None leaves it to UCX.

    Raises ConfigurationError when UCX cannot start with its environment.
    """
    applied = apply_ucx_environment(ucx_environment(os.environ.get("UCX_TLS", DEFAULT_LANES), tcp_ports=data_ports))
    log.info("ucx environment", set_here=applied.set_here, kept=applied.kept)
    from kv_transfer.transport.ucx import UcxTransport

    try:
        return UcxTransport()
    except TransportError as error:
        raise ConfigurationError("UCX_TLS", str(error)) from error


async def listen_for_data(transport: Transport, options: NodeOptions) -> str:
    """host:port under which others reach this node's data plane. Raises ConfigurationError naming the setting."""
    try:
        await transport.listen(options.host, options.data_port)
    except TransportError as error:
        raise ConfigurationError("--data-port", str(error)) from error
    return f"{options.advertise_address}:{options.data_port}"
