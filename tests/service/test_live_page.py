"""The live page as a browser fetches it: its files, its headers, its stream of events; fake nodes behind the router."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from decant_proto.v1 import node_pb2
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until
from waiting import in_time

from foundation.ids import NodeId
from foundation.registry_entry import Role
from router.live_page import endpoints

pytestmark = pytest.mark.sockets

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("live") / "tiny-model")


class Viewer:
    """Reads the page's events as EventSource does."""

    def __init__(self, content: Any) -> None:
        self._content = content

    async def next(self, name: str) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = (await self._content.readuntil(b"\n\n")).decode()
                if event == f"retry: {endpoints.RECONNECT_AFTER_MS}\n\n":
                    continue
                found = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", event)
                assert found is not None, event
                if found[1] == name:
                    return json.loads(found[2])

    async def node(self, name: str, **wanted: Any) -> dict[str, Any]:
        """The node's row, once it says so."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                rows = {node["node"]: node for node in (await self.next("snapshot"))["nodes"]}
                if name in rows and all(rows[name][key] == value for key, value in wanted.items()):
                    return dict(rows[name])


@asynccontextmanager
async def viewer(router: RouterUnderTest) -> AsyncIterator[Viewer]:
    async with router.http.get(f"{router.url}/ui/events") as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield Viewer(answer.content)


async def test_the_page_is_made_of_its_own_files_alone_and_may_run_nothing_else(folder: Path) -> None:
    async with router_with(folder) as router:
        async with router.http.get(f"{router.url}/ui") as answer:
            page = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        named = set(re.findall(r'(?:src|href)="(ui/[^"]+)"', page))
        assert named == {"ui/icon.svg", "ui/page.css", "ui/page.js"}
        for name in (*named, "ui/chart.js", "ui/rows.js"):
            async with router.http.get(f"{router.url}/{name}") as answer:
                assert answer.status == 200, name
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                text = await answer.text()
            foreign = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", text)) - {"http://www.w3.org/2000/svg"}
            assert foreign == set(), name
        assert "style=" not in page
        assert "<script>" not in page
        for path in ("/ui/", "/ui/../main.py", "/ui/%2e%2e%2fmain.py", "/ui/nothing"):
            assert (await router.get(path))[0] == 404


async def test_f25_a_node_that_dies_is_bad_within_3_s_and_is_still_shown_when_it_is_gone(folder: Path) -> None:
    nodes = [FakeNode("d0"), FakeNode("d1")]
    async with router_with(folder, *nodes, silence_limit_s=2.0, heartbeat_s=0.5) as router, viewer(router) as page:
        await page.node("d1", condition="good", refusal=None)
        await nodes[1].kill()
        row = await in_time(page.node("d1", condition="bad"), 3)
        assert row["refusal"] in ("node_lost", "node_gone")
        assert router.router.embedded is not None
        await router.router.embedded.withdraw(NodeId("d1"), nodes[1].entry.incarnation)
        row = await page.node("d1", condition="bad", refusal="node_gone")
        assert row["running"] == 0
        await page.node("d0", condition="good")


async def test_nodes_are_asked_for_details_only_while_somebody_looks(folder: Path) -> None:
    node = FakeNode("d0")
    node.prompt_tokens_per_second = float("nan")
    lane = node_pb2.LaneView(peer="p0", lane="tcp", bytes_per_second=float("inf"))
    node.detail = node_pb2.NodeDetail(
        blocks_free=3, blocks_cached=2, blocks_in_use=5, staging_slots={"posted": 4}, lanes=[lane]
    )
    async with router_with(folder, node) as router:
        await asyncio.sleep(3 * endpoints.SNAPSHOT_EVERY_S)
        assert node.watches == 0
        async with viewer(router) as page:
            row = await page.node("d0", condition="good")
            while row["detail"] is None:
                row = await page.node("d0")
            assert row["detail"]["blocks_in_use"] == 5
            assert row["detail"]["slots"] == {"posted": 4}
            assert row["detail"]["lanes"][0]["bytes_per_second"] == row["prompt_tokens_per_second"] == 0
        assert node.watches >= 1
        await until(lambda: router.router._live_page._viewers == 0)


async def test_a_transfer_that_both_ends_tell_of_is_one_row_and_its_progress_moves(folder: Path) -> None:
    decode, prefill = FakeNode("d0"), FakeNode("p0", Role.PREFILL)

    def told(peer: str, state: str, done: int) -> node_pb2.NodeDetail:
        view = node_pb2.TransferView(
            request_id="r", attempt=1, try_number=1, peer=peer, state=state, parcels_done=done, parcels=8
        )
        view.bytes_done, view.bytes, view.age_ms = 100 * done, 800, 1500
        return node_pb2.NodeDetail(transfers=[view], transfers_in_flight=1, kv_transfer_bytes=100 * done)

    decode.detail, prefill.detail = told("p0", "landing", 2), told("d0", "sending", 3)
    async with router_with(folder, decode, prefill) as router, viewer(router) as page:
        transfers: list[Any] = []
        while not transfers or transfers[0]["received"] is None or transfers[0]["sent"] is None:
            transfers = (await page.next("snapshot"))["transfers"]
        (transfer,) = transfers
        assert (transfer["source"], transfer["target"], transfer["age_s"]) == ("p0", "d0", 1.5)
        assert (transfer["received"]["parcels_done"], transfer["sent"]["parcels_done"]) == (2, 3)
        decode.detail = told("p0", "landing", 7)
        while (await page.next("snapshot"))["transfers"][0]["received"]["parcels_done"] != 7:
            pass
        assert (await page.next("sample"))["kv_bytes_per_second"] is not None


async def test_f31_a_lost_attempt_and_a_node_s_own_failures_are_told_with_their_reasons(folder: Path) -> None:
    nodes = [FakeNode("d0", refusal="engine_error"), FakeNode("d1", refusal="engine_error")]
    nodes[1].detail = node_pb2.NodeDetail(
        failures=[node_pb2.FailureView(what="transfer", reason="bad_digest", request_id="r", peer="p0", age_ms=50_000)]
    )
    async with router_with(folder, *nodes) as router, viewer(router) as page:
        assert (await router.post("/v1/completions", {"prompt": "x", "max_tokens": 4}))[0] == 503
        wanted = {("attempt", "engine_error"), ("request", "engine_error"), ("transfer", "bad_digest")}
        found: set[tuple[str, str]] = set()
        while not found >= wanted:
            failures = (await page.next("snapshot"))["failures"]
            found = {(failure["what"], failure["reason"]) for failure in failures}
        assert failures == sorted(failures, key=lambda failure: failure["age_s"])
        assert not any(str(value) == "x" for failure in failures for value in failure.values()), "no prompt is shown"


async def test_more_viewers_than_the_limit_are_asked_to_come_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MOST_VIEWERS", 1)
    async with router_with(folder) as router:
        async with viewer(router) as page:
            await page.next("history")
            async with router.http.get(f"{router.url}/ui/events") as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        await until(lambda: router.router._live_page._viewers == 0)
        async with viewer(router) as page:
            await page.next("snapshot")


async def test_a_router_with_an_open_page_leaves_as_quickly_as_without(folder: Path) -> None:
    async with router_with(folder) as router, viewer(router) as page:
        await page.next("snapshot")
        async with asyncio.timeout(5):
            await router.router._live_page.close()
            rest = await page._content.read()
        assert b"event: sample" not in rest or rest.endswith(b"\n\n")
