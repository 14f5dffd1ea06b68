"""Several routers before the same nodes, found through one Redis: they share nothing, so one's death is only its own."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from router_fake_node import FakeNode, expected_answer, running
from router_model_folder import write_model_folder
from router_under_test import until
from test_router_process import Process

from foundation.registry_redis import RedisRegistry
from router.tokenizer import ModelText

pytestmark = [pytest.mark.sockets, pytest.mark.redis]

ANSWER_TOKENS = 40
TOKENS_BEFORE_THE_KILL = 5
SEED = 3
LEASE_S = 60.0


def unharmed(prompt: str) -> str:
    return bytes(expected_answer(list(prompt.encode()), ANSWER_TOKENS, SEED)).decode()


class Stream:
    """One streamed answer, read as far as it goes."""

    def __init__(self, http: aiohttp.ClientSession, process: Process, prompt: str) -> None:
        self.prompt = prompt
        self.text = ""
        self.done = False
        self._http = http
        self._url = process.url

    async def read(self) -> None:
        """Raises aiohttp.ClientError when the connection is cut."""
        body = {"prompt": self.prompt, "max_tokens": ANSWER_TOKENS, "seed": SEED, "stream": True}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    self.done = True
                elif line.startswith(b"data: "):
                    self.text += json.loads(line[6:])["choices"][0]["text"]


@asynccontextmanager
async def announced(redis_url: str, *nodes: FakeNode) -> AsyncIterator[None]:
    registry = RedisRegistry(redis_url)
    for node in nodes:
        await registry.announce(node.entry, LEASE_S)
    try:
        yield
    finally:
        for node in nodes:
            await registry.withdraw(node.entry.node_id, node.entry.incarnation)
        await registry.close()


async def ready(http: aiohttp.ClientSession, process: Process, nodes: int) -> None:
    async with asyncio.timeout(20):
        while True:
            async with http.get(f"{process.url}/health") as answer:
                found = (await answer.json())["nodes"]
            if sum(node["refusal"] is None for node in found) >= nodes:
                return
            await asyncio.sleep(0.02)


async def test_f36_a_router_that_is_killed_ends_only_its_own_connections_and_the_other_serves_all(
    redis_url: str, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path / "tiny-model")
    tokenizer = ModelText.from_folder(folder).fingerprint or ""
    nodes = [
        FakeNode(f"several-{index}", tokens_until_pause=TOKENS_BEFORE_THE_KILL, tokenizer=tokenizer)
        for index in range(2)
    ]
    dying, other = Process(folder, registry=redis_url), Process(folder, registry=redis_url)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(*nodes))
        await stack.enter_async_context(announced(redis_url, *nodes))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        victim = await stack.enter_async_context(dying.serving())
        await stack.enter_async_context(other.serving())
        await asyncio.gather(*(ready(http, process, len(nodes)) for process in (dying, other)))

        cut = [Stream(http, dying, f"cut {index}") for index in range(3)]
        kept = [Stream(http, other, f"kept {index}") for index in range(3)]
        reading = [asyncio.create_task(stream.read()) for stream in (*cut, *kept)]
        await until(lambda: all(len(stream.text) == TOKENS_BEFORE_THE_KILL for stream in (*cut, *kept)))
        assert [node.attached for node in nodes] == [2, 2]

        victim.send_signal(signal.SIGKILL)
        for task in reading[: len(cut)]:
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(task, 5)
        assert not any(stream.done for stream in cut), "a cut never looks like an end"
        await until(lambda: sum(len(node.requests) for node in nodes) == len(kept), 2.0)

        for node in nodes:
            node.tokens_until_pause = None
        await asyncio.gather(*reading[len(cut) :])
        again = [Stream(http, other, stream.prompt) for stream in cut]
        await asyncio.gather(*(stream.read() for stream in again))
        for stream in (*kept, *again):
            assert (stream.text, stream.done) == (unharmed(stream.prompt), True)
        assert not any(node.requests for node in nodes)

        await stack.enter_async_context(dying.serving())
        await ready(http, dying, len(nodes))
        back = Stream(http, dying, "back again")
        await back.read()
        assert back.text == unharmed("back again")
