"""The real model on a GPU: what a prefill and a decode node answer together is what a decode node answers alone.

In bfloat16 two correct runs may part where the two best tokens are closer than rounding. How much rounding moves a log
probability is measured here, between one request at a time and many at once; where pair and single node part, their choices must
lie closer together than twice that. The folder of the model is $GPU_TEST_MODEL.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterable, Iterator, Sequence
from dataclasses import dataclass

import grpc.aio
import pytest
from decant_proto.v1 import inference_pb2, inference_pb2_grpc
from decant_up import Up
from references import Reference, all_references
from tokenizers import Tokenizer

REAL = "GPU_TEST_MODEL"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sockets,
    pytest.mark.timeout(300),
    pytest.mark.skipif(REAL not in os.environ, reason=f"{REAL} names no folder"),
]

LIMIT_S = 60.0
TOKENS = 32
AT_ONCE = 16
COMMON = (
    "--device=cuda:0",
    "--gpu-memory-utilization=0.2",
    "--max-num-seqs=16",
    "--max-model-len=2048",
    "--no-enable-prefix-caching",
    "--slot-bytes=4MiB",
    "--staging-bytes=64MiB",
)


@dataclass(frozen=True)
class Clusters:
    pair: Up
    alone: Up


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    model = f"--model={os.environ[REAL]}"
    made = []
    for disaggregate in ("always", "never"):
        folder = tmp_path_factory.mktemp(disaggregate)
        made.append(Up(folder, *COMMON, model, f"--disaggregate={disaggregate}"))
        made[-1].await_ready()
    try:
        yield Clusters(*made)
    finally:
        for up in made:
            up.process.send_signal(signal.SIGINT)
        for up in made:
            up.process.wait(LIMIT_S)


async def ask(up: Up, references: Sequence[Reference], at_once: int) -> list[list[dict[int, float]]]:
    """For each reference the candidates of each position, chosen first: token ids with their log probabilities."""
    turns = asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{up.grpc_port}") as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

        async def answer(reference: Reference) -> list[dict[int, float]]:
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=reference.prompt_ids),
                sampling=inference_pb2.SamplingOptions(temperature=0, max_tokens=TOKENS, logprobs=5),
            )
            async with turns:
                responses: AsyncIterable[inference_pb2.GenerateResponse] = stub.Generate(request, timeout=LIMIT_S)
                return [
                    {token.token_id: token.logprob, **{one.token_id: one.logprob for one in token.top_logprobs}}
                    async for response in responses
                    for token in response.tokens
                ]

        return await asyncio.gather(*map(answer, references))


def ids(answer: Sequence[dict[int, float]]) -> list[int]:
    return [next(iter(position)) for position in answer]


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def rounding(one: Sequence[dict[int, float]], other: Sequence[dict[int, float]]) -> float:
    """The most that a log probability differs, up to and including where the two part."""
    end = parting(ids(one), ids(other))
    pairs = list(zip(one, other, strict=False))[: None if end is None else end + 1]
    return max((abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys()), default=0.0)


async def test_a_pair_answers_what_a_single_node_answers_within_what_rounding_moves(clusters: Clusters) -> None:
    references = all_references()
    single = await ask(clusters.alone, references, at_once=1)
    many = await ask(clusters.alone, references, at_once=AT_ONCE)
    error = max(map(rounding, single, many))
    assert 0 < error < 1
    before = clusters.pair.metric(7102 + 10 * (clusters.pair.node_index + 1), "decant_kv_transfer_bytes_total")
    partings = {}
    for at_once in (1, AT_ONCE):
        paired = await ask(clusters.pair, references, at_once=at_once)
        for reference, mine, theirs in zip(references, paired, single, strict=True):
            place = parting(ids(mine), ids(theirs))
            if place is None:
                assert len(mine) == len(theirs), reference.name
                continue
            chosen = ids(mine)[place]
            assert chosen in theirs[place], f"{reference.name}: {chosen} is no candidate at {place}"
            gap = theirs[place][ids(theirs)[place]] - theirs[place][chosen]
            partings[reference.name, at_once] = round(gap, 4)
            assert gap <= 2 * error, f"{reference.name}: parts at {place} with a gap of {gap}, rounding moves {error}"
        if at_once == 1:
            show(references, paired)
    moved = clusters.pair.metric(7102 + 10 * (clusters.pair.node_index + 1), "decant_kv_transfer_bytes_total") - before
    assert moved == 2 * sum(len(reference.prompt_ids) for reference in references) * 2 * 30 * 3 * 64 * 2
    print(f"rounding moves a log probability by {error:.4f}; partings and their gaps: {partings}")  # noqa: T201


def show(references: Sequence[Reference], answers: Sequence[Sequence[dict[int, float]]]) -> None:
    """Beside transformers' tokens in float32: how many agree to the end, and what the model says."""
    tokenizer = Tokenizer.from_file(f"{os.environ[REAL]}/tokenizer.json")
    places = [parting(ids(answer), reference.output_ids) for answer, reference in zip(answers, references, strict=True)]
    margins = [
        reference.margins[place] for place, reference in zip(places, references, strict=True) if place is not None
    ]
    print(f"{places.count(None)} of {len(places)} answers are float32's; margins where others part: {sorted(margins)}")  # noqa: T201
    for reference, answer in list(zip(references, answers, strict=True))[:3]:
        print(f"{reference.text!r} -> {tokenizer.decode(ids(answer))!r}")  # noqa: T201
