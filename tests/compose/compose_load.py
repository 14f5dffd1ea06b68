"""Streams of questions that never stop: what they must show for all to be well, and streams that go over HTTPS as well."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import grpc.aio
import openai
from chaos_load import ANSWER_LIMIT_S, Answer, Load, Question
from chaos_models import ServedModel
from compose_project import WHOLE_LIMIT_S, condition

ANSWERS_AFTERWARDS = 6


class BothWays(Load):
    """Asks every second question over HTTPS, by OpenAI's client (`model_name`: as the router serves it), the others over gRPC."""

    def __init__(
        self,
        model: ServedModel,
        channel: grpc.aio.Channel,
        client: openai.AsyncOpenAI,
        model_name: str,
        questions: list[Question],
        seed: int,
    ) -> None:
        super().__init__(model, channel, questions, seed)
        self.over_https = 0
        """Answers since the streams were started."""
        self._client = client
        self._model_name = model_name
        self._turns = itertools.cycle((True, False))

    def start(self, streams: int) -> None:
        self.over_https = 0
        super().start(streams)

    async def judged(self, index: int) -> None:
        try:
            await super().judged(index)
        except openai.OpenAIError as error:
            self.verdict.errors.append(f"question {index} over HTTPS: {error!r}")
            await asyncio.sleep(0.1)  # as over gRPC

    async def _ask(self, index: int) -> Answer:
        if next(self._turns):
            return await super()._ask(index)
        question = self._questions[index]
        begun, first_s = time.time(), 0.0
        tokens: list[int] = []
        chunks: Any = await self._client.completions.create(
            model=self._model_name,
            prompt=list(question.prompt),
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            top_p=1.0,
            stream=True,
            timeout=ANSWER_LIMIT_S,
            extra_body={"top_k": 0, "min_p": 0.0, "ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in chunks:
            first_s = first_s or time.time() - begun
            tokens += [token for choice in chunk.choices for token in choice.token_ids]
        self.over_https += 1
        return Answer(index, begun, time.time(), first_s, 0.0, tuple(tokens))


async def all_is_well(load: Load) -> None:
    """Some questions that are asked from now on are answered, and no answer since the beginning was wrong or missing."""
    since = time.time()

    async def answered() -> bool:
        return sum(answer.begun > since for answer in load.verdict.answers) >= ANSWERS_AFTERWARDS

    await condition(answered, WHOLE_LIMIT_S, lambda: f"answers; errors so far: {load.verdict.errors}")
    assert load.verdict.errors == []
    assert load.verdict.wrong == []
