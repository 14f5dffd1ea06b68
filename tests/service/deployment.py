"""Real routers, prefill nodes and decode nodes with the real model, over UCX on TCP, as tests of the whole system share them.

A node is started when it is first asked for, and serves until the tests end. No node finds a registry: a test tells each
router which nodes exist, so that one set of nodes serves many pairings, each behind a router of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import grpc.aio
from decant_proto.v1 import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from pd_nodes import Metrics, NodeProcess, eventually, fresh_interpreter, inherited, start_node, until_ready
from pd_router_client import attached

from bench.ports import free_ports
from foundation.keys import draw_master_keys, write_key_file

TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
"""KV of one token of SmolLM2-135M in float32."""
SILENCE_LIMIT_S = 10.0
"""Long enough for a test to look around while a parcel is held back, on a busy machine too."""
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 300.0
REST_LIMIT_S = 30.0
STATED_LEASE_MS = 3_600_000

COMMON = (
    "--dtype=float32",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=256",
    f"--silence-limit-s={SILENCE_LIMIT_S}",
    "--staging-bytes=64MiB",
)
WHOLE_BLOCKS_A_PARCEL = "--slot-bytes=2MiB"
"""A parcel is one block of 32 positions, with all layers and heads."""


@dataclass(frozen=True)
class NodeKind:
    role: str
    block_size: int
    options: tuple[str, ...] = ()
    faults: str = ""
    caches: bool = False
    kv_cache: str = "256MiB"

    def arguments(self) -> tuple[str, ...]:
        caching = "" if self.caches else "no-"
        return (
            *COMMON,
            f"--block-size={self.block_size}",
            f"--{caching}enable-prefix-caching",
            f"--kv-cache-memory-bytes={self.kv_cache}",
            *self.options,
        )


SHARDED = ("--tensor-parallel-size=3", "--kv-head-order=NHD")
"""Three shards of one head each."""


TIMELINE = "--log-level=debug"
"""The log tells when KV was computed, and when each parcel was gathered, sent, landed and scattered."""
SMALL_SLOT_BYTES = 128 << 10
"""Cuts even one position into more than 8 parcels."""


def holding(parcels: int) -> NodeKind:
    return NodeKind("prefill", 16, (WHOLE_BLOCKS_A_PARCEL,), faults=f"hold_sends_from={parcels}")


KINDS = {
    "p": NodeKind("prefill", 16, caches=True, kv_cache="640MiB"),
    "d": NodeKind("decode", 32, (TIMELINE,)),
    "p3": NodeKind("prefill", 32, (*SHARDED, f"--slot-bytes={SMALL_SLOT_BYTES}", TIMELINE)),
    "d3": NodeKind("decode", 16, SHARDED, caches=True, kv_cache="640MiB"),
    "p-flips": NodeKind("prefill", 16, (WHOLE_BLOCKS_A_PARCEL,), faults="flip_byte_of_parcel=3"),
}
"""Nodes by name; those with a 3 hold their KV in shards. `p` and `d3` cache prefixes, the others forget."""


@dataclass(frozen=True)
class Generated:
    tokens: list[int]
    cached_tokens: int


@dataclass
class RouterProcess:
    """A router, and a client of it."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    log_path: Path
    _log: IO[bytes] = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Generated:
        """One greedy answer over gRPC; raises AioRpcError when the client would see an error."""
        async with self.channel() as channel:
            return await _generate(inference_pb2_grpc.InferenceStub(channel), prompt, max_tokens)

    async def generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int = 12
    ) -> list[Generated]:
        """Greedy answers, some of them computed at the same time."""
        turns = asyncio.Semaphore(at_once)
        async with self.channel() as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

            async def one(prompt: Sequence[int]) -> Generated:
                async with turns:
                    return await _generate(stub, prompt, max_tokens)

            return await asyncio.gather(*map(one, prompts))

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    def usable(self) -> set[str]:
        """Names of the nodes to which this router would give work."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                body = answer.read()
        except urllib.error.HTTPError as refused:
            body = refused.read()
        except OSError:
            return set()
        return {node["node"] for node in json.loads(body)["nodes"] if node["refusal"] is None}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._log.close()


async def _generate(stub: inference_pb2_grpc.InferenceAsyncStub, prompt: Sequence[int], max_tokens: int) -> Generated:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingOptions(temperature=0, max_tokens=max_tokens),
    )
    tokens, cached = [], 0
    responses: AsyncIterable[inference_pb2.GenerateResponse] = stub.Generate(request, timeout=ANSWER_LIMIT_S)
    async for response in responses:
        tokens += [token.token_id for token in response.tokens]
        cached = response.usage.cached_tokens
    return Generated(tokens, cached)


class Deployment:
    router_options: tuple[str, ...] = ()

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self._folder = folder
        self._key_file = folder / "keys"
        write_key_file(self._key_file, draw_master_keys())
        self._nodes: dict[str, NodeProcess] = {}
        self._routers: dict[str, RouterProcess] = {}

    def node(self, name: str) -> NodeProcess:
        return self._nodes[name]

    async def metrics(self, name: str) -> Metrics:
        return await self._nodes[name].metrics()

    async def router(self, *names: str) -> RouterProcess:
        """The router that gives work to exactly these nodes."""
        return await self.router_named("+".join(names), *names)

    async def router_named(self, name: str, *nodes: str, **kinds: NodeKind) -> RouterProcess:
        """The router of this name; it gets to know these nodes beside those it knows. `kinds`: of nodes not in KINDS."""
        kinds = KINDS | kinds
        for node in nodes:
            if node not in self._nodes:
                kind = kinds[node]
                self._nodes[node] = start_node(
                    kind.role,
                    self._folder,
                    self.model,
                    self._key_file,
                    *kind.arguments(),
                    faults=kind.faults,
                    lanes="tcp",
                    start=fresh_interpreter,
                )
        if name not in self._routers:
            self._routers[name] = self._start_router()
        router = self._routers[name]
        await until_ready(*(self._nodes[node] for node in nodes))
        wanted = {self._nodes[node].name for node in nodes}
        if not wanted <= await asyncio.to_thread(router.usable):
            await self._introduce(router, nodes)
        return router

    async def _introduce(self, router: RouterProcess, nodes: Sequence[str]) -> None:
        async with router.channel() as channel:
            stub: registry_pb2_grpc.RegistryAsyncStub = registry_pb2_grpc.RegistryStub(channel)
            for node in nodes:
                async with attached(self._nodes[node].control_address) as client:
                    entry = client.hello.entry
                request = registry_pb2.AnnounceRequest(entry=entry, lease_ms=STATED_LEASE_MS)
                await stub.Announce(request, wait_for_ready=True, timeout=START_LIMIT_S)
        wanted = {self._nodes[node].name for node in nodes}

        async def all_usable() -> bool:
            return wanted <= await asyncio.to_thread(router.usable)

        await eventually(all_usable, START_LIMIT_S, f"the router gives work to {sorted(wanted)}")

    def _start_router(self) -> RouterProcess:
        http_port, grpc_port = free_ports(2)
        log_path = self._folder / f"router-{grpc_port}.log"
        log = log_path.open("ab")
        arguments = {
            "model": self.model,
            "key-file": self._key_file,
            "http-port": http_port,
            "grpc-port": grpc_port,
            "silence-limit-s": SILENCE_LIMIT_S,
            "log-format": "json",
        }
        command = [sys.executable, "-m", "decant", "router", *(f"--{key}={value}" for key, value in arguments.items())]
        command += self.router_options
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=inherited())
        return RouterProcess(process, http_port, grpc_port, log_path, log)

    def end(self) -> None:
        for router in self._routers.values():
            router.end()
        for node in self._nodes.values():
            node.end()


class Spent:
    """What the counters of some nodes grew by between entering and leaving, each time once they rest: a prefill node may hear
    that its last parcel has left after the client has its answer.

    Counted quantities, by node: `moved` KV payload bytes at that end, `cached` prompt tokens found in the prefix cache,
    `stepped` tokens that went through the model.
    """

    def __init__(self, deployment: Deployment, *nodes: str) -> None:
        self._deployment = deployment
        self._nodes = nodes
        self._before: dict[str, Metrics] = {}
        self._after: dict[str, Metrics] = {}

    async def __aenter__(self) -> Spent:
        self._before = {node: await self._at_rest(node) for node in self._nodes}
        return self

    async def __aexit__(self, *_: object) -> None:
        self._after = {node: await self._at_rest(node) for node in self._nodes}

    async def _at_rest(self, node: str) -> Metrics:
        """The node's metrics when it holds no block, slot or request."""

        async def rests() -> bool:
            found = await self._deployment.metrics(node)
            held = found.blocks()["in_use"] + found.value("requests_running") + found.value("requests_waiting")
            return not held and set(found.nonzero("staging_slots")) <= {"free"}

        await eventually(rests, REST_LIMIT_S, f"{node} rests")
        return await self._deployment.metrics(node)

    def grown(self, node: str, name: str, **labels: str) -> int:
        grown = self._after[node].value(name, **labels) - self._before[node].value(name, **labels)
        return round(grown)

    def moved(self, node: str) -> int:
        return self.grown(node, "kv_transfer_bytes_total")

    def cached(self, node: str) -> int:
        return self.grown(node, "prefix_cached_tokens_total")

    def stepped(self, node: str) -> int:
        return self.grown(node, "step_tokens_sum")

    def before(self, node: str, name: str) -> float:
        return self._before[node].value(name)

    def failures(self, node: str) -> dict[str, int]:
        """Transfers that failed, by reason."""
        return self._by_label(node, "kv_transfer_failures_total")

    def local_prefills(self, node: str) -> dict[str, int]:
        """Prompts that the decode node computed itself, by reason."""
        return self._by_label(node, "local_prefill_total")

    def _by_label(self, node: str, name: str) -> dict[str, int]:
        before, after = self._before[node].nonzero(name), self._after[node].nonzero(name)
        grown = {label: round(count - before.get(label, 0)) for label, count in after.items()}
        return {label: count for label, count in grown.items() if count}
