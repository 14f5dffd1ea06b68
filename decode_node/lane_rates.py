"""How fast KV comes from each prefill node, for routers that choose between a transfer and a local prefill. Pure.

The self-test at pairing gives the first figure, every transfer a newer one. A figure is told for a while only: a lane that is
spared because it was slow would otherwise never be tried again.

Must not know: transfers, routers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from foundation.ids import NodeId

WEIGHT = 0.5
"""Of the newest transfer in the moving average of the time for a byte: that is what is predicted with it."""
HOLDS_S = 300.0
MOST_LANES = 64


@dataclass(frozen=True, slots=True)
class _Rate:
    bytes_per_second: float
    at_s: float


class LaneRates:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rates: OrderedDict[NodeId, _Rate] = OrderedDict()

    def paired(self, peer: NodeId, bytes_per_second: float) -> None:
        """The self-test's figure, of a lane that is used anew."""
        if bytes_per_second > 0:
            self._set(peer, bytes_per_second)

    def carried(self, peer: NodeId, bytes_per_second: float) -> None:
        """A transfer's figure; 0: it was too short for one."""
        if bytes_per_second <= 0:
            return
        before = self._rates.get(peer)
        known = before.bytes_per_second if before is not None else bytes_per_second
        self._set(peer, 1 / ((1 - WEIGHT) / known + WEIGHT / bytes_per_second))

    def current(self) -> dict[NodeId, float]:
        oldest_s = self._now() - HOLDS_S
        return {peer: rate.bytes_per_second for peer, rate in self._rates.items() if rate.at_s > oldest_s}

    def _set(self, peer: NodeId, bytes_per_second: float) -> None:
        self._rates[peer] = _Rate(bytes_per_second, self._now())
        self._rates.move_to_end(peer)
        if len(self._rates) > MOST_LANES:
            self._rates.popitem(last=False)
