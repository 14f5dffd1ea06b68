"""The router with a fake decode node, spoken to by the unmodified openai client."""

from __future__ import annotations

from pathlib import Path

import pytest
from router_fake_node import FakeNode, expected_answer
from router_model_folder import write_model_folder
from router_under_test import router_with

pytestmark = pytest.mark.sockets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")


def answer_text(prompt: str, count: int, seed: int, choice: int = 0) -> str:
    return bytes(expected_answer(list(prompt.encode()), count, seed, choice)).decode()


async def test_a_completion_is_the_nodes_tokens_as_text(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        answer = await router.openai().completions.create(model=router.model, prompt="hello", max_tokens=20, seed=3)
    assert answer.choices[0].text == answer_text("hello", 20, 3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


async def test_a_streamed_completion_joins_to_the_whole_one(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        stream = await router.openai().completions.create(
            model=router.model,
            prompt="hello",
            max_tokens=20,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(texts) > 1
    assert "".join(texts) == answer_text("hello", 20, 3)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1
