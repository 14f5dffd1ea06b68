"""A whole router in the test's own event loop, on free ports, with fake nodes announced to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
from router_fake_node import FakeNode, running
from waiting import until as until

from bench.ports import free_port
from foundation.api_keys import ApiKeyStore
from foundation.background import Background
from foundation.ids import NodeId
from foundation.keys import MasterKeys, draw_master_keys
from router.main import Router, listen
from router.options import RouterOptions
from router.tokenizer import ModelText

LEASE_S = 600.0
SILENCE_LIMIT_S = 0.6
HEARTBEAT_S = 0.05


@dataclass
class RouterUnderTest:
    router: Router
    url: str
    grpc_address: str
    keys: MasterKeys
    http: aiohttp.ClientSession
    failures: list[BaseException]
    """Of the router's background tasks; each would have ended its process."""
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def model(self) -> str:
        return self.router.intake.model_name

    async def heard(self, tokens: int, requests: int = 1) -> None:
        """Waits until so many requests are under way and the router has so many tokens of each."""
        ongoing = self.router.dispatcher._ongoing
        await until(
            lambda: len(ongoing) == requests and all(len(one.journey.log) >= tokens for one in ongoing.values())
        )

    def openai(self) -> openai.AsyncOpenAI:
        self.clients.append(openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0))
        return self.clients[-1]

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON. `body`: an object, or raw bytes."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, **sent) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    async def metric(self, line: str) -> float:
        """The value of one line of /metrics, named with its labels."""
        _, text = await self.get("/metrics")
        (value,) = [found.split()[-1] for found in text.splitlines() if found.rsplit(" ", 1)[0] == line]
        return float(value)


def _has_spoken(router: Router, node: FakeNode) -> bool:
    """Of itself: a node that has only said who it is takes no request yet."""
    link = router.fleet.link(NodeId(node.node_id))
    return link is not None and link.health.status is not None


@asynccontextmanager
async def router_with(
    folder: Path, *nodes: FakeNode, wait_ready: bool = True, api_key: str | None = None, **options: Any
) -> AsyncIterator[RouterUnderTest]:
    """A router and these nodes, connected. The embedded registry is used unless `registry` is given."""
    keys = draw_master_keys()
    text = ModelText.from_folder(folder)
    for node in nodes:
        node.tokenizer = node.tokenizer or (text.fingerprint or "")
    port, grpc_port = free_port(), free_port()
    settings = RouterOptions(
        **{
            "model": str(folder),
            "key_file": "unused",
            "http_port": port,
            "grpc_port": grpc_port,
            "silence_limit_s": SILENCE_LIMIT_S,
            "heartbeat_s": HEARTBEAT_S,
            **options,
        }
    )
    async with running(*nodes), aiohttp.ClientSession() as http:
        key_file = options.get("api_key_file")
        failures: list[BaseException] = []
        key_store = ApiKeyStore(key_file and Path(key_file), api_key)
        router = Router(settings, keys, text, Background(failures.append), key_store)
        await router.start(listen("--http-port", "127.0.0.1", port))
        try:
            if router.embedded is not None:
                for node in nodes:
                    await router.embedded.announce(node.entry, LEASE_S)
            if wait_ready and nodes:
                await until(lambda: sum(router.fleet.connected_by_role().values()) == len(nodes))
                await until(lambda: not router.fleet.not_ready_reasons())
                await until(lambda: all(_has_spoken(router, node) for node in nodes))
            address = f"127.0.0.1:{grpc_port}"
            under_test = RouterUnderTest(router, f"http://127.0.0.1:{port}", address, keys, http, failures)
            yield under_test
            for client in under_test.clients:
                await client.close()
            assert not failures, failures
        finally:
            await router.close()
