"""Log probabilities of prompts at the router: OpenAI's echo with logprobs, vLLM's prompt_logprobs, gRPC, and failover."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from decant_proto.v1 import inference_pb2, inference_pb2_grpc
from router_fake_node import FakeNode, expected_answer, expected_score
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until

from foundation.registry_entry import Role

pytestmark = pytest.mark.sockets

PLACED_ALONE = 'decant_placements_total{reason="prompt_logprobs"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("scores") / "tiny-model")


def text_of(token: int) -> str:
    return bytes([token]).decode(errors="replace")


def values(prompt: Sequence[int]) -> list[float | None]:
    return [None, *(expected_score(prompt, position, 0)[0] for position in range(1, len(prompt)))]


async def ask(router: RouterUnderTest, path: str = "/v1/completions", **body: Any) -> Any:
    status, found = await router.post(path, {"model": router.model, "seed": 4, **body})
    assert status == 200, found
    return found


async def streamed(router: RouterUnderTest, **body: Any) -> list[Any]:
    asked = {"model": router.model, "seed": 4, "stream": True, **body}
    async with router.http.post(router.url + "/v1/completions", json=asked) as response:
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_echo_with_logprobs_begins_with_the_prompts_own(folder: Path) -> None:
    """As lm-evaluation-harness asks for log-likelihoods: several prompts as token ids, one token of each answer."""
    prompts = [list(b"one prompt of many tokens"), list(b"2nd")]
    async with router_with(folder, FakeNode("d0"), FakeNode("p0", role=Role.PREFILL)) as router:
        found = await ask(router, prompt=prompts, echo=True, logprobs=2, max_tokens=1, temperature=0)
        assert await router.metric(PLACED_ALONE) == 2
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for choice, prompt in zip(found["choices"], prompts, strict=True):
        answer = expected_answer(prompt, 1, 4)
        told = choice["logprobs"]
        assert choice["text"] == bytes(prompt + answer).decode()
        assert told["token_logprobs"] == [*values(prompt), -0.5]
        assert told["tokens"] == [text_of(token) for token in prompt + answer]
        assert told["text_offset"] == list(range(len(prompt) + 1))
        assert told["top_logprobs"][0] is None
        for position, tops in enumerate(told["top_logprobs"][1:-1], 1):
            own, _, best = expected_score(prompt, position, 2)
            named = {text_of(token): value for token, value in best}
            assert tops == {text_of(prompt[position]): own, **named}


@pytest.mark.parametrize("stream", [False, True])
async def test_without_an_answer_only_the_prompt_is_said(folder: Path, stream: bool) -> None:
    prompt = list(b"alone")
    async with router_with(folder, FakeNode("d0")) as router:
        asked: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        if stream:
            *chunks, usage = await streamed(router, **asked, stream_options={"include_usage": True})
            choices = [chunk["choices"][0] for chunk in chunks]
        else:
            usage = await ask(router, **asked)
            choices = usage["choices"]
    assert "".join(choice["text"] for choice in choices) == "alone"
    assert choices[0]["logprobs"]["token_logprobs"] == values(prompt)
    assert choices[-1]["finish_reason"] == "length"
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (5, 0)


async def test_offsets_count_characters_of_the_text_not_of_its_broken_bytes(folder: Path) -> None:
    text = "é€ x"
    async with router_with(folder, FakeNode("d0")) as router:
        (choice,) = (await ask(router, prompt=text, echo=True, logprobs=0, max_tokens=2))["choices"]
    assert choice["text"].startswith(text)
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 4, 5]


async def test_what_truncation_keeps_is_echoed(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        asked: dict[str, Any] = {
            "prompt": "0123456789",
            "truncate_prompt_tokens": 4,
            "echo": True,
            "max_tokens": 0,
            "logprobs": 1,
        }
        (choice,) = (await ask(router, **asked))["choices"]
    assert choice["text"] == "6789"
    assert choice["logprobs"]["token_logprobs"] == values(list(b"6789"))


async def test_prompt_logprobs_stand_where_vllm_has_them(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        completion = await ask(router, prompt="abc", prompt_logprobs=2, n=2, max_tokens=2)
        chat = await ask(
            router,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "x"}],
            prompt_logprobs=0,
            return_token_ids=True,
            max_tokens=2,
        )
        plain = await ask(router, prompt="abc", max_tokens=2)
    first, second = completion["choices"]
    assert first["prompt_logprobs"] == second["prompt_logprobs"]
    nothing, *scores = first["prompt_logprobs"]
    assert nothing is None
    for position, found in enumerate(scores, 1):
        own, rank, best = expected_score(b"abc", position, 2)
        wanted = {str(b"abc"[position]): {"logprob": own, "rank": rank, "decoded_token": "abc"[position]}}
        for place, (token, value) in enumerate(best, 1):
            told = {"logprob": value, "rank": place, "decoded_token": text_of(token)}
            wanted.setdefault(str(token), told)
        assert found == wanted
    assert [submit.sampling.HasField("prompt_logprobs") for submit in node.submits] == [True, False, True, False]
    prompt = chat["prompt_token_ids"]
    assert [next(iter(one.values()))["logprob"] for one in chat["prompt_logprobs"][1:]] == values(prompt)[1:]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in plain["choices"][0]


async def test_f05_a_prompt_whose_node_dies_halfway_is_scored_once(folder: Path) -> None:
    prompt = list(b"a prompt of some thirty tokens")
    dying, other = FakeNode("d0", score_run=4, score_pause=10), FakeNode("d1", score_run=7, ready=False)
    async with router_with(folder, dying, other, FakeNode("p0", role=Role.PREFILL)) as router:
        asking = asyncio.ensure_future(streamed(router, prompt=prompt, echo=True, logprobs=1, max_tokens=6))
        ongoing = router.router.dispatcher._ongoing
        await until(lambda: any(len(list(one.stream.prompt_scores or ())) >= 8 for one in ongoing.values()))
        other.ready = True
        await dying.kill()
        chunks = await asking
    answer = expected_answer(prompt, 6, 4)
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [value for choice in choices for value in (choice["logprobs"] or {}).get("token_logprobs", ())]
    assert told == [*values(prompt), *[-0.5] * 6]
    assert "".join(choice["text"] for choice in choices) == bytes(prompt + answer).decode()
    (again,) = other.submits
    assert again.sampling.HasField("prompt_logprobs")
    assert not again.prefill_choices


async def test_f05_a_stream_that_goes_on_elsewhere_does_not_score_its_prompt_again(folder: Path) -> None:
    prompt = list(b"a prompt")
    nodes = [FakeNode("d0", tokens_until_pause=3), FakeNode("d1", ready=False)]
    async with router_with(folder, *nodes, FakeNode("p0", role=Role.PREFILL)) as router:
        asking = asyncio.ensure_future(streamed(router, prompt=prompt, echo=True, logprobs=0, max_tokens=6))
        await router.heard(3)
        nodes[1].ready = True
        await nodes[0].kill()
        chunks = await asking
    told = [value for chunk in chunks for value in (chunk["choices"][0]["logprobs"] or {}).get("token_logprobs", ())]
    assert told == [*values(prompt), *[-0.5] * 6]
    (again,) = nodes[1].submits
    assert not again.sampling.HasField("prompt_logprobs")
    assert again.prefill_choices


async def test_a_node_that_does_not_score_prompts_is_told_from_one_that_does(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0", score_run=0)) as router:
        status, found = await router.post("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1})
        assert (status, found["error"]["code"], found["error"]["retryable"]) == (503, "not_scored", True)
    async with router_with(folder, FakeNode("d0", refusal="prompt_logprobs_not_offered")) as router:
        status, found = await router.post("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1})
        assert (status, found["error"]["code"]) == (400, "prompt_logprobs_not_offered")
        assert "prompt_logprobs" in found["error"]["message"]


async def test_grpc_gives_them_in_runs_before_the_first_token(folder: Path) -> None:
    prompt = list(bytes(range(48, 120)) * 8)[:500]
    async with (
        router_with(folder, FakeNode("d0", score_run=64, max_model_len=1024)) as router,
        grpc.aio.insecure_channel(router.grpc_address) as channel,
    ):
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingOptions(max_tokens=2, prompt_logprobs=1),
        )
        stub = inference_pb2_grpc.InferenceStub(channel)
        responses = [response async for response in stub.Generate(request)]
    runs = [response.prompt_logprobs for response in responses if response.HasField("prompt_logprobs")]
    assert [value for run in runs for value in run.logprobs] == values(prompt)[1:]
    assert [token for run in runs for token in run.top_token_ids] == [
        expected_score(prompt, position, 1)[2][0][0] for position in range(1, len(prompt))
    ]
    assert all(run.position == 1 + at * 512 for at, run in enumerate(runs))
    assert not any(response.tokens for response in responses[: len(runs)])
