"""Several choices of one prompt: placed together, so that it is computed once; counted once; each fails over by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from router_fake_node import FakeNode, expected_answer
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until

from foundation.registry_entry import Role

pytestmark = pytest.mark.sockets

PROMPT = "a prompt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("choices") / "tiny-model")


def answer(choice: int, tokens: int = 12, seed: int = 4) -> str:
    return bytes(expected_answer(list(PROMPT.encode()), tokens, seed, choice)).decode()


async def streamed(router: RouterUnderTest, choices: int) -> tuple[list[str], int]:
    stream = await router.openai().completions.create(
        model=router.model,
        prompt=PROMPT,
        n=choices,
        max_tokens=12,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, prompt_tokens = [""] * choices, 0
    async for chunk in stream:
        for one in chunk.choices:
            texts[one.index] += one.text
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
    return texts, prompt_tokens


async def test_the_first_choice_gets_the_prompts_kv_and_the_others_share_it(folder: Path) -> None:
    node, other, prefill = FakeNode("d0"), FakeNode("d1"), FakeNode("p0", role=Role.PREFILL)
    async with router_with(folder, node, other, prefill) as router:
        texts, prompt_tokens = await streamed(router, 4)
        assert await router.metric("decant_prompt_tokens_total") == len(PROMPT)
        assert await router.metric('decant_placements_total{reason="fork"}') == 3
    assert texts == [answer(choice) for choice in range(4)]
    assert prompt_tokens == len(PROMPT)
    leader, *followers = node.submits or other.submits
    assert (leader.choices, leader.fork_of, len(leader.prefill_choices), leader.choice_index) == (4, "", 1, 0)
    assert [one.choice_index for one in followers] == [1, 2, 3]
    for one in followers:
        assert (one.fork_of, one.fork_attempt, one.choices) == (leader.request_id, 1, 1)
        assert not one.prefill_choices
    assert len({one.request_id for one in (leader, *followers)}) == 4


async def test_prompts_are_families_of_their_own_and_single_answers_are_none(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        complete = router.openai().completions.create
        await complete(model=router.model, prompt=["one", "two"], n=2, max_tokens=2)
        await complete(model=router.model, prompt="one", max_tokens=2)
    first, second, third, fourth, alone = node.submits
    assert (second.fork_of, fourth.fork_of) == (first.request_id, third.request_id)
    assert (first.fork_of, third.fork_of, alone.fork_of, alone.choices) == ("", "", "", 1)


async def test_f05_every_choice_goes_on_elsewhere_and_they_meet_there_again(folder: Path) -> None:
    nodes = [FakeNode("d0", tokens_until_pause=5), FakeNode("d1", tokens_until_pause=5)]
    async with router_with(folder, *nodes) as router:
        asking = asyncio.ensure_future(streamed(router, 3))
        await router.heard(5, requests=3)
        victim, other = nodes if nodes[0].submits else nodes[::-1]
        other.tokens_until_pause = None
        await victim.kill()
        texts, _ = await asking
        await victim.start()
    assert texts == [answer(choice) for choice in range(3)]
    leaders = [one for one in other.submits if not one.fork_of]
    assert len(leaders) == 1, "one choice has the prompt computed, the others share it"
    assert {one.fork_of for one in other.submits if one.fork_of} == {leaders[0].request_id}
    assert all(len(one.settled_token_ids) == 5 for one in other.submits)


async def test_choices_wait_as_one_prompt(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=0)
    async with router_with(folder, node, max_waiting_tokens=2 * len(PROMPT)) as router:
        asking = asyncio.ensure_future(streamed(router, 3))
        await until(lambda: len(node.submits) == 3)
        two = asyncio.ensure_future(router.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "n": 2}))
        await until(lambda: len(node.submits) == 5)
        status, found = await router.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        assert (status, found["error"]["code"]) == (503, "overloaded"), "two prompts wait, and no third one may"
        node.tokens_until_pause = None
        await asking
        assert (await two)[0] == 200


async def test_the_log_probabilities_of_each_choice_are_its_own(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        found = await router.openai().completions.create(
            model=router.model, prompt=PROMPT, n=2, max_tokens=12, seed=4, logprobs=1
        )
        _, named = await router.post(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 3, "seed": 4, "logprobs": 0, "return_tokens_as_token_ids": True},
        )
    for index, choice in enumerate(found.choices):
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == answer(index)
    assert named["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ord(letter)}" for letter in answer(0, 3)]


async def test_prompts_are_cut_to_as_many_tokens_as_are_wanted(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        for asked in (
            {"truncate_prompt_tokens": 3},
            {"truncate_prompt_tokens": 3, "truncation_side": "right"},
            {"truncate_prompt_tokens": -1, "prompt": "y" * 600 + PROMPT},
        ):
            status, found = await router.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **asked})
            assert status == 200, found
    kept = [bytes(one.prompt_token_ids).decode() for one in node.submits]
    assert kept[:2] == [PROMPT[-3:], PROMPT[:3]]
    assert (len(kept[2]), kept[2][-len(PROMPT) :]) == (510, PROMPT)


async def test_allowed_tokens_and_bad_words_reach_the_node(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        body = {"prompt": PROMPT, "max_tokens": 1, "allowed_token_ids": [9, 7, 9], "bad_words": ["no", " x"]}
        assert (await router.post("/v1/completions", body))[0] == 200
    sampling = node.submits[0].sampling
    assert list(sampling.allowed_token_ids) == [7, 9]
    # One byte a token here, so a space before a word makes it longer, and only the bare one is banned.
    assert [bytes(word.ids) for word in sampling.bad_words] == [b"no", b"x"]
