"""Asks at given times, whatever becomes of earlier requests, and notes when each piece of an answer came.

Times are the client's: TTFT from the moment at which a request was due (a client that sends late must not hide it) to its
first event with text, TPOT the mean time between its tokens after the first. Errors are kept as text, never raised.

Must not know: nodes, what is good enough.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from bench.serving.workload import Arrival, Shape, prompt_of

READ_LIMIT_S = 30.0
"""Silence on a stream after which it counts as an error."""


@dataclass(slots=True)
class Served:
    """One request. `due_s` and `events_s` are on the clock of `time.perf_counter`, as is everything of one process."""

    shape: Shape
    due_s: float
    events_s: list[float] = field(default_factory=list)
    """Arrivals of events with text."""
    tokens: int = 0
    """As its usage says; 0 until it has ended well."""
    error: str = ""

    @property
    def complete(self) -> bool:
        return not self.error and self.tokens == self.shape.output_tokens and bool(self.events_s)

    @property
    def ttft_s(self) -> float:
        return self.events_s[0] - self.due_s if self.events_s else float("inf")

    @property
    def tpot_s(self) -> float:
        """Infinite for an answer that is not complete, 0 for one token."""
        if not self.complete:
            return float("inf")
        return (self.events_s[-1] - self.events_s[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def longest_gap_s(self) -> float:
        return max((late - early for early, late in zip(self.events_s, self.events_s[1:], strict=False)), default=0.0)


class Client:
    """Streams greedy completions of exactly the wanted number of tokens. Use as an async context."""

    def __init__(self, url: str, model: str, vocabulary_size: int) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._vocabulary_size = vocabulary_size

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_LIMIT_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def body(self, shape: Shape, prompt_seed: int) -> bytes:
        fields = {
            "model": self._model,
            "prompt": prompt_of(shape.prompt_tokens, prompt_seed, self._vocabulary_size),
            "max_tokens": shape.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()

    async def ask(self, shape: Shape, prompt_seed: int, due_s: float | None = None) -> Served:
        """Without `due_s` it is due now."""
        return await self.send(shape, self.body(shape, prompt_seed), due_s)

    async def send(self, shape: Shape, body: bytes, due_s: float | None = None, into: Served | None = None) -> Served:
        """`into`: where it is noted as it happens; otherwise in a new record."""
        served = into or Served(shape, 0.0)
        served.due_s = time.perf_counter() if due_s is None else due_s
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    served.error = f"{response.status}: {(await response.text())[:200]}"
                else:
                    await _read_events(response.content, served)
        except (aiohttp.ClientError, TimeoutError) as error:
            served.error = f"{type(error).__name__}: {error}"[:200]
        if not served.error and not served.complete:
            served.error = f"{served.tokens} of {shape.output_tokens} tokens in {len(served.events_s)} events"
        return served


async def _read_events(content: aiohttp.StreamReader, served: Served) -> None:
    """Only the last event is parsed: at thousands of events a second the client must not become the slowest part."""
    rest = b""
    async for chunk in content.iter_any():
        now_s = time.perf_counter()
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if b'"usage":{' in event:
                served.tokens = json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"]
            elif b'"error":' in event and b'"choices"' not in event:
                served.error = event[:200].decode(errors="replace")
            elif b'"text":' in event and b'"text":""' not in event:
                served.events_s.append(now_s)


async def run_arrivals(client: Client, arrivals: Sequence[Arrival], drain_s: float) -> list[Served]:
    """Send each when it is due and wait up to `drain_s` after the last for all to end; what has not ended then is cancelled
    and counts as an error. In the order of `arrivals`."""
    bodies = [client.body(arrival.shape, arrival.prompt_seed) for arrival in arrivals]
    records = [Served(arrival.shape, 0.0) for arrival in arrivals]
    tasks: list[asyncio.Task[Served]] = []
    begun_s = time.perf_counter()
    for arrival, body, record in zip(arrivals, bodies, records, strict=True):
        due_s = begun_s + arrival.at_s
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(client.send(arrival.shape, body, due_s, record)))
    if not tasks:
        return records
    _, pending = await asyncio.wait(tasks, timeout=drain_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for record, task in zip(records, tasks, strict=True):
        if task in pending:
            record.error = record.error or f"not ended {drain_s:.0f} s after the last arrival"
    return records
