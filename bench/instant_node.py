"""A decode node that computes nothing: every request's next token is there at once. What is left is the router's own cost.

All running requests get one token a step, and all tokens of a step go in one message, as a real node sends them; the next step
begins as soon as the message has left. A process of its own:
`python -m bench.instant_node --registry HOST:PORT --tokenizer HASH`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop
from decant_proto.v1 import node_pb2, node_pb2_grpc, registry_pb2, registry_pb2_grpc, types_pb2

LEASE_MS = 3_600_000
STATUS_EVERY_S = 0.25
FIRST_TOKEN, TOKENS = 1000, 4000
"""Tokens of answers come from this range of the vocabulary, each another than the one before."""
GOLDEN = 2_654_435_761


class InstantNode(node_pb2_grpc.NodeServicer):
    def __init__(self, tokenizer: str) -> None:
        self.entry = types_pb2.NodeEntry(node_id="instant", role=types_pb2.ROLE_DECODE, incarnation=1)
        self._tokenizer = tokenizer

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        running: dict[str, tuple[node_pb2.Submit, int]] = {}
        wake = asyncio.Event()
        fingerprint = types_pb2.Fingerprint(architecture="instant", tokenizer=self._tokenizer, protocol_major=1)
        hello = node_pb2.NodeHello(entry=self.entry, fingerprint=fingerprint, max_model_len=1 << 20, block_size=16)
        await context.write(node_pb2.NodeMessage(hello=hello))
        await context.write(node_pb2.NodeMessage(status=node_pb2.NodeStatus(ready=True)))
        reader = asyncio.create_task(_read(request_iterator, running, wake))
        try:
            while not reader.done():
                if running:
                    await context.write(node_pb2.NodeMessage(step=_step(running)))
                    continue
                wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), STATUS_EVERY_S)
                if not running:
                    await context.write(node_pb2.NodeMessage(status=node_pb2.NodeStatus(ready=True)))
        finally:
            reader.cancel()


async def _read(
    messages: AsyncIterator[Any], running: dict[str, tuple[node_pb2.Submit, int]], wake: asyncio.Event
) -> None:
    async for message in messages:
        if message.HasField("submit"):
            running[message.submit.request_id] = (message.submit, 0)
            wake.set()
        elif message.HasField("cancel"):
            running.pop(message.cancel.request_id, None)


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


async def serve(registry: str, tokenizer: str) -> None:
    node = InstantNode(tokenizer)
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServicer_to_server(node, server)
    node.entry.control_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(registry) as channel:
        announce = registry_pb2.AnnounceRequest(entry=node.entry, lease_ms=LEASE_MS)
        await registry_pb2_grpc.RegistryStub(channel).Announce(announce, wait_for_ready=True, timeout=60)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--tokenizer", required=True)
    asked = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(asked.registry, asked.tokenizer))
