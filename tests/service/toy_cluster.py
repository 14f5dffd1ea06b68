"""A router, prefill and decode nodes of the toy model as real processes that find one another through the router's registry."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from forked_decant import ForkedDecant
from pd_nodes import NodeProcess, eventually, inherited, json_lines, start_node
from pd_world import SMALL

from bench.ports import free_ports
from engine.model.toy import write_toy_folder
from foundation.keys import draw_master_keys, write_key_file

START_LIMIT_S = 180.0


@dataclass
class ToyCluster:
    nodes: dict[str, NodeProcess]
    router: ForkedDecant
    http_port: int
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def log(self) -> list[dict[str, Any]]:
        return json_lines(self.log_path)

    def usable(self) -> set[str]:
        """Names of the nodes to which the router gives work."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                body = answer.read()
        except urllib.error.HTTPError as refused:
            body = refused.read()
        except OSError:
            return set()
        return {node["node"] for node in json.loads(body)["nodes"] if node["refusal"] is None}

    async def complete(self, prompt: list[int], max_tokens: int = 4, headers: Mapping[str, str] | None = None) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return await answer.json()

    def end(self) -> None:
        for node in self.nodes.values():
            node.end()
        if self.router.poll() is None:
            self.router.kill()
            self.router.wait(10)


@asynccontextmanager
async def toy_cluster(
    folder: Path,
    roles: Mapping[str, str],
    *options: str,
    faults: Mapping[str, str] = MappingProxyType({}),
    own_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> AsyncIterator[ToyCluster]:
    """`roles`: name -> prefill or decode. `options`: of every process, `own_options` of one node. `faults`: name ->
    what kv_transfer/faults.py says."""
    model, key_file = write_toy_folder(folder / "toy"), folder / "keys"
    write_key_file(key_file, draw_master_keys())
    http_port, grpc_port = free_ports(2)
    log_path = folder / "router.log"
    settings = {
        "model": model,
        "key-file": key_file,
        "http-port": http_port,
        "grpc-port": grpc_port,
        "log-format": "json",
    }
    arguments = ["router", *(f"--{key}={value}" for key, value in settings.items()), *options]
    cluster = ToyCluster({}, ForkedDecant(arguments, inherited(), log_path), http_port, log_path)
    try:
        for name, role in roles.items():
            own = (f"--registry=127.0.0.1:{grpc_port}", f"--node-id={name}", *own_options.get(name, ()))
            harm = faults.get(name, "")
            cluster.nodes[name] = start_node(
                role, folder, model, key_file, *SMALL, *own, *options, faults=harm, lanes="tcp"
            )

        async def all_usable() -> bool:
            for node in cluster.nodes.values():
                assert node.process.poll() is None, f"{node.name} ended:\n{node.log()[-3000:]}"
            assert cluster.router.poll() is None, log_path.read_text()[-3000:]
            return await asyncio.to_thread(cluster.usable) == set(roles)

        await eventually(all_usable, START_LIMIT_S, f"the router gives work to {sorted(roles)}")
        yield cluster
    finally:
        cluster.end()
