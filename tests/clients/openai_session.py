"""What programs do with the openai package, whole and streamed, in one session: `openai_session.py URL MODEL`.

Prints one line of JSON: what it counted by its own means.
"""

from __future__ import annotations

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in few words."},
    {"role": "user", "content": "Name the largest city of France."},
]


class City(BaseModel):
    name: str
    inhabitants: int


class Session:
    def __init__(self, url: str, model: str) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.model = model
        self.requests = self.prompt_tokens = self.completion_tokens = 0

    def count(self, usage: openai.types.CompletionUsage | None) -> None:
        assert usage is not None
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens

    async def whole_chat(self, number: int) -> None:
        answer = await self.client.chat.completions.create(
            model=self.model, messages=QUESTION, max_completion_tokens=24, seed=number, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].logprobs is not None
        self.count(answer.usage)

    async def streamed_chat(self, number: int) -> None:
        stream = await self.client.chat.completions.create(
            model=self.model,
            messages=QUESTION,
            max_tokens=24,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, finish = "", None
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            if chunk.usage is not None:
                self.count(chunk.usage)
        assert text
        assert finish in ("stop", "length")

    async def completion(self, number: int) -> None:
        answer = await self.client.completions.create(
            model=self.model, prompt=f"{number} and", max_tokens=16, stop=["\n\n"], temperature=0.5, seed=1
        )
        assert answer.choices[0].finish_reason in ("stop", "length")
        self.count(answer.usage)

    async def parsed(self) -> None:
        answer = await self.client.chat.completions.parse(
            model=self.model, messages=QUESTION, response_format=City, max_tokens=100, temperature=0
        )
        assert isinstance(answer.choices[0].message.parsed, City)
        self.count(answer.usage)

    async def errors(self) -> None:
        """They come as the package's own exceptions, each with the field or the code."""
        ask = self.client.chat.completions.create
        found = await asyncio.gather(
            ask(model=self.model, messages=QUESTION, temperature=-1),
            ask(model="another", messages=QUESTION),
            return_exceptions=True,
        )
        wrong, other = found
        assert isinstance(wrong, openai.BadRequestError), wrong
        assert wrong.param == "temperature"
        assert isinstance(other, openai.NotFoundError), other
        assert other.code == "model_not_found"

    async def run(self) -> None:
        models = [model.id async for model in self.client.models.list()]
        assert self.model in models
        for number in range(4):
            await asyncio.gather(self.whole_chat(number), self.streamed_chat(number), self.completion(number))
        await self.parsed()
        await self.errors()
        # Only streams tell when their first token came, so there is no mean over all requests.
        print(  # noqa: T201
            json.dumps(
                {
                    "requests": self.requests,
                    "prompt_tokens": self.prompt_tokens,
                    "completion_tokens": self.completion_tokens,
                    "ttft_s": None,
                }
            )
        )


if __name__ == "__main__":
    asyncio.run(Session(*sys.argv[1:3]).run())
