"""A decode node that computes nothing: every request's next token is there at once. What is left is the router's own cost.

All running requests get one token a step, and all tokens of a step go in one message, as a real node sends them; the next step
begins as soon as the message has left. Requests for at least `LONG_ANSWER` tokens begin together, `--together` of them: what
comes without a pause would otherwise be over before the next request is there, and each message would hold one token.
A process of its own: `python -m bench.instant_node --registry HOST:PORT --tokenizer HASH`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop
from decant_proto.v1 import node_pb2, node_pb2_grpc, registry_pb2, registry_pb2_grpc, types_pb2

LEASE_MS = 3_600_000
LONG_ANSWER = 64
STATUS_EVERY_S = 0.25
FIRST_TOKEN, TOKENS = 1000, 4000
"""Tokens of answers come from this range of the vocabulary, each another than the one before."""
GOLDEN = 2_654_435_761


class Running:
    """Requests that get a token in the next step, each with the count of those it has."""

    def __init__(self, together: int) -> None:
        self.requests: dict[str, tuple[node_pb2.Submit, int]] = {}
        self.wake = asyncio.Event()
        self._together = together
        self._waiting: dict[str, node_pb2.Submit] = {}

    def submit(self, submit: node_pb2.Submit) -> None:
        if submit.sampling.max_tokens < LONG_ANSWER:
            self.requests[submit.request_id] = (submit, 0)
        else:
            self._waiting[submit.request_id] = submit
        if len(self._waiting) == self._together:
            self.requests |= {request_id: (waiting, 0) for request_id, waiting in self._waiting.items()}
            self._waiting.clear()
        if self.requests:
            self.wake.set()

    def cancel(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self._waiting.pop(request_id, None)


class InstantNode(node_pb2_grpc.NodeServicer):
    def __init__(self, tokenizer: str, together: int) -> None:
        self.entry = types_pb2.NodeEntry(node_id="instant", role=types_pb2.ROLE_DECODE, incarnation=1)
        self._tokenizer = tokenizer
        self._together = together

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        running = Running(self._together)
        fingerprint = types_pb2.Fingerprint(architecture="instant", tokenizer=self._tokenizer, protocol_major=1)
        hello = node_pb2.NodeHello(entry=self.entry, fingerprint=fingerprint, max_model_len=1 << 20, block_size=16)
        await context.write(node_pb2.NodeMessage(hello=hello))
        await context.write(node_pb2.NodeMessage(status=node_pb2.NodeStatus(ready=True)))
        reader = asyncio.create_task(_read(request_iterator, running))
        try:
            while not reader.done():
                if running.requests:
                    await context.write(node_pb2.NodeMessage(step=_step(running.requests)))
                    continue
                running.wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(running.wake.wait(), STATUS_EVERY_S)
                if not running.requests:
                    await context.write(node_pb2.NodeMessage(status=node_pb2.NodeStatus(ready=True)))
        finally:
            reader.cancel()


async def _read(messages: AsyncIterator[Any], running: Running) -> None:
    async for message in messages:
        if message.HasField("submit"):
            running.submit(message.submit)
        elif message.HasField("cancel"):
            running.cancel(message.cancel.request_id)


def _step(running: dict[str, tuple[node_pb2.Submit, int]]) -> node_pb2.StepOutput:
    step = node_pb2.StepOutput()
    for request_id, (submit, emitted) in list(running.items()):
        position = len(submit.prompt_token_ids) + emitted
        output = step.outputs.add(request_id=request_id, attempt=submit.attempt)
        output.tokens.add(position=position, token_id=FIRST_TOKEN + position * GOLDEN % TOKENS)
        if emitted == 0:
            output.prompt_account.computed = len(submit.prompt_token_ids)
        if emitted + 1 >= submit.sampling.max_tokens:
            output.finish_reason = types_pb2.FINISH_REASON_LENGTH
            del running[request_id]
        else:
            running[request_id] = (submit, emitted + 1)
    return step


async def round_trips(address: str, prompt_tokens: int, count: int) -> list[float]:
    """Seconds from a request to its one token, straight at an instant node, one after another."""
    seconds = []
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = node_pb2_grpc.NodeStub(channel).Attach()
        await call.write(node_pb2.RouterMessage(hello=node_pb2.RouterHello(router_id="bench", lease_ms=LEASE_MS)))
        sampling = types_pb2.SamplingParameters(max_tokens=1)
        for number in range(count):
            submit = node_pb2.Submit(
                request_id=f"{number:032x}", prompt_token_ids=range(prompt_tokens), sampling=sampling
            )
            begun = time.perf_counter()
            await call.write(node_pb2.RouterMessage(submit=submit))
            while not (await call.read()).HasField("step"):
                pass
            seconds.append(time.perf_counter() - begun)
        call.cancel()
    return seconds


async def serve(registry: str, tokenizer: str, together: int, port: int) -> None:
    node = InstantNode(tokenizer, together)
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServicer_to_server(node, server)
    node.entry.control_address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    async with grpc.aio.insecure_channel(registry) as channel:
        announce = registry_pb2.AnnounceRequest(entry=node.entry, lease_ms=LEASE_MS)
        await registry_pb2_grpc.RegistryStub(channel).Announce(announce, wait_for_ready=True, timeout=60)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    asked = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(asked.registry, asked.tokenizer, asked.together, asked.port))
