"""The router's price: one router process in front of a node that answers at once. `python -m bench.router --model DIR`.

- `whole`: answers of one token, not streamed; time at one client, requests a second at 32.
- `stream`: 16 streams at once, one message a step with a token of each, detokenization included; events a second, and time to
  the first at one client. A router that is slower than its node puts several tokens into one event: tokens a second says so.
- `memory`: resident memory of the router as requests go by.

The node's share (a gRPC round trip and its Python) is in all figures; `added` is a whole answer less a round trip of this
process straight to the node. The client speaks HTTP over plain sockets, so that it costs as little as it can. Prints a table and
writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.instant_node import round_trips
from bench.ports import free_ports
from bench.processes import System, system
from foundation.keys import draw_master_keys, write_key_file
from router.tokenizer import ModelText

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
CLIENTS, STREAMS, STREAM_TOKENS, STREAMED_ANSWERS = 32, 16, 256, 16
WARM_UP = 200

Straight = Callable[[int], Awaitable[list[float]]]
"""Seconds of so many answers of one token without a router, one after another."""


@dataclass(frozen=True, slots=True)
class Prices:
    whole_p50_ms: float
    whole_p99_ms: float
    added_p50_ms: float
    requests_per_s: float
    events_per_s: float
    tokens_per_s: float
    longest_gap_ms: float
    """Longest time that one of the streams went without an event."""
    first_event_p50_ms: float
    router_cpu_us_a_request: float
    """What the router's process itself used, which others on the machine disturb least: 1,000 us are 1,000 requests/s a core."""
    router_cpu_us_an_event: float
    requests: int
    memory_growth_mib: float
    cores: int
    load_average: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer: seconds to its first event, longest time between reads, and events with a choice."""

    first_s: float
    longest_gap_s: float
    events: int


class Connection:
    """One kept-alive HTTP connection."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    def _send(self, max_tokens: int, *, stream: bool) -> None:
        fields = {
            "model": self._model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "stream": stream,
            "ignore_eos": True,
        }
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + body)

    async def whole(self) -> float:
        """Seconds of one answer of one token."""
        begun = time.perf_counter()
        self._send(1, stream=False)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await self._reader.readexactly(length)
        return time.perf_counter() - begun

    async def stream(self, tokens: int) -> Streamed:
        begun = time.perf_counter()
        self._send(tokens, stream=True)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        first_s, longest_gap_s, events, tail = 0.0, 0.0, 0, b""
        heard = time.perf_counter()
        while not tail.endswith(b"0\r\n\r\n"):
            data = await self._reader.read(1 << 16)
            assert data, "the stream was cut"
            now = time.perf_counter()
            first_s, longest_gap_s, heard = first_s or now - begun, max(longest_gap_s, now - heard), now
            events += data.count(b"data: {")
            tail = (tail + data)[-8:]
        return Streamed(first_s, longest_gap_s, events)

    def close(self) -> None:
        self._writer.close()


async def measure(port: int, model: str, found: System, requests: int, straight: Straight) -> Prices:
    router_pid = found.processes["router"].pid
    one = await Connection(port, model).open()
    for _ in range(WARM_UP):
        await one.whole()
    singles = sorted([await one.whole() for _ in range(min(requests, 1000))])
    straight_s = statistics.median((await straight(WARM_UP + 1000))[WARM_UP:])
    firsts = [(await one.stream(2)).first_s for _ in range(200)]
    one.close()

    many = [await Connection(port, model).open() for _ in range(CLIENTS)]
    before_mib, before_cpu_s, begun = _resident_mib(router_pid), found.cpu_seconds()["router"], time.perf_counter()

    async def ask(connection: Connection, count: int) -> None:
        for _ in range(count):
            await connection.whole()

    await asyncio.gather(*(ask(connection, requests // CLIENTS) for connection in many))
    asked = requests // CLIENTS * CLIENTS
    requests_per_s = asked / (time.perf_counter() - begun)
    whole_cpu_s = found.cpu_seconds()["router"] - before_cpu_s
    growth_mib = _resident_mib(router_pid) - before_mib

    before_cpu_s, begun = found.cpu_seconds()["router"], time.perf_counter()
    answers = await asyncio.gather(*(_streams(connection, STREAMED_ANSWERS) for connection in many[:STREAMS]))
    streaming_s = time.perf_counter() - begun
    streamed = [answer for answers_of_one in answers for answer in answers_of_one]
    events = sum(answer.events for answer in streamed)
    stream_cpu_s = found.cpu_seconds()["router"] - before_cpu_s
    for connection in many:
        connection.close()
    return Prices(
        whole_p50_ms=1000 * statistics.median(singles),
        whole_p99_ms=1000 * singles[len(singles) * 99 // 100],
        added_p50_ms=1000 * (statistics.median(singles) - straight_s),
        requests_per_s=requests_per_s,
        events_per_s=events / streaming_s,
        tokens_per_s=STREAM_TOKENS * len(streamed) / streaming_s,
        longest_gap_ms=1000 * max(answer.longest_gap_s for answer in streamed),
        first_event_p50_ms=1000 * statistics.median(firsts),
        router_cpu_us_a_request=1e6 * whole_cpu_s / asked,
        router_cpu_us_an_event=1e6 * stream_cpu_s / events,
        requests=requests,
        memory_growth_mib=growth_mib,
        cores=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
    )


async def _streams(connection: Connection, count: int) -> list[Streamed]:
    return [await connection.stream(STREAM_TOKENS) for _ in range(count)]


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def start(found: System, folder: Path, model: Path, cores: str) -> tuple[int, int]:
    """Router and node; the router's HTTP port and the node's."""
    http_port, grpc_port, node_port = free_ports(3)
    write_key_file(folder / "key", draw_master_keys())
    command = [sys.executable, "-m", "decant", "router", f"--model={model}", f"--key-file={folder / 'key'}"]
    command += [
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        "--log-level=warning",
        "--served-model-name=bench",
    ]
    found.start("router", command, cores, {})
    fingerprint = ModelText.from_folder(model).fingerprint or ""
    node = [
        sys.executable,
        "-m",
        "bench.instant_node",
        f"--registry=127.0.0.1:{grpc_port}",
        f"--tokenizer={fingerprint}",
        f"--together={STREAMS}",
        f"--port={node_port}",
    ]
    found.start("node", node, cores, {})
    found.await_answer(f"http://127.0.0.1:{http_port}/health", 60)
    return http_port, node_port


def straight_to(node_port: int) -> Straight:
    return lambda count: round_trips(f"127.0.0.1:{node_port}", len(PROMPT) // 4, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder with a tokenizer; nothing else of it is used"
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--cores", default=",".join(map(str, sorted(os.sched_getaffinity(0)))), help="taskset's list")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, system(Path(scratch)) as found:
        port, node_port = start(found, Path(scratch), asked.model, asked.cores)
        prices = uvloop.run(measure(port, "bench", found, asked.requests, straight_to(node_port)))
    for name, value in asdict(prices).items():
        sys.stdout.write(f"{name:>24} {value:12.2f}\n")
    if asked.out is not None:
        asked.out.write_text(json.dumps(asdict(prices), indent=1))


if __name__ == "__main__":
    main()
