"""What a node's transfers are doing, for people: read by /metrics and /health, and sent to routers whose live page is open.

Built when somebody looks, never on the way of a request.

Must not know: roles, the protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from decant_proto.v1 import node_pb2

from engine.port import EngineStatus
from foundation.ids import NodeId, RequestId
from foundation.metrics import KV_TRANSFER_STATES, NodeMetrics
from kv_transfer.driver import MeasuredLane
from kv_transfer.port import TransferProgress

TRANSFERS_SHOWN = 64
FAILURES_KEPT = 32


class RecentFailures:
    """The latest things that went wrong here, each with its reason; older ones are forgotten."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failures: deque[tuple[float, str, str, RequestId, str]] = deque(maxlen=FAILURES_KEPT)

    def note(self, what: str, reason: str, request: RequestId, peer: str) -> None:
        self._failures.append((self._now(), what, reason, request, peer))

    def views(self) -> list[node_pb2.FailureView]:
        now = self._now()
        return [
            node_pb2.FailureView(
                what=what, reason=reason, request_id=request, peer=peer, age_ms=round(1000 * (now - at))
            )
            for at, what, reason, request, peer in self._failures
        ]


@dataclass(frozen=True, slots=True)
class TransfersNow:
    """`broken`: lanes from which no KV comes, each with the reason. `moved_bytes`: since the node started."""

    in_flight: Sequence[TransferProgress] = ()
    lanes: Mapping[NodeId, MeasuredLane] = field(default_factory=dict)
    broken: Mapping[NodeId, str] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    quarantined_arenas: int = 0

    def export(self, metrics: NodeMetrics) -> None:
        states = [transfer.state for transfer in self.in_flight]
        metrics.kv_transfers.set_all({state: states.count(state) for state in KV_TRANSFER_STATES})
        metrics.quarantined_arenas.set(self.quarantined_arenas)
        metrics.broken_lanes.set(len(self.broken))


def node_detail(
    status: EngineStatus, transfers: TransfersNow, failures: Sequence[node_pb2.FailureView]
) -> node_pb2.NodeDetail:
    return node_pb2.NodeDetail(
        blocks_free=status.blocks_free,
        blocks_cached=status.blocks_cached,
        blocks_in_use=status.blocks_in_use,
        staging_slots=dict(transfers.slots),
        transfers=[_transfer_view(transfer) for transfer in transfers.in_flight[:TRANSFERS_SHOWN]],
        transfers_in_flight=len(transfers.in_flight),
        kv_transfer_bytes=transfers.moved_bytes,
        lanes=[_lane_view(peer, transfers) for peer in sorted({*transfers.lanes, *transfers.broken})],
        failures=failures,
    )


def _transfer_view(progress: TransferProgress) -> node_pb2.TransferView:
    return node_pb2.TransferView(
        request_id=progress.transfer.request,
        attempt=progress.transfer.attempt,
        try_number=progress.transfer.try_number,
        peer=progress.peer,
        state=progress.state,
        parcels_done=progress.parcels_done,
        parcels=progress.parcels,
        bytes_done=progress.bytes_done,
        bytes=progress.bytes,
        age_ms=round(1000 * progress.age_s),
    )


def _lane_view(peer: NodeId, transfers: TransfersNow) -> node_pb2.LaneView:
    lane = transfers.lanes.get(peer)
    view = node_pb2.LaneView(peer=peer, broken=transfers.broken.get(peer, ""))
    if lane is not None:
        view.lane, view.bytes_per_second = lane.name, lane.bytes_per_second
    return view
