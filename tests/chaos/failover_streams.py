"""Streams that are watched token by token at the client, so that what a failover does to them can be told exactly.

Each is asked over gRPC, where every token carries its position: a position that never comes is lost, one that comes twice is
repeated, and the answer must equal the one given before any harm. Every fourth stream of a real model follows a JSON schema.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

import grpc.aio
from chaos_load import ANSWER_LIMIT_S, Question, unequal
from chaos_models import ServedModel
from decant_proto.v1 import inference_pb2, inference_pb2_grpc

REQUIRED = {"flags", "colour", "done"}
SCHEMA = {
    "type": "object",
    "properties": {
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 12, "maxItems": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "done": {"type": "boolean"},
    },
    "required": sorted(REQUIRED),
    "additionalProperties": False,
}
SCHEMA_TOKENS = 512
"""More than the longest object takes, white space included, so that the end of the object ends the answer."""

LONGER = {"real": 2, "random": 6, "toy": 6}
"""How much longer answers are than in other chaos runs: the quicker a model, the more tokens until a harm has struck."""


@dataclass(frozen=True)
class Asked:
    question: Question
    follows_schema: bool

    def request(self) -> inference_pb2.GenerateRequest:
        question = self.question
        sampling = inference_pb2.SamplingOptions(
            temperature=question.temperature,
            max_tokens=question.max_tokens,
            seed=question.seed,
            ignore_eos=not self.follows_schema,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
        )
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=question.prompt), sampling=sampling
        )
        if self.follows_schema:
            request.json_schema = json.dumps(SCHEMA)
        return request


@dataclass
class Watch:
    """One stream as its client sees it; times by time.monotonic()."""

    asked: Asked
    begun_s: float = 0.0
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    ended: bool = False
    error: str = ""
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def next_position(self) -> int:
        return len(self.asked.question.prompt) + len(self.tokens)

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.request_id = response.request_id
        self.text += response.text
        for token in response.tokens:
            if token.position < self.next_position:
                self.repeated += 1
                continue
            self.lost += token.position - self.next_position
            self.tokens.append(token.token_id)
        if response.tokens:
            self.arrivals_s.append(time.monotonic())
        self.ended = bool(response.finish_reason)
        self.grown.set()

    async def shows(self, tokens: int) -> None:
        """Waits until so many tokens are there, or the stream is over."""
        while len(self.tokens) < tokens and not self.ended and not self.error:
            self.grown.clear()
            await self.grown.wait()

    def gap_s(self, harmed_s: float) -> float:
        """The longest silence at the client that ended after the harm; before its first token, counted from the harm on."""
        before = [at for at in self.arrivals_s if at <= harmed_s]
        since = [before[-1] if before else max(self.begun_s, harmed_s)]
        heard = since + [at for at in self.arrivals_s if at > harmed_s]
        return max((later - earlier for earlier, later in itertools.pairwise(heard)), default=0.0)


@dataclass
class Judgement:
    errors: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0

    @property
    def clean(self) -> bool:
        return not (self.errors or self.unequal or self.lost or self.repeated)


class Client:
    """Asks, watches and judges. `learn` first: what is right is what the unharmed cluster answers."""

    def __init__(self, model: ServedModel, channel: grpc.aio.Channel, asked: list[Asked]) -> None:
        self.asked = asked
        self._model = model
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._expected: dict[Asked, tuple[int, ...]] = {}

    async def learn(self) -> None:
        """Raises AssertionError when the unharmed cluster errs."""
        turns = asyncio.Semaphore(4)

        async def one(asked: Asked) -> None:
            async with turns:
                watch = await self.watch(Watch(asked))
            assert not watch.error, watch.error
            assert _is_whole(watch), f"{len(watch.tokens)} tokens: {watch.text!r}"
            self._expected[asked] = tuple(watch.tokens)

        await asyncio.gather(*map(one, self.asked))

    def answer_tokens(self, asked: Asked) -> int:
        return len(self._expected[asked])

    async def watch(self, watch: Watch) -> Watch:
        watch.begun_s = time.monotonic()
        responses: AsyncIterable[inference_pb2.GenerateResponse]
        responses = self._stub.Generate(watch.asked.request(), timeout=ANSWER_LIMIT_S)
        try:
            async for response in responses:
                watch.take(response)
        except grpc.aio.AioRpcError as error:
            watch.error = f"{error.code().name}: {error.details()}"
            watch.grown.set()
        return watch

    async def judge(self, watch: Watch, judgement: Judgement) -> None:
        judgement.repeated += watch.repeated
        if watch.error or not watch.ended:
            judgement.errors.append(f"after {len(watch.tokens)} tokens: {watch.error or 'an end without a reason'}")
            return
        judgement.lost += watch.lost
        if not _is_whole(watch):
            judgement.unequal.append(f"{len(watch.tokens)} tokens of {watch.asked.question.max_tokens}: {watch.text!r}")
            return
        expected = self._expected[watch.asked]
        verdict = await unequal(self._model, watch.asked.question, expected, tuple(watch.tokens))
        if verdict is not None:
            (judgement.near_ties if verdict.near_tie else judgement.unequal).append(verdict.told)


def _is_whole(watch: Watch) -> bool:
    if not watch.asked.follows_schema:
        return len(watch.tokens) == watch.asked.question.max_tokens
    try:
        found = json.loads(watch.text)
    except ValueError:
        return False
    flags = found.get("flags", ())
    return set(found) == REQUIRED and len(flags) == 12 and all(isinstance(one, bool) for one in flags)


def draw_asked(model: ServedModel, count: int, chance: random.Random) -> list[Asked]:
    """Every second one is seeded, the others are greedy."""
    drawn = []
    for index in range(count):
        follows_schema = model.kind == "real" and index % 4 == 3
        tokens = SCHEMA_TOKENS if follows_schema else chance.randint(*model.answer_tokens) * LONGER[model.kind]
        prompt = tuple(chance.choices(range(model.vocabulary), k=chance.randint(*model.prompt_tokens)))
        temperature = 0.0 if index % 2 == 0 else 0.8
        drawn.append(Asked(Question(prompt, tokens, temperature, chance.getrandbits(32)), follows_schema))
    return drawn
