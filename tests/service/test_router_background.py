"""A bug in what a router does by itself is never silent: its background tasks end the process, a stream is begun again."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import pytest
from router_fake_node import FakeNode, running
from router_model_folder import write_model_folder
from router_under_test import LEASE_S, RouterUnderTest, router_with, until

from bench.ports import free_port
from foundation.api_keys import ApiKeyStore
from foundation.health import Health
from foundation.keys import draw_master_keys
from foundation.registry_entry import Role
from router import main as router_main
from router.clients import NodeLink
from router.fleet import Fleet
from router.journey import DeadlinePassed, Event
from router.live_page.board import Board
from router.main import Router, listen
from router.ongoing import Ongoing
from router.options import RouterOptions
from router.tokenizer import ModelText

pytestmark = pytest.mark.sockets

PROMPT = {"model": "tiny-model", "prompt": "x", "max_tokens": 100}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("background") / "tiny-model")


def planted(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("where", "name", "stir"),
    [
        (Fleet, "_adopt", lambda router: None),
        (Health, "problems", lambda router: None),
        (Fleet, "link_lost", lambda router: router.router.fleet.links(Role.DECODE)[0].give_up("planted")),
    ],
    ids=["fleet", "health", "link"],
)
async def test_a_background_task_that_fails_is_told_to_its_root(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    name: str,
    stir: Callable[[RouterUnderTest], None],
) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, planted)
            stir(router)
            await until(lambda: router.failures)
        assert [str(one) for one in router.failures] == ["planted"]
        router.failures.clear()


@pytest.mark.parametrize("companion", ["_watch", "_write"])
async def test_a_stream_whose_writer_or_watch_fails_is_begun_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, companion: str
) -> None:
    async def fails(*_: object) -> None:
        planted()

    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        with monkeypatch.context() as patched:
            patched.setattr(NodeLink, companion, fails)
            node.say(None)  # type: ignore[arg-type]  # its end of the stream
            await until(lambda: node.attached >= 3)
        await until(lambda: not router.router.fleet.not_ready_reasons())
        assert (await router.post("/v1/completions", PROMPT))[0] == 200


async def test_f28_a_timer_that_fails_ends_its_own_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Ongoing.handle

    def fails_at_its_deadline(self: Ongoing, event: Event) -> None:
        if isinstance(event, DeadlinePassed):
            planted()
        handle(self, event)

    monkeypatch.setattr(Ongoing, "handle", fails_at_its_deadline)
    node = FakeNode("d0", tokens_until_pause=3)
    async with router_with(folder, node, request_timeout_s=0.2) as router:
        status, found = await router.post("/v1/completions", PROMPT)
        assert (status, found["error"]["code"]) == (500, "internal_error")
        await until(lambda: not node.requests)
        assert router.router.dispatcher.in_flight == 0


async def test_a_live_page_that_fails_ends_its_viewers_streams_and_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        async with router.http.get(f"{router.url}/ui/events") as response:
            await response.content.readuntil(b"event: snapshot")
            monkeypatch.setattr(Board, "snapshot", planted)
            await asyncio.wait_for(response.read(), 20)
        assert (await router.post("/v1/completions", PROMPT))[0] == 200


class Lines:
    """Instead of a log: which events were logged, and as what."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **_: self.events.append((level, event))


async def test_a_failure_ends_the_process_with_1_and_its_clients_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines()
    routers: list[Router] = []

    class Recorded(Router):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            routers.append(self)

    monkeypatch.setattr(router_main, "log", lines)
    monkeypatch.setattr(router_main, "Router", Recorded)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process has other tests to run
    text = ModelText.from_folder(folder)
    port, grpc_port = free_port(), free_port()
    options = RouterOptions(model=str(folder), key_file="unused", http_port=port, grpc_port=grpc_port)
    node = FakeNode("d0", tokens_until_pause=3, tokenizer=text.fingerprint or "")
    async with running(node), aiohttp.ClientSession() as http:
        listener = listen("--http-port", "127.0.0.1", port)
        serve = router_main._serve_until_signalled
        process = asyncio.create_task(serve(options, draw_master_keys(), text, ApiKeyStore(None), listener))
        await until(lambda: ("info", "router ready") in lines.events)
        (router,) = routers
        assert router.embedded is not None
        await router.embedded.announce(node.entry, LEASE_S)
        await until(lambda: not router.fleet.not_ready_reasons())
        body = {**PROMPT, "stream": True}
        async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            monkeypatch.setattr(Fleet, "_adopt", planted)
            events = (await response.read()).decode().strip().split("\n\n")
        assert '"code": "draining"' in events[-1]
        assert '"retryable": true' in events[-1]
        assert await asyncio.wait_for(process, 30) == 1
    assert ("critical", "stopped by a failure") in lines.events
