"""Golden prompts through router, prefill node and decode node, as `decant up` runs them: the tokens are transformers' own.

The default run takes 12 prompts, GOLDEN=all takes all 64. "The same tokens" is defined in docs/protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator, Sequence
from pathlib import Path

import grpc.aio
import pytest
from decant_proto.v1 import inference_pb2, inference_pb2_grpc
from decant_up import Up
from references import Reference, load_references, near_tie_or_none
from waiting import until

pytestmark = [pytest.mark.sockets, pytest.mark.model, pytest.mark.timeout(480)]

CONCURRENT = 8
ANSWER_LIMIT_S = 300.0
MOVED = "decant_kv_transfer_bytes_total"
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
"""KV of one token of SmolLM2-135M in float32."""


@pytest.fixture(scope="module")
def up(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("exact"), f"--model={default_model}", "--no-enable-prefix-caching")
    try:
        running.await_ready()
        yield running
    finally:
        running.process.kill()
        running.process.wait()


async def answers(stub: inference_pb2_grpc.InferenceAsyncStub, references: Sequence[Reference]) -> list[list[int]]:
    """Output token ids for each reference, some of them computed at the same time."""
    turns = asyncio.Semaphore(CONCURRENT)

    async def answer(reference: Reference) -> list[int]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=reference.prompt_ids),
            sampling=inference_pb2.SamplingOptions(temperature=0, max_tokens=32),
        )
        async with turns:
            responses: AsyncIterable[inference_pb2.GenerateResponse] = stub.Generate(request, timeout=ANSWER_LIMIT_S)
            return [token.token_id async for response in responses for token in response.tokens]

    return await asyncio.gather(*map(answer, references))


async def test_golden_prompts_through_all_three_processes_give_the_reference_tokens(up: Up) -> None:
    references = load_references()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{up.grpc_port}") as channel:
        found = await answers(inference_pb2_grpc.InferenceStub(channel), references)
    parted = {r.name: near_tie_or_none(ids, r) for r, ids in zip(references, found, strict=True)}
    ties = {name: position for name, position in parted.items() if position is not None}
    print(f"\n{len(references)} golden prompts through router, P and D; near-ties: {ties or 'none'}")  # noqa: T201
    wanted_bytes = TOKEN_BYTES * sum(len(reference.prompt_ids) for reference in references)
    assert up.metric(up.decode_http_port, MOVED) == wanted_bytes
    # The prefill node may hear that its last parcel has left after the answer has come.
    await until(lambda: up.metric(up.prefill_http_port, MOVED) >= wanted_bytes)
    assert up.metric(up.prefill_http_port, MOVED) == wanted_bytes
