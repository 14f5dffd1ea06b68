"""One snapshot of everything this router knows, as plain data for the page: itself, its nodes, their transfers, recent failures.

A node that has left is shown for a while, so that nobody has to remember who was there.

Must not know: HTTP, how it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from decant_proto.v1 import node_pb2

from foundation.health import Health
from foundation.ids import NodeId
from foundation.registry_entry import Role
from router.clients import NodeLink
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.health import LinkState, Status

GONE_SHOWN_S = 600.0
MOST_GONE = 32
FAILURES_SHOWN = 40
DETAIL_GOOD_FOR_S = 3.0
"""Older details of a node are not shown: it stopped telling them."""

Condition = Literal["good", "warning", "bad"]

_CONDITIONS: dict[str | None, Condition] = {
    None: "good",
    "node_lost": "bad",
    "node_gone": "bad",
    "node_stalled": "bad",
}
"""Of a node, by why it gets no work; everything else is a warning."""


@dataclass(slots=True)
class _Moved:
    """How much KV a node had moved when it last said so, and how fast it was moving between then and the time before."""

    at_s: float
    kv_bytes: int
    bytes_per_second: float | None = None


class Board:
    def __init__(
        self, fleet: Fleet, dispatcher: Dispatcher, health: Health, model: str, now: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._health = health
        self._model = model
        self._now = now
        self._started_s = now()
        self._rows: dict[NodeId, dict[str, Any]] = {}
        """Every node's last row, those that have left included."""
        self._gone_s: dict[NodeId, float] = {}
        self._moved: dict[NodeId, _Moved] = {}

    def links(self) -> list[NodeLink]:
        return [link for role in Role for link in self._fleet.links(role)]

    def kv_bytes_per_second(self) -> float | None:
        """What decode nodes take in; None while none has said."""
        speeds = [
            moved.bytes_per_second
            for link in self._fleet.links(Role.DECODE)
            if (moved := self._moved.get(link.node_id)) is not None and moved.bytes_per_second is not None
        ]
        return sum(speeds) if speeds else None

    def snapshot(self) -> dict[str, Any]:
        now_s, links = self._now(), self.links()
        for link in links:
            self._rows[link.node_id] = self._node(link, now_s)
        self._age_those_who_left({link.node_id for link in links}, now_s)
        return {
            "router": self._router(now_s),
            "nodes": sorted(self._rows.values(), key=lambda row: (row["role"] != "prefill", row["node"])),
            "transfers": _transfers((link, detail) for link in links if (detail := self._detail(link, now_s))),
            "failures": self._failures(links, now_s),
        }

    def _router(self, now_s: float) -> dict[str, Any]:
        accounts = self._dispatcher.accounts()
        waiting = sum(account.answer_tokens == 0 for account in accounts)
        registry_down_s = self._fleet.registry_down_since_s
        return {
            "model": self._model,
            "uptime_s": now_s - self._started_s,
            "problems": [problem.for_people() for problem in self._health.problems()],
            "registry_down_for_s": now_s - registry_down_s if registry_down_s is not None else None,
            "running": len(accounts) - waiting,
            "waiting": waiting,
        }

    def _node(self, link: NodeLink, now_s: float) -> dict[str, Any]:
        status = link.health.status or Status()
        refusal = self._fleet.refusal(link)
        if refusal == "node_connecting" and link.hello is not None:
            refusal = "node_lost"  # it was there, and is dialled again
        since_s = link.health.refused_for_s(now_s, refusal)
        condition = _CONDITIONS.get(refusal, "warning")
        if refusal is None and status.serves_alone:
            condition, refusal = "warning", "serves_alone"
        if "engine_stalled" in status.not_ready_reasons:
            condition = "bad"
        lost = refusal == "node_lost"
        return {
            "node": link.node_id,
            "role": link.entry.role.value,
            "address": link.entry.control_address,
            "condition": condition,
            "refusal": refusal,
            "reasons": [] if lost else list(status.not_ready_reasons),
            "since_s": since_s,
            "attempts": len(link.attempts),
            "running": 0 if lost else status.running,
            "waiting": 0 if lost else status.waiting,
            "queued_tokens": 0 if lost else status.queued_tokens,
            "prompt_tokens_per_second": 0.0 if lost else _finite(status.tokens_per_second),
            "blocks_total": 0 if lost else status.blocks_total,
            "blocks_free": 0 if lost else status.blocks_free,
            "detail": self._detail_of(link, now_s),
        }

    def _detail(self, link: NodeLink, now_s: float) -> node_pb2.NodeDetail | None:
        attached = link.health.state in (LinkState.READY, LinkState.SUSPECT)
        return link.detail if attached and now_s - link.detail_s <= DETAIL_GOOD_FOR_S else None

    def _detail_of(self, link: NodeLink, now_s: float) -> dict[str, Any] | None:
        detail = self._detail(link, now_s)
        if detail is None:
            self._moved.pop(link.node_id, None)
            return None
        moved = self._moved.get(link.node_id)
        if moved is None or detail.kv_transfer_bytes < moved.kv_bytes:
            moved = self._moved[link.node_id] = _Moved(link.detail_s, detail.kv_transfer_bytes)
        elif link.detail_s > moved.at_s:
            speed = (detail.kv_transfer_bytes - moved.kv_bytes) / (link.detail_s - moved.at_s)
            moved = self._moved[link.node_id] = _Moved(link.detail_s, detail.kv_transfer_bytes, speed)
        return {
            "blocks_free": detail.blocks_free,
            "blocks_cached": detail.blocks_cached,
            "blocks_in_use": detail.blocks_in_use,
            "slots": dict(detail.staging_slots),
            "transfers": detail.transfers_in_flight,
            "kv_bytes_per_second": moved.bytes_per_second,
            "lanes": [
                {
                    "peer": lane.peer,
                    "lane": lane.lane,
                    "bytes_per_second": _finite(lane.bytes_per_second),
                    "broken": lane.broken,
                }
                for lane in detail.lanes
            ],
        }

    def _age_those_who_left(self, present: set[NodeId], now_s: float) -> None:
        for node in self._rows:
            if node in present:
                self._gone_s.pop(node, None)
                continue
            gone_s = self._gone_s.setdefault(node, now_s)
            self._moved.pop(node, None)
            self._rows[node] = self._rows[node] | {
                "condition": "bad",
                "refusal": "node_gone",
                "since_s": now_s - gone_s,
                "reasons": [],
                "attempts": 0,
                "running": 0,
                "waiting": 0,
                "queued_tokens": 0,
                "prompt_tokens_per_second": 0.0,
                "blocks_total": 0,
                "blocks_free": 0,
                "detail": None,
            }
        oldest_first = sorted(self._gone_s, key=self._gone_s.__getitem__)
        too_many = oldest_first[: max(0, len(oldest_first) - MOST_GONE)]
        for node in {*too_many, *(node for node, gone_s in self._gone_s.items() if now_s - gone_s > GONE_SHOWN_S)}:
            del self._rows[node], self._gone_s[node]

    def _failures(self, links: Iterable[NodeLink], now_s: float) -> list[dict[str, Any]]:
        """The latest first."""
        found: list[dict[str, Any]] = [
            {
                "age_s": now_s - failure.at_s,
                "what": failure.what,
                "reason": failure.reason,
                "request": failure.request,
                "where": failure.node,
                "peer": "",
            }
            for failure in self._dispatcher.failures
        ]
        for link in links:
            if link.detail is None:
                continue
            told_before_s = now_s - link.detail_s
            found += [
                {
                    "age_s": told_before_s + view.age_ms / 1000,
                    "what": view.what,
                    "reason": view.reason,
                    "request": view.request_id,
                    "where": link.node_id,
                    "peer": view.peer,
                }
                for view in link.detail.failures
            ]
        return sorted(found, key=lambda failure: failure["age_s"])[:FAILURES_SHOWN]


def _finite(figure: float) -> float:
    """What a node says may be no number; JSON has no word for that."""
    return figure if math.isfinite(figure) else 0.0


def _transfers(details: Iterable[tuple[NodeLink, node_pb2.NodeDetail]]) -> list[dict[str, Any]]:
    """Each transfer once, though both its ends tell of it; the oldest first."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for link, detail in details:
        receives = link.entry.role is Role.DECODE
        for view in detail.transfers:
            transfer = found.setdefault(
                (view.request_id, view.attempt, view.try_number),
                {
                    "request": view.request_id,
                    "attempt": view.attempt,
                    "try_number": view.try_number,
                    "source": view.peer if receives else link.node_id,
                    "target": link.node_id if receives else view.peer,
                    "age_s": 0.0,
                    "received": None,
                    "sent": None,
                },
            )
            transfer["age_s"] = max(transfer["age_s"], view.age_ms / 1000)
            transfer["received" if receives else "sent"] = {
                "state": view.state,
                "parcels_done": view.parcels_done,
                "parcels": view.parcels,
                "bytes_done": view.bytes_done,
                "bytes": view.bytes,
            }
    return sorted(found.values(), key=lambda transfer: -transfer["age_s"])
