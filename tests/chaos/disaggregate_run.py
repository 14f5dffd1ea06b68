# ruff: noqa: T201 - a verb that prints its figures
"""Disaggregation by choice on real processes: `make bench-disaggregate [ARGS="--rounds 3"]` (root).

One prefill and one decode node with the real model in float32, each on a core and a host of its own, behind three routers at
once: `--disaggregate` auto, always and never. What is checked (exit code 1 otherwise):

- `idle`: nobody else is served. Whatever auto chooses, its stream must run as early as that of the better of the other two;
- `busy`: D decodes streams; auto computes prompts on P;
- `slow link`: D decodes streams and P's link carries 10 Mbit/s; auto computes prompts on D once the link has been measured;
- `mixed`: long and short prompts and answers from several clients, the same for each router, in alternating rounds; auto's mean
  time to the second token and to the whole answer are at most 1.1 times those of the better of always and never, on either link.

A stream runs from its second token on: the first one travels ahead of the KV, so that over a slow link it would come early and
then nothing for seconds. It is printed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from chaos_models import served_model
from chaos_network import Network, free_number, why_not_possible
from decant_proto.v1 import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from pd_nodes import Metrics
from pd_router_client import attached

from bench.processes import System, system
from foundation.keys import draw_master_keys, write_key_file

POLICIES = ("auto", "always", "never")
ROUTERS, PREFILL, DECODE = "routers", "prefill", "decode"
SLOW_MEGABITS = 10
JUDGED = ("second_token_s", "whole_s")
WORSE_ALLOWED = 1.1
PROBES, PROBE_TOKENS = 6, 256
BACKGROUND_STREAMS, BACKGROUND_TOKENS = 4, 600
START_LIMIT_S = 180.0
ANSWER_LIMIT_S = 300.0
LEASE_MS = 3_600_000
LOCAL, REMOTE = "decode_is_faster", "prefill_is_faster"


@dataclass(frozen=True)
class Request:
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Timed:
    """Seconds from the question to the first token, the second, and the end."""

    first_token_s: float
    second_token_s: float
    whole_s: float


@dataclass(frozen=True)
class Load:
    """One mixed load: requests in order, asked by so many clients."""

    name: str
    clients: int
    requests: tuple[Request, ...]


class Cluster:
    def __init__(self, found: System, network: Network, folder: Path, model: Path, cores: Sequence[str]) -> None:
        self.network = network
        self._found = found
        key_file = folder / "keys"
        write_key_file(key_file, draw_master_keys())
        self._folder, self._model, self._key_file, self._cores = folder, model, key_file, cores
        self.http: dict[str, str] = {}
        self.grpc: dict[str, str] = {}

    def start(self) -> None:
        every_core = ",".join(self._cores)
        for index, policy in enumerate(POLICIES):
            options = (f"--disaggregate={policy}", f"--http-port={8000 + index}", f"--grpc-port={9000 + index}")
            self._start(policy, "router", ROUTERS, every_core, *options)
            address = self.network.address(ROUTERS)
            self.http[policy], self.grpc[policy] = f"http://{address}:{8000 + index}", f"{address}:{9000 + index}"
        registry = self.grpc[POLICIES[0]]
        limits: tuple[str, ...] = (
            "--dtype=float32",
            "--max-model-len=1024",
            "--max-num-seqs=16",
            "--max-num-batched-tokens=256",
        )
        limits += ("--no-enable-prefix-caching", "--slot-bytes=1MiB", "--staging-bytes=32MiB", "--silence-limit-s=10")
        for index, role in enumerate((PREFILL, DECODE)):
            own = (f"--registry={registry}", f"--node-id={role}")
            ports = ("--control-port=7100", "--data-port=7101", "--http-port=7102")
            self._start(role, role, role, self._cores[index % len(self._cores)], *ports, *own, *limits)
            self.http[role] = f"http://{self.network.address(role)}:7102"
        for role in (PREFILL, DECODE):
            self._found.await_answer(f"{self.http[role]}/health", START_LIMIT_S)

    def _start(self, name: str, role: str, host: str, core: str, *options: str) -> None:
        command = [*self.network.command(host), sys.executable, "-m", "decant", role, f"--model={self._model}"]
        command += [f"--host={self.network.address(host)}", "--log-format=json", *options]
        if role != DECODE:
            command.append(f"--key-file={self._key_file}")
        environment = {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
        self._found.start(name, command, core, environment)

    async def introduce(self) -> None:
        """The nodes announce themselves to the first router; the others are told."""
        for role in (PREFILL, DECODE):
            async with attached(f"{self.network.address(role)}:7100") as client:
                entry = client.hello.entry
            for policy in POLICIES:
                async with grpc.aio.insecure_channel(self.grpc[policy]) as channel:
                    stub: registry_pb2_grpc.RegistryAsyncStub = registry_pb2_grpc.RegistryStub(channel)
                    await stub.Announce(
                        registry_pb2.AnnounceRequest(entry=entry, lease_ms=LEASE_MS), wait_for_ready=True
                    )
        for policy in POLICIES:
            await asyncio.to_thread(
                self._found.await_answer, f"{self.http[policy]}/health", START_LIMIT_S, _both_usable
            )

    async def placements(self, policy: str) -> Counter[str]:
        body = await asyncio.to_thread(_get, f"{self.http[policy]}/metrics")
        return Counter({reason: round(n) for reason, n in Metrics(body).nonzero("placements_total").items()})

    async def lane_megabytes_per_second(self) -> float:
        body = await asyncio.to_thread(_get, f"{self.http[DECODE]}/metrics")
        speeds = [float(line.rsplit(" ", 1)[1]) for line in body.splitlines() if line.startswith(LANE_METRIC)]
        return 1000 * max(speeds, default=0.0)


LANE_METRIC = "decant_kv_lane_gigabytes_per_second{"


def _both_usable(health: bytes) -> bool:
    return sum(node["refusal"] is None for node in json.loads(health)["nodes"]) == 2


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as answer:
        return str(answer.read().decode())


class Client:
    """Asks greedy questions of random tokens, so that nothing is ever cached."""

    def __init__(self, channel: grpc.aio.Channel, vocabulary: int, chance: random.Random) -> None:
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._vocabulary = vocabulary
        self._chance = chance

    async def ask(self, request: Request) -> Timed:
        prompt = self._chance.choices(range(self._vocabulary), k=request.prompt_tokens)
        sampling = inference_pb2.SamplingOptions(temperature=0, max_tokens=request.answer_tokens, ignore_eos=True)
        message = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
        begun = time.perf_counter()
        tokens_s: list[float] = []
        responses: AsyncIterable[inference_pb2.GenerateResponse] = self._stub.Generate(message, timeout=ANSWER_LIMIT_S)
        async for response in responses:
            tokens_s += [time.perf_counter() - begun] * len(response.tokens)
        return Timed(tokens_s[0], tokens_s[1], time.perf_counter() - begun)

    async def run(self, load: Load) -> list[Timed]:
        waiting = iter(load.requests)
        timed: list[Timed] = []

        async def one_client() -> None:
            for request in waiting:
                timed.append(await self.ask(request))  # noqa: PERF401  (one after another)

        await asyncio.gather(*(one_client() for _ in range(load.clients)))
        return timed


class Trial:
    """`clients` by policy."""

    def __init__(self, cluster: Cluster, clients: dict[str, Client]) -> None:
        self.broken: list[str] = []
        self._cluster = cluster
        self._clients = clients

    async def warm_up(self) -> None:
        """Every node's speed and the lane get measured."""
        for policy in ("never", "always"):
            for _ in range(2):
                await self._clients[policy].ask(Request(PROBE_TOKENS, 4))

    async def chosen(self, requests: Sequence[Request]) -> tuple[Counter[str], list[Timed]]:
        """How auto placed these, one after another."""
        before = await self._cluster.placements("auto")
        timed = [await self._clients["auto"].ask(request) for request in requests]
        return await self._cluster.placements("auto") - before, timed

    @contextlib.asynccontextmanager
    async def busy_decode_node(self) -> AsyncIterator[None]:
        """Streams that run on D while this lasts."""
        asking = [
            asyncio.create_task(self._clients["never"].ask(Request(16, BACKGROUND_TOKENS)))
            for _ in range(BACKGROUND_STREAMS)
        ]
        try:
            while (await self._metrics(DECODE)).value("requests_running") < BACKGROUND_STREAMS:
                await asyncio.sleep(0.05)
            yield
            over = sum(task.done() for task in asking)
            if over:
                self.broken.append(f"{over} of the streams that were to keep D busy had ended")
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _metrics(self, role: str) -> Metrics:
        return Metrics(await asyncio.to_thread(_get, f"{self._cluster.http[role]}/metrics"))

    async def choice(self, what: str, wanted: str, requests: int) -> None:
        chosen, timed = await self.chosen([Request(PROBE_TOKENS, 4)] * requests)
        first_s = statistics.median(one.first_token_s for one in timed)
        print(f"{what}: auto chose {dict(chosen)}, first token after {first_s:.3f} s in the median", flush=True)
        if chosen[wanted] < requests:
            self.broken.append(f"{what}: auto should have said {wanted} {requests} times: {dict(chosen)}")

    async def compare(self, load: Load, what: str, rounds: int) -> None:
        found: dict[str, list[Timed]] = {policy: [] for policy in POLICIES}
        for number in range(rounds):
            for policy in POLICIES[number % len(POLICIES) :] + POLICIES[: number % len(POLICIES)]:
                found[policy] += await self._clients[policy].run(load)
        for name in ("first_token_s", *JUDGED):
            means = {policy: statistics.fmean(getattr(one, name) for one in timed) for policy, timed in found.items()}
            ratio = means["auto"] / min(means["always"], means["never"])
            figures = ", ".join(f"{policy} {seconds:.3f}" for policy, seconds in means.items())
            print(f"{load.name}, {what}: mean {name}: {figures}; auto over the better {ratio:.2f}", flush=True)
            if name in JUDGED and ratio > WORSE_ALLOWED:
                self.broken.append(
                    f"{load.name}, {what}: auto's {name} is {ratio:.2f} times the better of always and never"
                )


def mixed_load(chance: random.Random, requests: int, clients: int) -> Load:
    drawn = [Request(chance.choice((24, 96, 384)), chance.choice((4, 16, 48))) for _ in range(requests)]
    return Load(f"mixed load of {clients} clients", clients, tuple(drawn))


async def trial(cluster: Cluster, vocabulary: int, rounds: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    await cluster.introduce()
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for policy in POLICIES:
            channel = grpc.aio.insecure_channel(cluster.grpc[policy], options=(("grpc.enable_http_proxy", 0),))
            clients[policy] = Client(await stack.enter_async_context(channel), vocabulary, chance)
        run = Trial(cluster, clients)
        await run.warm_up()
        print(f"lane: {await cluster.lane_megabytes_per_second():.0f} MB/s at pairing", flush=True)
        await run.compare(Load("one idle client", 1, (Request(PROBE_TOKENS, 8),) * PROBES), "fast link", rounds)
        async with run.busy_decode_node():
            await run.choice("busy D, fast link", REMOTE, PROBES)
        await run.compare(mixed_load(chance, 24, 4), "fast link", rounds)
        await asyncio.to_thread(cluster.network.throttle, PREFILL, SLOW_MEGABITS)
        await clients["always"].ask(Request(PROBE_TOKENS, 4))  # measures the link as it is now
        async with run.busy_decode_node():
            await run.choice(f"busy D, {SLOW_MEGABITS} Mbit/s", LOCAL, PROBES)
        await run.compare(mixed_load(chance, 8, 2), f"{SLOW_MEGABITS} Mbit/s", rounds)
    return run.broken


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", default="0,1", help="the prefill node gets the first, the decode node the second")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs, kept")
    options = parser.parse_args(arguments)
    if (reason := why_not_possible()) is not None:
        print(f"links cannot be throttled here: {reason}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decant-disaggregate-")))
        network = stack.enter_context(Network((ROUTERS, PREFILL, DECODE), free_number()))
        model = served_model("real", folder)
        found = stack.enter_context(system(folder))
        cluster = Cluster(found, network, folder, model.folder, options.cores.split(","))
        cluster.start()
        broken = asyncio.run(trial(cluster, model.vocabulary, options.rounds, options.seed))
    for told in broken:
        print(f"BROKEN {told}")
    print(f"disaggregation by choice: {len(broken)} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
