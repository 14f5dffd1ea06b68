"""A router as its own process: it starts, says what stops it, drains and leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from decant_proto.v1 import registry_pb2, registry_pb2_grpc
from forked_decant import ForkedDecant
from pd_nodes import inherited
from router_fake_node import FakeNode, running
from router_model_folder import write_model_folder

from bench.ports import free_port
from foundation.keys import draw_master_keys, write_key_file
from router.registry import entry_to_proto

pytestmark = pytest.mark.sockets

START_LIMIT_S = 100.0


class Process:
    def __init__(self, folder: Path, **options: object) -> None:
        key_file = folder.parent / "keys"
        if not key_file.exists():
            write_key_file(key_file, draw_master_keys())
        self.http_port, self.grpc_port = free_port(), free_port()
        settings = {
            "model": folder,
            "key-file": key_file,
            "http-port": self.http_port,
            "grpc-port": self.grpc_port,
            "log-format": "json",
            **options,
        }
        self.arguments = [f"--{name}={value}" for name, value in settings.items()]
        self.url = f"http://127.0.0.1:{self.http_port}"

    async def start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "decant", "router", *self.arguments),
            stderr=asyncio.subprocess.PIPE,
            env=inherited(),
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await self.start()
        assert process.stderr is not None
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while b"router ready" not in (line := await process.stderr.readline()):
                    assert line, "the router ended"
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "tiny-model")


async def reasons(http: aiohttp.ClientSession, url: str) -> list[str]:
    async with http.get(f"{url}/health") as answer:
        return [problem["reason"] for problem in (await answer.json())["reasons"]]


async def test_f23_sigterm_lets_a_stream_end_and_the_process_leaves_with_0(folder: Path) -> None:
    process, node = Process(folder), FakeNode("d0", tokens_until_pause=5)
    async with running(node), process.serving() as router, aiohttp.ClientSession() as http:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{process.grpc_port}") as channel:
            announce = registry_pb2.AnnounceRequest(entry=entry_to_proto(node.entry), lease_ms=60_000)
            node.tokenizer = _tokenizer_fingerprint(folder)
            await registry_pb2_grpc.RegistryStub(channel).Announce(announce)
        body = {"model": "tiny-model", "prompt": "x", "max_tokens": 20, "stream": True}
        async with http.post(f"{process.url}/v1/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            router.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                while await reasons(http, process.url) != ["draining"]:
                    await asyncio.sleep(0.01)
            assert (await http.get(f"{process.url}/live")).status == 200
            node.tokens_until_pause = None
            events = (first + await response.read()).decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
        assert len("".join(texts)) == 20
        assert await asyncio.wait_for(router.wait(), 10) == 0


def _tokenizer_fingerprint(folder: Path) -> str:
    from router.tokenizer import ModelText

    return ModelText.from_folder(folder).fingerprint or ""


def outcome(process: Process, log: Path) -> tuple[int, str]:
    """Its exit code and all that it wrote."""
    code = ForkedDecant(["router", *process.arguments], inherited(), log).wait(START_LIMIT_S)
    return code, log.read_text()


def test_f32_a_port_in_use_stops_the_start_and_names_the_setting(folder: Path) -> None:
    for setting in ("http-port", "grpc-port"):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            code, message = outcome(Process(folder, **{setting: port}), folder.parent / setting)
        assert code == 2
        assert f"--{setting}" in message
        assert str(port) in message
        assert "Traceback" not in message


def test_what_is_wrong_with_a_setting_is_one_line(folder: Path) -> None:
    node_keys = folder.parent / "node-keys"
    from foundation.ids import NodeId

    write_key_file(node_keys, draw_master_keys().for_node(NodeId("p0")))
    rows: tuple[tuple[dict[str, object], str], ...] = (
        ({"model": folder / "missing"}, "--model"),
        ({"key-file": folder / "missing"}, "--key-file"),
        ({"key-file": node_keys}, "master"),
        ({"registry": "redis://127.0.0.1:nonsense"}, "--registry"),
        ({"max-body-byte": 5}, "--max-body-bytes"),
    )
    for number, (options, named) in enumerate(rows):
        code, message = outcome(Process(folder, **options), folder.parent / f"log-{number}")
        assert code == 2, message
        assert named in message
        assert len(message.strip().splitlines()) == 1, message
