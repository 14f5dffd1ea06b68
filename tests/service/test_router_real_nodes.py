"""A router before real node processes with the toy model, whose next token is a hash of the KV bytes that it reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from router_under_test import RouterUnderTest, free_port, router_with, until

from engine.model.toy import write_toy_folder
from foundation.ids import NodeId
from foundation.keys import write_key_file

pytestmark = [pytest.mark.sockets, pytest.mark.timeout(240)]

START_LIMIT_S = 90.0
STREAMS = 6
ANSWER_TOKENS = 400
TOKENS_BEFORE_THE_KILL = 10


@dataclass
class Cluster:
    router: RouterUnderTest
    processes: dict[str, asyncio.subprocess.Process]

    async def kill(self, node_id: str) -> None:
        process = self.processes[node_id]
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL


@asynccontextmanager
async def cluster(tmp_path: Path, prefill: int, decode: int) -> AsyncIterator[Cluster]:
    folder, key_file = write_toy_folder(tmp_path / "toy"), tmp_path / "keys"
    async with router_with(folder, wait_ready=False, silence_limit_s=2.0, heartbeat_s=0.5) as router:
        write_key_file(key_file, router.keys)
        processes: dict[str, asyncio.subprocess.Process] = {}
        try:
            for role, count in (("prefill", prefill), ("decode", decode)):
                for index in range(count):
                    node_id = f"{role}-{index}"
                    processes[node_id] = await _start(role, node_id, folder, key_file, router.grpc_address, tmp_path)
            fleet = router.router.fleet
            await until(lambda: _usable(router) == len(processes), START_LIMIT_S)
            assert not fleet.not_ready_reasons()
            yield Cluster(router, processes)
        finally:
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _usable(router: RouterUnderTest) -> int:
    names = [NodeId(f"{role}-{index}") for role in ("prefill", "decode") for index in range(4)]
    links = [router.router.fleet.link(name) for name in names]
    return sum(link is not None and link.usable for link in links)


async def _start(
    role: str, node_id: str, folder: Path, key_file: Path, registry: str, logs: Path
) -> asyncio.subprocess.Process:
    ports = {f"--{kind}-port": free_port() for kind in ("control", "data", "http")}
    settings = {"--model": folder, "--node-id": node_id, "--key-file": key_file, "--registry": registry, **ports}
    # Small steps, so that an answer takes long enough to be interrupted.
    settings |= {"--kv-cache-memory-bytes": "64MiB", "--staging-bytes": "8MiB", "--slot-bytes": "64KiB"}
    arguments = [f"{name}={value}" for name, value in settings.items()]
    with (logs / f"{node_id}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "decant", role, *arguments),
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


async def answer(router: RouterUnderTest, index: int, begun: asyncio.Queue[int] | None = None) -> str:
    """One streamed answer, greedy for even indices and seeded for odd ones; says when it is under way."""
    asked: Any = {"temperature": 0} if index % 2 == 0 else {"temperature": 1, "seed": index}
    stream = await router.openai().completions.create(
        model=router.model,
        prompt=f"{index}: " + "a prompt that fills a few blocks; " * 4,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **asked,
    )
    texts, tokens = [], 0
    async for chunk in stream:
        if chunk.choices:
            texts.append(chunk.choices[0].text)
            if len(texts) == TOKENS_BEFORE_THE_KILL and begun is not None:
                begun.put_nowait(index)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    assert tokens == ANSWER_TOKENS
    return "".join(texts)


async def answers(router: RouterUnderTest, begun: asyncio.Queue[int] | None = None) -> list[str]:
    return await asyncio.gather(*(answer(router, index, begun) for index in range(STREAMS)))


async def test_f05_sigkill_of_a_decode_node_in_mid_stream_changes_no_token(tmp_path: Path) -> None:
    async with cluster(tmp_path, prefill=1, decode=2) as nodes:
        unharmed = await answers(nodes.router)
        begun: asyncio.Queue[int] = asyncio.Queue()
        running = asyncio.ensure_future(answers(nodes.router, begun))
        for _ in range(STREAMS):
            await asyncio.wait_for(begun.get(), 30)
        fleet = nodes.router.router.fleet
        victim = fleet.link(NodeId("decode-0"))
        assert victim is not None
        cut_off = len(victim.attempts)
        assert cut_off, "the node serves some of the streams when it is killed"
        await nodes.kill("decode-0")
        assert await running == unharmed
        moved = await nodes.router.metric('decant_request_attempts_total{reason="node_lost"}')
        assert moved >= 1
        assert moved <= cut_off
        assert await answers(nodes.router) == unharmed
