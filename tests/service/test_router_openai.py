"""The router with a fake decode node, spoken to by the unmodified openai client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from router_fake_node import FakeNode, expected_answer
from router_model_folder import CONTEXT_LIMIT, END_ID, write_model_folder
from router_under_test import router_with, until

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


async def test_a_stream_that_knows_no_chunks_ends_with_its_connection(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
        head = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_a_chat_answer_whole_and_streamed(folder: Path) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    prompt = "system: be brief\nuser: hi\nassistant: "
    async with router_with(folder, FakeNode("d0")) as router:
        client = router.openai()
        whole = await client.chat.completions.create(
            model=router.model, messages=messages, max_completion_tokens=12, seed=1
        )
        stream: Any = await client.chat.completions.create(
            model=router.model, messages=messages, max_tokens=12, seed=1, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == answer_text(prompt, 12, 1)
    assert whole.choices[0].message.role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer_text(prompt, 12, 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


async def test_a_chat_without_a_limit_may_use_the_whole_context(folder: Path) -> None:
    node = FakeNode("d0", script=[ord("a"), ord("b"), END_ID])
    async with router_with(folder, node) as router:
        answer = await router.openai().chat.completions.create(
            model=router.model, messages=[{"role": "user", "content": "hi"}]
        )
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    prompt_tokens = len(node.submits[0].prompt_token_ids)
    assert node.submits[0].sampling.max_tokens == CONTEXT_LIMIT - prompt_tokens


async def test_log_probabilities_of_completions_and_chat(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        client = router.openai()
        plain = await client.completions.create(model=router.model, prompt="hello", max_tokens=3, seed=3, logprobs=2)
        chat = await client.chat.completions.create(
            model=router.model,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            seed=3,
            logprobs=True,
            top_logprobs=2,
        )
        stream = await client.completions.create(
            model=router.model, prompt="hello", max_tokens=3, seed=3, logprobs=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
    found = plain.choices[0].logprobs
    assert found is not None
    assert found.tokens == list(answer_text("hello", 3, 3))
    assert found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs is not None
    assert all(len(best) == 2 for best in found.top_logprobs)
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None
    assert "".join(one.token for one in content) == chat.choices[0].message.content
    assert [len(one.top_logprobs) for one in content] == [2, 2, 2]
    streamed = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens or []
    ]
    assert streamed == found.tokens


async def test_f20_a_stop_string_across_tokens_ends_the_answer_and_the_nodes_work(folder: Path) -> None:
    node = FakeNode("d0", script=list(b"one two three four five six seven eight nine ten"))
    async with router_with(folder, node) as router:
        for stream in (False, True):
            answer: Any = await router.openai().completions.create(
                model=router.model, prompt="x", max_tokens=40, stop=["ee f", "nine"], stream=stream
            )
            parts = [chunk async for chunk in answer] if stream else [answer]
            text, choice = "".join(part.choices[0].text for part in parts), parts[-1].choices[0]
            assert text == "one two thr"
            assert choice.finish_reason == "stop"
            assert choice.stop_reason == "ee f"
        await until(lambda: len(node.cancels) == 2 and not node.requests)


async def test_f20_stop_token_ids_ignore_eos_and_one_token(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0", script=[97, END_ID, 98, 99, 100])) as router:
        complete: Any = router.openai().completions.create
        by_id = await complete(
            model=router.model, prompt="x", max_tokens=5, extra_body={"stop_token_ids": [98], "ignore_eos": True}
        )
        by_eos = await complete(model=router.model, prompt="x", max_tokens=5)
        on_and_on = await complete(model=router.model, prompt="x", max_tokens=5, extra_body={"ignore_eos": True})
        single = await complete(model=router.model, prompt="x", max_tokens=1)
    assert (by_id.choices[0].text, by_id.choices[0].finish_reason, by_id.choices[0].stop_reason) == ("a", "stop", 98)
    assert (by_eos.choices[0].text, by_eos.choices[0].finish_reason, by_eos.choices[0].stop_reason) == (
        "a",
        "stop",
        None,
    )
    assert (on_and_on.choices[0].text, on_and_on.choices[0].finish_reason) == ("abcd", "length")
    assert (single.choices[0].text, single.choices[0].finish_reason) == ("a", "length")


async def test_a_seed_decides_and_without_one_answers_differ(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        complete = router.openai().completions.create
        first = await complete(model=router.model, prompt="x", max_tokens=30, seed=-5)
        again = await complete(model=router.model, prompt="x", max_tokens=30, seed=-5)
        free = [await complete(model=router.model, prompt="x", max_tokens=30) for _ in range(2)]
    assert first.choices[0].text == again.choices[0].text
    assert free[0].choices[0].text != free[1].choices[0].text


async def test_several_choices_and_several_prompts_keep_their_places(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        complete = router.openai().completions.create
        whole = await complete(model=router.model, prompt=["one", "three"], n=2, max_tokens=9, seed=4)
        stream = await complete(model=router.model, prompt=["one", "three"], n=2, max_tokens=9, seed=4, stream=True)
        texts = {0: "", 1: "", 2: "", 3: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    expected = [answer_text(prompt, 9, 4, choice) for prompt in ("one", "three") for choice in (0, 1)]
    assert [choice.text for choice in whole.choices] == expected
    assert list(texts.values()) == expected
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (8, 36)


async def test_token_ids_are_a_prompt_too(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        answer = await router.openai().completions.create(
            model=router.model, prompt=list(b"hello"), max_tokens=5, seed=3
        )
    assert answer.choices[0].text == answer_text("hello", 5, 3)


async def test_usage_may_stand_in_every_chunk(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        stream = await router.openai().completions.create(
            model=router.model,
            prompt="hello",
            max_tokens=5,
            stream=True,
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_a_character_that_spans_tokens_and_events_arrives_whole(folder: Path) -> None:
    text = "naïve 漢字 🦊!"
    async with router_with(folder, FakeNode("d0", script=list(text.encode()))) as router:
        stream = await router.openai().completions.create(
            model=router.model, prompt="x", max_tokens=len(text.encode()), stream=True
        )
        texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == text
    assert not any("�" in piece for piece in texts)


async def test_models_version_tokenize_and_detokenize(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        models = await router.openai().models.list()
        assert [model.id for model in models.data] == ["tiny-model"]
        assert (await router.openai().models.retrieve("tiny-model")).id == "tiny-model"
        assert (await router.get("/version"))[0] == 200
        status, found = await router.post("/tokenize", {"prompt": "hé"})
        assert (status, found["tokens"], found["max_model_len"]) == (200, list("hé".encode()), CONTEXT_LIMIT)
        assert await router.post("/detokenize", {"tokens": list("hé".encode())}) == (200, {"prompt": "hé"})


async def test_x_request_id_comes_back_and_names_nothing(folder: Path) -> None:
    """F18: the same id twice at once serves two requests, each with an id of the router's own."""
    node = FakeNode("d0", tokens_until_pause=2)
    async with router_with(folder, node) as router:
        headers = {"X-Request-Id": "mine"}
        body = {"model": router.model, "prompt": "x", "max_tokens": 4}
        posts = [router.http.post(f"{router.url}/v1/completions", json=body, headers=headers) for _ in range(2)]
        asking = [asyncio.ensure_future(post) for post in posts]
        await until(lambda: len(node.requests) == 2)
        node.tokens_until_pause = None
        for response in await asyncio.gather(*asking):
            assert response.status == 200
            assert response.headers["X-Request-Id"] == "mine"
    assert len({submit.request_id for submit in node.submits}) == 2
    assert all("mine" not in submit.request_id for submit in node.submits)


async def test_metrics_are_there_before_the_first_request_and_count_afterwards(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        assert await router.metric('decant_request_success_total{reason="length"}') == 0
        await router.openai().completions.create(model=router.model, prompt="hello", max_tokens=7)
        assert await router.metric('decant_request_success_total{reason="length"}') == 1
        assert await router.metric("decant_prompt_tokens_total") == 5
        assert await router.metric("decant_generation_tokens_total") == 7
        assert await router.metric("decant_time_to_first_token_seconds_count") == 1
        assert await router.metric("decant_requests_running") == 0
        assert await router.metric("decant_requests_waiting") == 0


async def test_fields_that_shape_the_text(folder: Path) -> None:
    script = [*b"one two", END_ID, *b" three four"]
    async with router_with(folder, FakeNode("d0", script=script)) as router:
        complete: Any = router.openai().completions.create

        async def text(**fields: Any) -> str:
            limits = {"max_tokens": 12, "ignore_eos": True, **fields}
            whole = await complete(model=router.model, prompt="x", extra_body=limits)
            stream = await complete(model=router.model, prompt="x", stream=True, extra_body=limits)
            streamed = "".join([chunk.choices[0].text async for chunk in stream])
            assert streamed == whole.choices[0].text
            return streamed

        assert await text() == "one two thr"
        assert await text(skip_special_tokens=False) == "one two<|end|> thr"
        assert await text(stop=["two"]) == "one "
        assert await text(stop=["two"], include_stop_str_in_output=True) == "one two"
        assert await text(stop_token_ids=[ord("t")], include_stop_str_in_output=True) == "one t"
        assert await text(echo=True) == "xone two thr"
        assert (
            await text(ignore_eos=False, include_stop_str_in_output=True, skip_special_tokens=False) == "one two<|end|>"
        )


async def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}|{{ mood }}|{{ add_generation_prompt }}"
    node = FakeNode("d0", script=[97])
    async with router_with(write_model_folder(tmp_path / "m", chat_template=template), node) as router:
        for fields, prompt in (
            ({"chat_template_kwargs": {"mood": "cheerful", "messages": "none"}}, b"hi|cheerful|True"),
            ({"add_generation_prompt": False}, b"hi||False"),
        ):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}
            assert (await router.post("/v1/chat/completions", body))[0] == 200
            assert bytes(node.submits[-1].prompt_token_ids) == prompt


async def test_the_bytes_of_log_probabilities_join_to_the_text(folder: Path) -> None:
    text = "漢🦊"
    async with router_with(folder, FakeNode("d0", script=list(text.encode()))) as router:
        answer = await router.openai().chat.completions.create(
            model=router.model,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=len(text.encode()),
            logprobs=True,
        )
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content is not None
    assert bytes(byte for one in content for byte in one.bytes or []).decode() == text


async def test_an_answer_may_go_on_where_the_last_message_ends(folder: Path) -> None:
    node = FakeNode("d0", script=[97])
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    async with router_with(folder, node) as router:
        body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
        status, found = await router.post("/v1/chat/completions", body)
    assert status == 200, found
    assert bytes(node.submits[-1].prompt_token_ids) == b"user: hi\nassistant: Well,"


async def test_token_ids_beside_the_text(folder: Path) -> None:
    expected = expected_answer(list(b"hello"), 6, 3)
    async with router_with(folder, FakeNode("d0")) as router:
        body = {"prompt": "hello", "max_tokens": 6, "seed": 3, "return_token_ids": True}
        _, whole = await router.post("/v1/completions", body)
        stream: Any = await router.openai().completions.create(
            model=router.model, prompt="hello", max_tokens=6, seed=3, stream=True, extra_body={"return_token_ids": True}
        )
        chunks = [chunk async for chunk in stream]
    assert (whole["choices"][0]["token_ids"], whole["choices"][0]["prompt_token_ids"]) == (expected, list(b"hello"))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == expected
    assert chunks[0].choices[0].prompt_token_ids == list(b"hello")


async def test_a_chat_shows_the_ids_of_its_prompt_beside_the_choices(folder: Path) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2}
    prompt = list(b"user: hi\nassistant: ")
    async with router_with(folder, FakeNode("d0")) as router:
        _, whole = await router.post("/v1/chat/completions", {**asked, "return_token_ids": True})
        ask = router.openai().chat.completions.create
        stream: Any = await ask(model=router.model, **asked, stream=True, extra_body={"return_token_ids": True})
        chunks = [chunk async for chunk in stream]
    assert whole["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in choice and len(choice["token_ids"]) == 2 for choice in whole["choices"])
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [prompt] * 2


async def test_penalties_and_bias_reach_the_node(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        await router.openai().completions.create(
            model=router.model,
            prompt="hello",
            max_tokens=2,
            presence_penalty=0.5,
            frequency_penalty=-1.5,
            logit_bias={"101": 5, "7": -100},
            extra_body={"repetition_penalty": 1.25},
        )
    sampling = node.submits[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.5, 1.25)
    assert dict(sampling.logit_bias) == {101: 5.0, 7: -100.0}


GRAMMARS: dict[str, dict[str, Any]] = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    },
    "regex": {"structured_outputs": {"regex": "[a-c]+"}},
    "choice": {"guided_choice": ["yes", "no", "\u00e9"]},
    "lark": {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
}


@pytest.mark.parametrize("asked", GRAMMARS.values(), ids=GRAMMARS)
async def test_what_an_answer_must_follow_reaches_the_node_as_a_grammar(folder: Path, asked: dict[str, Any]) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **asked}
        assert (await router.post("/v1/chat/completions", chat))[0] == 200
        free = {"prompt": "x", "max_tokens": 2, "response_format": {"type": "text"}}
        assert (await router.post("/v1/completions", free))[0] == 200
    assert LLMatcher.validate_grammar(node.submits[0].sampling.grammar) == ""
    assert node.submits[0].sampling.grammar
    assert node.submits[1].sampling.grammar == ""
