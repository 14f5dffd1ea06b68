"""An OpenAI-compatible worker that computes nothing, for other routers: every next token is there at once.

The HTTP twin of `bench.instant_node`: all running streams get one token a step, each in one event; the next step begins when the
event loop has come round. HTTP by hand over plain transports, so that the router in front is what is measured. It serves as a
regular, a prefill or a decode worker of vllm-router and sglang-router. `python -m bench.instant_http --port PORT`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from typing import Any

import uvloop

WORDS = tuple(f" word{index}" for index in range(97))
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODEL = "bench"
FACTS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}],
    "model_path": MODEL,
    "is_generation": True,
    "status": "ok",
}
"""The answer to every GET: what health checks and discovery of either router look for."""


class Stream:
    def __init__(self, connection: Connection, tokens: int) -> None:
        self.connection = connection
        self.left = tokens


class Stepper:
    """One step writes one event to each running stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: list[Stream] = []
        self._steps = 0

    def add(self, stream: Stream) -> None:
        if not self._running:
            self._loop.call_soon(self._step)
        self._running.append(stream)

    def _step(self) -> None:
        self._steps += 1
        word = WORDS[self._steps % len(WORDS)]
        going, last = _event(word, "null"), _event(word, '"length"') + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        still = []
        for stream in self._running:
            if stream.connection.paused:
                still.append(stream)
                continue
            stream.left -= 1
            stream.connection.write(going if stream.left else last)
            if stream.left:
                still.append(stream)
        self._running = [stream for stream in still if stream.connection.open]
        if self._running:
            self._loop.call_soon(self._step)


def _event(word: str, finish: str) -> bytes:
    text = (
        f'data: {{"id":"cmpl-1","object":"text_completion","created":1,"model":"{MODEL}","choices":[{{"index":0,"text":"{word}",'
        f'"logprobs":null,"finish_reason":{finish}}}]}}\n\n'
    )
    return _chunk(text.encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._received = b""
        self._transport: Any = None
        self.paused = False
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def write(self, data: bytes) -> None:
        if self.open:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            length = _content_length(head)
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._json(FACTS)
            return
        asked = json.loads(body or b"{}")
        if asked.get("stream"):
            self.write(STREAM_HEAD)
            self._stepper.add(Stream(self, int(asked.get("max_tokens") or 16)))
            return
        choice = {"index": 0, "text": WORDS[0], "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
        self._json({**answer, "usage": usage, "kv_transfer_params": {"remote_block_ids": [0], "remote_engine_id": "e"}})

    def _json(self, found: dict[str, Any]) -> None:
        data = json.dumps(found).encode()
        self.write(JSON_HEAD + str(len(data)).encode() + b"\r\n\r\n" + data)


def _content_length(head: bytes) -> int:
    found = head.lower().partition(b"content-length:")[2]
    return int(found.partition(b"\r\n")[0]) if found else 0


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    stepper = Stepper(loop)
    server = await loop.create_server(lambda: Connection(stepper), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(parser.parse_args().port))
