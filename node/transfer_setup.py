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
from kv_transfer.staging import AnyPool
from kv_transfer.transport.base import Transport, TransportError
from kv_transfer.transport.ucx_environment import DEFAULT_LANES, DEVICE_LANES, apply_ucx_environment, ucx_environment
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


def transfer_limits(parts: NodeParts, options: NodeOptions, quarantine_arenas: int) -> TransferLimits:
    staging = options.staging_on("cpu" if isinstance(parts.ready.pool, KvPool) else "cuda")
    return TransferLimits(
        staging_bytes=staging.staging_bytes,
        slot_bytes=staging.slot_bytes,
        silence_limit_s=options.silence_limit_s,
        heartbeat_s=options.heartbeat_s,
        lease_s=options.lease_s,
        lease_renewal_s=min(5.0, options.lease_s / 3),
        quarantine_arenas=quarantine_arenas,
    )


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


def open_transport(pool: AnyPool, data_ports: str | None = None) -> Transport:
    """The UCX data plane, for messages in the memory where the pool is. `data_ports`: `first-last`, where UCX's own TCP
    connections may arrive; None leaves it to UCX.

    Raises ConfigurationError when UCX cannot start with its environment, SetupError when what drives it cannot be compiled.
    """
    on_host = isinstance(pool, KvPool)
    lanes = os.environ.get("UCX_TLS", DEFAULT_LANES if on_host else DEVICE_LANES)
    applied = apply_ucx_environment(ucx_environment(lanes, tcp_ports=data_ports, device=not on_host))
    log.info("ucx environment", set_here=applied.set_here, kept=applied.kept)
    from kv_transfer.transport.ucx import UcxTransport

    try:
        return UcxTransport(None if isinstance(pool, KvPool) else pool.device)
    except TransportError as error:
        raise ConfigurationError("UCX_TLS", str(error)) from error


async def listen_for_data(transport: Transport, options: NodeOptions) -> str:
    """host:port under which others reach this node's data plane. Raises ConfigurationError naming the setting."""
    try:
        await transport.listen(options.host, options.data_port)
    except TransportError as error:
        raise ConfigurationError("--data-port", str(error)) from error
    return f"{options.advertise_address}:{options.data_port}"
