"""Decant's router beside vllm-router and sglang-router, one after another on one machine, before workers that answer at once.

`python -m bench.router_peers --model DIR [--vllm-router PATH] [--sglang-python PATH]`. The peers run in prefill/decode mode over
HTTP (`bench.instant_http`, one worker of each role), Decant over its own node protocol (`bench.instant_node`, prompts computed on
the decode node); the client is the same. `direct` is that client straight at the HTTP worker: a router adds the difference
to it. Both peers are written in Rust and use several threads, Decant's router is one Python process. `--out` gets JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

import uvloop

from bench import router
from bench.instant_http import MODEL
from bench.ports import free_port
from bench.processes import System, system
from bench.router import Connection, Prices, Straight, measure

READY_LIMIT_S = 60.0
ROWS = (
    ("whole_p50_ms", "answer of one token, p50 ms at 1 client"),
    ("whole_p99_ms", "the same, p99 ms"),
    ("added_p50_ms", "the same less one straight from a worker, p50 ms"),
    ("requests_per_s", f"answers/s at {router.CLIENTS} clients"),
    ("first_event_p50_ms", "first event, p50 ms at 1 client"),
    ("events_per_s", f"events/s over {router.STREAMS} streams"),
    ("tokens_per_s", "tokens/s in those events"),
    ("longest_gap_ms", "longest time without an event on one stream, ms"),
    ("router_cpu_us_a_request", "router's CPU us a request"),
    ("router_cpu_us_an_event", "router's CPU us an event"),
    ("memory_growth_mib", "router's memory growth, MiB"),
)

Running = tuple[int, System, Straight]
Starter = Callable[[Path, Path, str], AbstractContextManager[Running]]
"""(folder for logs, folder with a tokenizer, cores) -> (HTTP port, processes, answers without a router); what is measured is
called "router" among the processes."""


@contextmanager
def decant(folder: Path, model: Path, cores: str) -> Iterator[Running]:
    with system(folder) as found:
        port, node_port = router.start(found, folder, model, cores)
        yield port, found, router.straight_to(node_port)


def start_worker(found: System, name: str, cores: str) -> int:
    port = free_port()
    found.start(name, [sys.executable, "-m", "bench.instant_http", f"--port={port}"], cores, {})
    found.await_answer(f"http://127.0.0.1:{port}/health", READY_LIMIT_S)
    return port


def straight_to(port: int) -> Straight:
    """Answers of an HTTP worker."""

    async def round_trips(count: int) -> list[float]:
        connection = await Connection(port, MODEL).open()
        try:
            return [await connection.whole() for _ in range(count)]
        finally:
            connection.close()

    return round_trips


@contextmanager
def direct(folder: Path, model: Path, cores: str) -> Iterator[Running]:
    with system(folder) as found:
        port = start_worker(found, "router", cores)
        yield port, found, straight_to(port)


def peer(launch: Sequence[str], prefill_extra: Sequence[str]) -> Starter:
    """`launch`: the peer's command, without workers; `prefill_extra`: what follows the prefill worker's URL."""

    @contextmanager
    def starter(folder: Path, model: Path, cores: str) -> Iterator[Running]:
        with system(folder) as found:
            prefill, decode = (start_worker(found, name, cores) for name in ("prefill", "decode"))
            port, metrics_port = free_port(), free_port()
            command = [*launch, "--prefill", f"http://127.0.0.1:{prefill}", *prefill_extra]
            command += ["--decode", f"http://127.0.0.1:{decode}", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
            found.start("router", command, cores, {})
            found.await_answer(f"http://127.0.0.1:{port}/v1/models", READY_LIMIT_S)
            yield port, found, straight_to(decode)

    return starter


def vllm_router(binary: Path) -> Starter:
    return peer([str(binary), "--vllm-pd-disaggregation", "--kv-connector", "nixl"], ())


def sglang_router(python: Path) -> Starter:
    command = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--disable-circuit-breaker"]
    return peer(command, ("9001",))


def table(measured: dict[str, Prices]) -> str:
    names = list(measured)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for field, title in ROWS:
        values = [getattr(measured[name], field) for name in names]
        lines.append(f"| {title} | " + " | ".join(f"{value:,.2f}" for value in values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--vllm-router", type=Path, help="the peer's executable; left out when not given")
    parser.add_argument("--sglang-python", type=Path, help="python of an environment with sglang-router")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--cores", default=",".join(map(str, sorted(os.sched_getaffinity(0)))), help="taskset's list")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    starters: dict[str, Starter] = {"direct": direct, "decant": decant}
    if asked.vllm_router is not None:
        starters["vllm-router"] = vllm_router(asked.vllm_router)
    if asked.sglang_python is not None:
        starters["sglang-router"] = sglang_router(asked.sglang_python)
    measured: dict[str, Prices] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, starter in starters.items():
            with starter(Path(scratch) / name, asked.model, asked.cores) as (port, found, straight):
                measured[name] = uvloop.run(measure(port, MODEL, found, asked.requests, straight))
            sys.stderr.write(f"{name} measured\n")
    sys.stdout.write(table(measured) + "\n")
    if asked.out is not None:
        asked.out.write_text(json.dumps({name: asdict(prices) for name, prices in measured.items()}, indent=1))


if __name__ == "__main__":
    main()
