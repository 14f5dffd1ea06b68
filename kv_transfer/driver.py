"""What both drivers are built from: who this node is, its limits, its engine's progress, and who watches.

`decode_driver` and `prefill_driver` run the pure protocol on the node's asyncio thread: events in, effects out, one at a
time and in order. They decide nothing themselves.

Read in this order: this file, `pump`, `control_stream`, `data_sessions`, `landings`, `decode_driver`, `prefill_driver`.

Must not know: models, engines beyond their progress, routers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from foundation.fingerprint import Fingerprint
from foundation.ids import Incarnation, NodeId, TransferId
from foundation.kv_layout import KvLayout
from foundation.log import get_logger
from foundation.metrics import LANES_SHOWN, NodeMetrics
from kv_transfer.digest import KIND as HOST_DIGEST
from kv_transfer.digest import TRAILER_BYTES, manifest_digest
from kv_transfer.protocol.deadlines import DeadlineEvent, Limits, Wait, Watch
from kv_transfer.protocol.events import Beat
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Hello

log = get_logger()

Side = TypeVar("Side")

PROTOCOL_MINOR = 0
DIAL_LIMIT_S = 5.0
"""How long D tries to open one session's endpoint."""
SELF_TEST_LIMIT_S = 10.0
"""A lane that cannot move the self-test's few slots in this time is of no use."""


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


def local_node(
    identity: NodeIdentity, layout: KvLayout, limits: TransferLimits, data_address: str, digest: str = HOST_DIGEST
) -> LocalNode:
    """This node as the protocol knows it. `data_address` is where others reach P's data plane; D has none."""
    hello = Hello(
        node_id=identity.node_id,
        protocol_major=identity.fingerprint.protocol_major,
        protocol_minor=PROTOCOL_MINOR,
        fingerprint=identity.fingerprint,
        layout=layout,
        slot_bytes=limits.slot_bytes,
        step_limit_s=identity.step_limit_s,
        data_address=data_address,
        session=0,
        digest=digest,
    )
    return LocalNode(
        incarnation=identity.incarnation,
        hello=hello,
        trailer_bytes=TRAILER_BYTES,
        digest_of_all=manifest_digest,
        silence_limit_s=limits.silence_limit_s,
        quarantine_arenas=limits.quarantine_arenas,
    )


class EngineProgress(NamedTuple):
    """`steps` only grows; a peer that sees it stand still while there is work knows that the engine is stuck."""

    steps: int
    has_work: bool


ReadProgress = Callable[[], EngineProgress]
"""Called on the asyncio thread; must not wait for the engine."""


class Clockwork(Generic[Side]):
    """What time brings about: heartbeats, lease renewals, and deadlines that have passed without progress.

    `waits` lists what a side's state waits for. A node that was itself stopped for a while cannot judge who was silent
    meanwhile: that time does not count. What it counted before does, so that every wait ends on a machine that stops it again and
    again.
    """

    def __init__(
        self, limits: TransferLimits, progress: ReadProgress, waits: Callable[[Side, Limits], Iterable[Wait]]
    ) -> None:
        self.tick_s = limits.heartbeat_s / 2
        self._limits = limits
        self._progress = progress
        self._waits = waits
        self._protocol_limits = Limits(
            silence_s=limits.silence_limit_s,
            connect_s=max(DIAL_LIMIT_S, limits.silence_limit_s),
            reservation_s=limits.reservation_limit_s,
            lease_s=limits.lease_s,
            idle_s=limits.idle_limit_s,
        )
        self._watch = Watch()
        self._last_look_s = 0.0
        self._last_beat_s = 0.0
        self._last_renewal_s = 0.0

    def tick(self, side: Side, now_s: float) -> tuple[Beat | DeadlineEvent, ...]:
        since_look_s, self._last_look_s = now_s - self._last_look_s, now_s
        stopped_s = since_look_s if since_look_s > self._limits.silence_limit_s / 2 else 0.0
        waits = self._waits(side, self._protocol_limits)
        self._watch, passed = self._watch.look(waits, now_s, stopped_s, spare_s=self._limits.heartbeat_s)
        return (*self._beats(now_s), *passed)

    def _beats(self, now_s: float) -> tuple[Beat, ...]:
        if now_s - self._last_beat_s < self._limits.heartbeat_s * 0.9:
            return ()
        self._last_beat_s = now_s
        renew = now_s - self._last_renewal_s >= self._limits.lease_renewal_s
        if renew:
            self._last_renewal_s = now_s
        steps, has_work = self._progress()
        return (Beat(steps, has_work, renew),)


ParcelStage = Literal["gathered", "sent", "landed", "scattered"]


class TransferObserver(Protocol):
    """Watches a driver. Called on the asyncio thread; must not wait."""

    def computed(self, transfer: TransferId, positions: int) -> None:
        """KV of positions [0, positions) stands on a prefill node. With `parcel` it makes a transfer's timeline."""

    def parcel(self, stage: ParcelStage, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None: ...

    def early(self, transfer: TransferId, parcel_index: int) -> None:
        """P gathers layers of a step that still computes later ones."""

    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None:
        """Measured at pairing; a lane named `.../to_peer` is the other direction, as the peer reports it."""

    def dropped(self, peer: NodeId, reason: str) -> None:
        """Something late, repeated or foreign changed nothing."""

    def slots(self, **states: int) -> None:
        """How many staging slots are in each state of `foundation.metrics.STAGING_SLOT_STATES`."""


OTHER_DIRECTION = "/to_peer"


class MeasuredLane(NamedTuple):
    name: str
    bytes_per_second: float


class MeteredTransfers:
    """The observer of a real node: metrics and logs."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics
        self._tells_parcels = log.is_enabled_for(logging.DEBUG)
        self.lanes: OrderedDict[NodeId, MeasuredLane] = OrderedDict()
        """The lane from each peer, as last measured here; the oldest measures of more than LANES_SHOWN are forgotten."""
        self.moved_bytes = 0
        self.slot_states: dict[str, int] = {}

    @property
    def bytes_per_second(self) -> dict[NodeId, float]:
        return {peer: lane.bytes_per_second for peer, lane in self.lanes.items()}

    def computed(self, transfer: TransferId, positions: int) -> None:
        log.debug("computed", transfer=str(transfer), positions=positions)

    def parcel(self, stage: ParcelStage, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None:
        """Bytes are counted as they leave a prefill node and as they land on a decode node."""
        if self._tells_parcels:
            log.debug("parcel", stage=stage, transfer=str(transfer), parcel=parcel_index, payload_bytes=payload_bytes)
        if stage in ("sent", "landed"):
            self._metrics.kv_transfer_bytes_total.inc(payload_bytes)
            self.moved_bytes += payload_bytes

    def early(self, transfer: TransferId, parcel_index: int) -> None:
        self._metrics.kv_early_parcels_total.inc()

    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None:
        log.info("lane measured", peer=peer, lane=lane, gigabytes_per_second=round(gigabytes_per_second, 3))
        self._metrics.kv_lane_gigabytes_per_second.set(peer, lane, gigabytes_per_second)
        if not lane.endswith(OTHER_DIRECTION):
            self.lanes[peer] = MeasuredLane(lane, gigabytes_per_second * 1e9)
            self.lanes.move_to_end(peer)
            if len(self.lanes) > LANES_SHOWN:
                self.lanes.popitem(last=False)

    def dropped(self, peer: NodeId, reason: str) -> None:
        log.info("dropped", peer=peer, reason=reason)
        self._metrics.dropped_total.count(reason)

    def slots(self, **states: int) -> None:
        self._metrics.staging_slots.set(**states)
        self.slot_states = states
