"""Decant beside vLLM's CPU build, alternating runs on one machine: `python -m bench.peer --peer-venv DIR --model DIR`.

Two comparisons, same fp32 model, same prompts, greedy, prefix cache off, one compute thread a process, never at once:

- `one`: a Decant router and one decode node alone, against one vLLM server; each computes on core 0 (vLLM binds its compute
  thread there and may use the other core for the rest; of Decant only the router may);
- `pd`:  router, prefill node and decode node, against vllm-router with a NixlConnector pair; prefill on core 0, decode on core 1.

Prints a table and writes every run as JSON. Ratios are Decant over peer: of tokens/s larger is better, of times smaller is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.ports import free_port
from bench.processes import System, system
from bench.streams import Figures, run_streams
from bench.transfer import DECANT, VLLM, in_words, measure_transfers
from foundation.keys import draw_master_keys, write_key_file

STREAMS = (1, 4, 16)
NO_CACHE, CACHE = "--no-enable-prefix-caching", "--enable-prefix-caching"
IDLE_S = 10.0
MOVED_TOKENS, MOVED_PROMPTS = 512, 5
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,self,sm",
}
DECANT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self,sm"}


@dataclass(frozen=True, slots=True)
class Running:
    """A system that answers: where clients ask, and whose /metrics count the transfers that arrive."""

    url: str
    decode_url: str
    system: System


def start_vllm_server(peer: System, venv: Path, model: Path, name: str, core: str, extra: list[str]) -> str:
    """Start one vLLM server whose compute thread is bound to `core`; returns its base URL."""
    port = free_port()
    command = [str(venv / "bin/vllm"), "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"]
    command += ["--enforce-eager", *extra]
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_CPU_OMP_THREADS_BIND": core}
    peer.start(name, command, "0,1", VLLM_ENVIRONMENT | side_channel)
    return f"http://127.0.0.1:{port}"


@contextmanager
def vllm_one(venv: Path, model: Path, logs: Path) -> Iterator[Running]:
    with system(logs) as peer:
        url = start_vllm_server(peer, venv, model, "vllm", "0", [NO_CACHE])
        peer.await_answer(f"{url}/health", 300)
        yield Running(url, url, peer)


@contextmanager
def vllm_pd(
    venv: Path, model: Path, logs: Path, prefill_cache: str = NO_CACHE, load_failure_policy: str = "fail"
) -> Iterator[Running]:
    """`load_failure_policy`: what decode does about KV that does not come, "fail" or "recompute"."""

    def role(kv_role: str) -> list[str]:
        connector = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        return ["--kv-transfer-config", json.dumps(connector | {"kv_load_failure_policy": load_failure_policy})]

    with system(logs) as peer:
        prefill = start_vllm_server(peer, venv, model, "vllm-prefill", "0", [prefill_cache, *role("kv_producer")])
        decode = start_vllm_server(peer, venv, model, "vllm-decode", "1", [NO_CACHE, *role("kv_consumer")])
        for url in (prefill, decode):
            peer.await_answer(f"{url}/health", 300)
        port = free_port()
        command = [str(venv / "bin/vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", str(port)]
        peer.start("vllm-router", command, "0,1", VLLM_ENVIRONMENT)
        peer.await_answer(f"http://127.0.0.1:{port}/v1/models", 60)
        yield Running(f"http://127.0.0.1:{port}", decode, peer)


@contextmanager
def decant(
    model: Path, logs: Path, prefill_core: str | None, decode_core: str, prefill_cache: str = NO_CACHE
) -> Iterator[Running]:
    """Router and decode node, and a prefill node when it is given a core."""
    key = logs / "master.key"
    http_port, grpc_port = free_port(), free_port()
    with system(logs) as ours:
        key.unlink(missing_ok=True)
        write_key_file(key, draw_master_keys())
        base = [sys.executable, "-m", "decant"]
        shared = ["--model", str(model), "--served-model-name", "m"]
        keys = ["--key-file", str(key)]
        router = [*base, "router", *shared, *keys, "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        ours.start("router", router, "0,1", DECANT_ENVIRONMENT)

        def start_node(role: str, core: str, cache: str) -> str:
            node_port = free_port()
            ports = ["--control-port", str(free_port()), "--data-port", str(free_port())]
            ports += ["--http-port", str(node_port), "--registry", f"127.0.0.1:{grpc_port}"]
            limits = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"]
            command = [*base, role, *shared, *(keys if role == "prefill" else ()), *ports, *limits, cache]
            ours.start(role, command, core, DECANT_ENVIRONMENT)
            return f"http://127.0.0.1:{node_port}"

        if prefill_core is not None:
            start_node("prefill", prefill_core, prefill_cache)
        decode_url = start_node("decode", decode_core, NO_CACHE)
        nodes = 1 if prefill_core is None else 2

        def all_usable(health: bytes) -> bool:
            usable = [node["link"] == "ready" and not node["refusal"] for node in json.loads(health)["nodes"]]
            return usable.count(True) == nodes

        ours.await_answer(f"http://127.0.0.1:{http_port}/health", 120, all_usable)
        yield Running(f"http://127.0.0.1:{http_port}", decode_url, ours)


Starter = Callable[[Path], AbstractContextManager[Running]]


def idle_cores(under_test: System) -> dict[str, float]:
    """Share of a core that each process uses while nobody asks anything."""
    time.sleep(1.0)
    before = under_test.cpu_seconds()
    time.sleep(IDLE_S)
    return {name: round((used - before[name]) / IDLE_S, 4) for name, used in under_test.cpu_seconds().items()}


def transfers_in_words(venv: Path, model: Path, output: Path) -> str:
    prompts = make_prompts(MOVED_PROMPTS, MOVED_TOKENS, seed=7)
    with decant(model, output / "transfer-decant", "0", "1", CACHE) as ours:
        own = in_words(measure_transfers(ours.url, ours.decode_url, DECANT, prompts))
    with vllm_pd(venv, model, output / "transfer-vllm", CACHE) as peer:
        theirs = in_words(measure_transfers(peer.url, peer.decode_url, VLLM, prompts))
    return f"{MOVED_TOKENS} tokens computed before: Decant, Ask to commit: {own}; vLLM, NIXL post + transfer: {theirs}"


def make_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Distinct prompts of random ids well inside the vocabulary: no prefix is shared."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(tokens)] for _ in range(count)]


def measure(url: str, streams: int, arguments: argparse.Namespace, seed: int) -> Figures:
    warm_up = make_prompts(streams, 32, seed + 1)
    asyncio.run(run_streams(url, "m", warm_up, streams, 4))
    prompts = make_prompts(max(4, 2 * streams), arguments.prompt_tokens, seed)
    return asyncio.run(run_streams(url, "m", prompts, streams, arguments.output_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-venv", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--comparison", choices=("one", "pd"), action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path("build/bench-peer"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    venv, model, output = arguments.peer_venv, arguments.model, arguments.output
    starters: dict[str, tuple[Starter, Starter]] = {
        "one": (lambda logs: decant(model, logs, None, "0"), lambda logs: vllm_one(venv, model, logs)),
        "pd": (lambda logs: decant(model, logs, "0", "1"), lambda logs: vllm_pd(venv, model, logs)),
    }
    runs: list[dict[str, object]] = []
    compared = arguments.comparison or ("one", "pd")
    idle: dict[str, dict[str, float]] = {}
    for comparison in compared:
        for round_number in range(arguments.rounds):
            for who, starter in zip(("decant", "vllm"), starters[comparison], strict=True):
                logs = output / f"{comparison}-{who}-{round_number}"
                with starter(logs) as running:
                    for streams in STREAMS:
                        figures = measure(running.url, streams, arguments, seed=1000 * round_number + streams)
                        runs.append({"comparison": comparison, "system": who, "round": round_number, **asdict(figures)})
                        sys.stderr.write(json.dumps(runs[-1]) + "\n")
                    idle[f"{comparison} {who}"] = idle_cores(running.system)
    moved = transfers_in_words(venv, model, output) if "pd" in compared else ""
    machine = f"{platform.machine()}, {_cpu_model()}"
    (output / "runs.json").write_text(
        json.dumps(
            {"machine": machine, "when": time.strftime("%F"), "runs": runs, "idle": idle, "moved": moved}, indent=1
        )
    )
    sys.stdout.write(f"{table(runs)}\n\nidle cores: {json.dumps(idle)}\n{moved}\nmachine: {machine}\n")


def table(runs: list[dict[str, object]]) -> str:
    """Medians over the rounds and their ratios, as a Markdown table."""
    columns = ("output_tokens_per_s", "ttft_p50_s", "itl_p50_s")
    lines = ["| comparison | streams | " + " | ".join(f"{c} decant / vllm = ratio" for c in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for comparison, streams in sorted({(str(run["comparison"]), int(str(run["streams"]))) for run in runs}):
        cells = []
        for column in columns:
            ours, peers = (
                statistics.median(
                    float(str(run[column]))
                    for run in runs
                    if (run["comparison"], run["streams"], run["system"]) == (comparison, streams, who)
                )
                for who in ("decant", "vllm")
            )
            cells.append(f"{ours:.3f} / {peers:.3f} = {ours / peers:.2f}")
        lines.append(f"| {comparison} | {streams} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
