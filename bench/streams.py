"""Closed-loop streaming load against any OpenAI-compatible endpoint: each stream asks again as soon as it is answered.

Times are taken at the client when a server-sent event is read. Definitions, the same for every server measured:
TTFT = request sent to first event with text; ITL = time between events divided over the tokens they carry (servers may send
several tokens in one event; counts come from the final usage); tokens/s = all output tokens over the wall time of the run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request. `events_s` are arrival times of events with text, since the request was sent."""

    events_s: tuple[float, ...]
    completion_tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        return self.events_s[0]

    @property
    def itl_s(self) -> float:
        """Mean time between tokens after the first; NaN for answers of one token."""
        if self.completion_tokens < 2:
            return float("nan")
        return (self.events_s[-1] - self.events_s[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's result."""

    streams: int
    answers: int
    output_tokens_per_s: float
    ttft_p50_s: float
    itl_p50_s: float


async def ask(
    session: aiohttp.ClientSession, base_url: str, model: str, prompt: Sequence[int], max_tokens: int
) -> Answer:
    """Stream one greedy completion of exactly `max_tokens` tokens. Raises RuntimeError on any HTTP or stream error."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    events: list[float] = []
    pieces: list[str] = []
    tokens = 0
    async with session.post(f"{base_url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{base_url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{base_url} sent an error event: {event['error']}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice["text"]:
                    events.append(time.perf_counter() - started)
                    pieces.append(choice["text"])
    if tokens != max_tokens or not events:
        raise RuntimeError(f"{base_url} answered {tokens} tokens in {len(events)} events, wanted {max_tokens}")
    return Answer(tuple(events), tokens, "".join(pieces))


async def run_streams(
    base_url: str, model: str, prompts: Sequence[Sequence[int]], streams: int, max_tokens: int
) -> Figures:
    """Answer all prompts with `streams` of them in flight at any time."""
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def one_stream(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            answer = await ask(session, base_url, model, prompt, max_tokens)
            answers.append(answer)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(one_stream(session))
        wall_s = time.perf_counter() - started
    return Figures(
        streams=streams,
        answers=len(answers),
        output_tokens_per_s=sum(answer.completion_tokens for answer in answers) / wall_s,
        ttft_p50_s=statistics.median(answer.ttft_s for answer in answers),
        itl_p50_s=statistics.median(answer.itl_s for answer in answers),
    )
