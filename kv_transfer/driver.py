"""What both drivers are built from: who this node is, its limits, its engine's progress, and who watches.

`decode_driver` and `prefill_driver` run the pure protocol on the node's asyncio thread: events in, effects out, one at a
time and in order. They decide nothing themselves.

Read in this order: this file, `control_stream`, `data_sessions`, `decode_driver`, `prefill_driver`.

Must not know: models, engines beyond their progress, routers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from foundation.fingerprint import Fingerprint
from foundation.ids import Incarnation, NodeId, TransferId
from foundation.log import get_logger
from foundation.metrics import NodeMetrics

log = get_logger()


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """`step_limit_s`: how long one engine step may last, as set at warm-up."""

    node_id: NodeId
    incarnation: Incarnation
    fingerprint: Fingerprint
    step_limit_s: float


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """A node's settings for its transfers. `staging_bytes` and `slot_bytes` count payload."""

    staging_bytes: int
    slot_bytes: int
    silence_limit_s: float = 2.0
    heartbeat_s: float = 0.5
    lease_s: float = 30.0
    lease_renewal_s: float = 5.0
    reservation_limit_s: float = 10.0
    idle_limit_s: float = 60.0
    quarantine_arenas: int = 2


class EngineProgress(NamedTuple):
    """`steps` only grows; a peer that sees it stand still while there is work knows that the engine is stuck."""

    steps: int
    has_work: bool


ReadProgress = Callable[[], EngineProgress]
"""Called on the asyncio thread; must not wait for the engine."""

ParcelStage = Literal["gathered", "sent", "landed", "scattered"]


class TransferObserver(Protocol):
    """Watches a driver. Called on the asyncio thread; must not wait."""

    def parcel(self, stage: ParcelStage, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None: ...

    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None:
        """Measured at pairing; `peer` reports the other direction."""

    def dropped(self, peer: NodeId, reason: str) -> None:
        """Something late, repeated or foreign changed nothing."""

    def slots(self, **states: int) -> None:
        """How many staging slots are in each state of `foundation.metrics.STAGING_SLOT_STATES`."""


class MeteredTransfers:
    """The observer of a real node: metrics and logs."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics

    def parcel(self, stage: ParcelStage, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None:
        """A decode node counts bytes by transfer, with its account; a prefill node as they leave."""
        if stage == "sent":
            self._metrics.kv_transfer_bytes_total.inc(payload_bytes)

    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None:
        log.info("lane measured", peer=peer, lane=lane, gigabytes_per_second=round(gigabytes_per_second, 3))
        self._metrics.kv_lane_gigabytes_per_second.labels(peer, lane).set(gigabytes_per_second)

    def dropped(self, peer: NodeId, reason: str) -> None:
        log.info("dropped", peer=peer, reason=reason)
        self._metrics.dropped_total.count(reason)

    def slots(self, **states: int) -> None:
        self._metrics.staging_slots.set(**states)
