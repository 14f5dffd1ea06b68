"""decant.client and the commands made of it, against a router with fake nodes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import pytest
from router_fake_node import FakeNode, expected_answer
from router_model_folder import write_model_folder
from router_under_test import router_with, until

from decant.client import ApiError, AsyncClient, Client, Completion, Piece
from foundation.registry_entry import Role

pytestmark = pytest.mark.sockets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")


def text(prompt: str, count: int, seed: int) -> str:
    return bytes(expected_answer(list(prompt.encode()), count, seed)).decode()


async def test_both_clients_give_the_same_answer_to_each_form_of_a_prompt(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        chat = [("user", "hi")]
        rendered = "user: hi\nassistant: "

        def blocking() -> list[Completion]:
            with Client(router.grpc_address) as client:
                prompts = ("hello", list(b"hello"), chat)
                return [client.complete(prompt, seed=3, max_tokens=12) for prompt in prompts]

        answers = await asyncio.to_thread(blocking)
        async with AsyncClient(router.grpc_address) as client:
            assert await client.complete("hello", seed=3, max_tokens=12, logprobs=0) is not None
            pieces = [piece async for piece in client.generate("hello", seed=3, max_tokens=12)]
    assert [answer.text for answer in answers] == [text("hello", 12, 3), text("hello", 12, 3), text(rendered, 12, 3)]
    assert answers[0].finish_reason == "length"
    assert (answers[0].usage.prompt_tokens, answers[0].usage.completion_tokens) == (5, 12)
    assert "".join(piece.text for piece in pieces) == answers[0].text
    assert pieces[-1].usage == answers[0].usage


async def test_several_answers_share_one_prompt_and_each_has_its_own_usage(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router, AsyncClient(router.grpc_address) as client:
        answers = await client.choices("hello", 3, seed=3, max_tokens=12)
        pieces = [piece async for piece in client.generate("hello", n=3, seed=3, max_tokens=12)]
    expected = [bytes(expected_answer(list(b"hello"), 12, 3, choice)).decode() for choice in range(3)]
    assert [answer.text for answer in answers] == expected
    assert [(answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in answers] == [(5, 12)] * 3
    assert ["".join(piece.text for piece in pieces if piece.index == index) for index in range(3)] == expected
    leader, *followers = node.submits[:3]
    assert (leader.choices, {one.fork_of for one in followers}) == (3, {leader.request_id})
    assert len({answer.request_id for answer in answers}) == 3


async def test_a_request_of_several_answers_ends_as_one(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=2)
    async with router_with(folder, node) as router, AsyncClient(router.grpc_address) as client:
        asking = asyncio.ensure_future(client.choices("hello", 3, max_tokens=12))
        await router.heard(2, requests=3)
        assert await client.cancel(node.submits[1].request_id)
        with pytest.raises(ApiError) as raised:
            await asking
        assert raised.value.code == "cancelled"
        await until(lambda: not node.requests)
        assert router.router.dispatcher.in_flight == 0


async def test_what_an_answer_must_follow_or_may_not_hold_reaches_the_node(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router, AsyncClient(router.grpc_address) as client:
        await client.complete("x", max_tokens=1, allowed_token_ids=[98, 97], bad_words=["no"], logit_bias={97: 1.0})
        await client.complete("x", max_tokens=1, json_schema={"type": "integer"})
        await client.complete("x", max_tokens=1, choice=["yes", "no"])
        await client.complete("x", max_tokens=1, grammar='start: "a"', include_stop_str_in_output=True)
        with pytest.raises(ApiError, match="grammar"):
            await client.complete("x", grammar="start: nothing")
    first, *others = [submit.sampling for submit in node.submits]
    assert list(first.allowed_token_ids) == [97, 98]
    assert [bytes(word.ids) for word in first.bad_words] == [b"no"]
    assert all(one.grammar for one in others)


async def test_a_refusal_is_an_error_with_code_and_field(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router, AsyncClient(router.grpc_address) as client:
        with pytest.raises(ApiError, match="temperature") as raised:
            await client.complete("hello", temperature=-1.0)
        assert raised.value.status is grpc.StatusCode.INVALID_ARGUMENT
        assert not raised.value.retryable
    with pytest.raises(ApiError) as unreachable:
        await asyncio.to_thread(Client("127.0.0.1:1").complete, "hello")
    assert unreachable.value.retryable


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_request_is_cancelled_by_its_id_before_its_first_token_and_in_the_middle(
    folder: Path, tokens: int
) -> None:
    node = FakeNode("d0", tokens_until_pause=tokens)
    async with router_with(folder, node) as router, AsyncClient(router.grpc_address) as client:
        read: list[Piece] = []

        async def reads() -> None:
            async for piece in client.generate("hello", max_tokens=12):
                read.append(piece)  # noqa: PERF401  (what came before the error counts)

        reading = asyncio.create_task(reads())
        await until(lambda: len(node.submits) == 1)
        if tokens:
            await router.heard(tokens)
        request_id = (await client.requests())[0].request_id
        assert await client.cancel(request_id)
        with pytest.raises(ApiError) as raised:
            await reading
        assert raised.value.status is grpc.StatusCode.CANCELLED
        assert sum(len(piece.token_ids) for piece in read) <= tokens
        await until(lambda: len(node.cancels) == 1)
        assert not await client.cancel(request_id)


async def test_operators_see_nodes_and_requests_and_spare_a_node(folder: Path) -> None:
    first, second = FakeNode("d0", tokens_until_pause=0), FakeNode("d1", tokens_until_pause=0)
    prefill = FakeNode("p0", Role.PREFILL)
    async with (
        router_with(folder, first, second, prefill) as router,
        AsyncClient(router.grpc_address) as client,
    ):
        assert {(view.node_id, view.role, view.refusal) for view in await client.nodes()} == {
            ("d0", "decode", ""),
            ("d1", "decode", ""),
            ("p0", "prefill", ""),
        }
        assert await client.drain("d0") == 0
        assert {view.node_id: view.refusal for view in await client.nodes()}["d0"] == "node_withheld"
        asking = [
            asyncio.create_task(router.http.post(f"{router.url}/v1/completions", json=body, headers=headers))
            for body, headers in [({"prompt": "x", "max_tokens": 1}, {"X-Request-Id": "mine"})] * 2
        ]
        await until(lambda: len(second.submits) == 2)
        assert first.submits == []
        views = await client.requests("mine", waiting=True)
        assert [(view.waits_on, view.computed_on, view.placed_because) for view in views] == [
            ("d1", "p0", "unmeasured")
        ] * 2
        assert [view.request_id for view in await client.requests(f"cmpl-{views[0].request_id}")] == [
            views[0].request_id
        ]
        assert await client.drain("d0", resume=True) == 0
        with pytest.raises(ApiError, match="d9"):
            await client.drain("d9")
        first.tokens_until_pause = second.tokens_until_pause = None
        assert [(await answer).status for answer in asking] == [200, 200]


async def decant(*arguments: str, given: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "decant", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(given.encode()), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_the_commands_speak_to_a_router(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        where = f"--router={router.grpc_address}"
        code, out, _ = await decant("complete", where, "--seed=3", "--max-tokens=12", "hello")
        assert (code, out) == (0, text("hello", 12, 3) + "\n")
        code, out, _ = await decant("chat", where, "--seed=3", "--max-tokens=6", given="hi\nmore\n\n")
        first = text("user: hi\nassistant: ", 6, 3)
        assert (code, out.splitlines()[0]) == (0, first)
        assert f"assistant: {first}\nuser: more" in bytes(node.submits[-1].prompt_token_ids).decode()
        code, _, errors = await decant("complete", where, "--temperature=-1", "hello")
        assert code == 1
        assert "temperature" in errors
        node.tokens_until_pause = 0
        waiting = asyncio.create_task(router.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
        await until(lambda: len(node.requests) == 1)
        code, out, _ = await decant("why", where, node.submits[-1].request_id)
        assert code == 0
        assert "waits on d0 for its first token" in out
        assert "computed there (no_prefill_node)" in out
        assert (await decant("why", where, "nobody"))[0] == 1
        node.tokens_until_pause = None
        assert (await waiting)[0] == 200
