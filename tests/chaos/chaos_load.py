"""Clients that never stop asking while faults happen, and know what each answer must be.

A run draws a set of requests, has each answered once before any harm, and from then on several streams ask them again and
again in random order: greedy and seeded ones. Every answer must come without an error and equal the unharmed one.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

import grpc.aio
from chaos_models import ServedModel
from decant_proto.v1 import inference_pb2, inference_pb2_grpc
from references import NEAR_TIE_MARGIN

ANSWER_LIMIT_S = 120.0


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    question: int
    begun: float
    ended: float
    """Both by time.time()."""
    first_token_s: float
    longest_gap_s: float
    tokens: tuple[int, ...]


@dataclass
class Verdict:
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)


def draw_questions(model: ServedModel, count: int, chance: random.Random) -> list[Question]:
    """Every second one is seeded."""
    return [
        Question(
            tuple(chance.choices(range(model.vocabulary), k=chance.randint(*model.prompt_tokens))),
            chance.randint(*model.answer_tokens),
            0.0 if index % 2 == 0 else 0.8,
            chance.getrandbits(32),
        )
        for index in range(count)
    ]


class Load:
    def __init__(self, model: ServedModel, channel: grpc.aio.Channel, questions: list[Question], seed: int) -> None:
        self.verdict = Verdict()
        self._model = model
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._questions = questions
        self._seed = seed
        self._expected: list[tuple[int, ...]] = []
        self._streams: list[asyncio.Task[None]] = []
        self._stopping = False

    async def learn(self) -> None:
        """The unharmed answers. Raises whatever a client would see."""
        turns = asyncio.Semaphore(8)

        async def one(index: int) -> tuple[int, ...]:
            async with turns:
                return (await self._ask(index)).tokens

        self._expected = list(await asyncio.gather(*(one(index) for index in range(len(self._questions)))))
        for question, tokens in zip(self._questions, self._expected, strict=True):
            assert len(tokens) == question.max_tokens, f"{len(tokens)} tokens, {question.max_tokens} were asked for"

    def start(self, streams: int) -> None:
        assert self._expected, "what is right must be learnt first"
        self._streams = [asyncio.create_task(self._stream(number)) for number in range(streams)]

    async def stop(self) -> None:
        """Let the answers under way come to their end."""
        self._stopping = True
        await asyncio.gather(*self._streams)

    async def once(self) -> None:
        """Every question once more, judged like all others."""
        turns = asyncio.Semaphore(8)

        async def one(index: int) -> None:
            async with turns:
                await self.judged(index)

        await asyncio.gather(*map(one, range(len(self._questions))))

    @property
    def questions(self) -> int:
        return len(self._questions)

    def draw(self, chance: random.Random) -> int:
        return chance.randrange(len(self._questions))

    async def checked(self, index: int) -> Answer:
        """One answer, judged; raises what the client would see."""
        answer = await self._ask(index)
        self.verdict.answers.append(answer)
        await self._judge(answer)
        return answer

    async def _stream(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while not self._stopping:
            await self.judged(self.draw(chance))

    async def judged(self, index: int) -> None:
        """One answer; an error is the verdict's."""
        begun = time.time()
        try:
            await self.checked(index)
        except grpc.aio.AioRpcError as error:
            seconds = time.time() - begun
            told = f"question {index} after {seconds:.1f} s: {error.code().name}: {error.details()}"
            self.verdict.errors.append(told)
            await asyncio.sleep(0.1)  # an error that comes at once must not become a storm

    async def _judge(self, answer: Answer) -> None:
        question = self._questions[answer.question]
        found = await unequal(self._model, question, self._expected[answer.question], answer.tokens)
        if found is not None:
            told = f"question {answer.question}, {found.told}"
            (self.verdict.near_ties if found.near_tie else self.verdict.wrong).append(told)

    async def _ask(self, index: int) -> Answer:
        question = self._questions[index]
        sampling = inference_pb2.SamplingOptions(
            temperature=question.temperature,
            max_tokens=question.max_tokens,
            seed=question.seed,
            ignore_eos=True,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
        )
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=question.prompt), sampling=sampling
        )
        begun = heard = time.time()
        first_s, longest_s = 0.0, 0.0
        tokens: list[int] = []
        responses: AsyncIterable[inference_pb2.GenerateResponse] = self._stub.Generate(request, timeout=ANSWER_LIMIT_S)
        async for response in responses:
            now = time.time()
            if response.tokens:
                first_s = first_s or now - begun
                longest_s = max(longest_s, now - heard) if tokens else longest_s
                heard = now
            tokens += [token.token_id for token in response.tokens]
        return Answer(index, begun, time.time(), first_s, longest_s, tuple(tokens))


@dataclass(frozen=True)
class Unequal:
    told: str
    near_tie: bool


async def unequal(
    model: ServedModel, question: Question, expected: tuple[int, ...], tokens: tuple[int, ...]
) -> Unequal | None:
    """Where two answers to a question part; None when they are the same."""
    if tokens == expected:
        return None
    pairs = zip(tokens, expected, strict=False)
    first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None or len(tokens) != len(expected):
        return Unequal(f"token {first}: {len(tokens)} tokens instead of {len(expected)}", near_tie=False)
    told = f"token {first}: {tokens[first]} instead of {expected[first]}"
    if model.exact:
        return Unequal(told, near_tie=False)
    history = (*question.prompt, *expected[:first])
    margin = await asyncio.to_thread(model.margin, history, question.temperature, question.seed)
    return Unequal(f"{told}, margin {margin:.2e}", margin < NEAR_TIE_MARGIN)


def usual_seconds(answers: list[Answer], harmed: list[tuple[float, float]]) -> dict[int, float]:
    """By question: the median time of its answers that met no fault."""
    calm: dict[int, list[float]] = {}
    for answer in answers:
        if not any(answer.begun < end and start < answer.ended for start, end in harmed):
            calm.setdefault(answer.question, []).append(answer.ended - answer.begun)
    return {question: statistics.median(seconds) for question, seconds in calm.items()}
