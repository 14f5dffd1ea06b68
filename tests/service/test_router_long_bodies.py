"""Long bodies are read and answered beside the event loop, on which everybody's tokens come."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from router_fake_node import FakeNode
from router_model_folder import CONTEXT_LIMIT, write_model_folder
from router_under_test import RouterUnderTest, router_with

from decant.client import AsyncClient
from router import grammar
from router.intake import LONG_TEXT_CHARACTERS
from router.openai import endpoints, writing
from router.openai.answers import MANY_TOKENS
from router.openai.reading import read_body
from router.tokenizer import ModelText

pytestmark = [pytest.mark.sockets, pytest.mark.asyncio(loop_scope="module")]

LONG = "a" * LONG_TEXT_CHARACTERS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterUnderTest]:
    folder = write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")
    async with router_with(folder, FakeNode("d0")) as router:
        yield router


ROWS = [
    ("/detokenize", {"tokens": [97] * len(LONG)}, {"prompt": LONG}),
    ("/tokenize", {"prompt": LONG, "return_token_strs": True}, {"count": len(LONG), "max_model_len": CONTEXT_LIMIT}),
    ("/detokenize", {"tokens": [97] * 9}, {"prompt": "a" * 9}),
    ("/tokenize", {"prompt": "a"}, {"tokens": [97]}),
    (
        "/v1/completions",
        {"prompt": [LONG[1:], LONG[1:]], "truncate_prompt_tokens": 1, "max_tokens": 1},
        {"object": "text_completion"},
    ),
    ("/v1/completions", {"prompt": [[97] * 400] * 50, "echo": True, "max_tokens": 1}, {"object": "text_completion"}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "max_tokens": 1}, {"object": "text_completion"}),
]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    ROWS,
    ids=["long ids", "long text", "ids", "text", "texts long together", "echoes long together", "texts"],
)
async def test_what_is_long_is_read_tokenized_and_written_in_a_thread(
    served: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, expected: dict[str, Any]
) -> None:
    threads: list[threading.Thread] = []

    def noting(function: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*arguments, **named)

        return noted

    monkeypatch.setattr(endpoints, "read_body", noting(read_body))
    for name in ("encode", "encode_unlocked", "decode_all", "symbols"):
        monkeypatch.setattr(ModelText, name, noting(getattr(ModelText, name)))
    status, found = await served.post(path, body)
    assert status == 200, found
    assert {key: found[key] for key in expected} == expected
    is_long = len(json.dumps(body)) >= LONG_TEXT_CHARACTERS
    assert len(threads) >= 2
    assert {thread is threading.main_thread() for thread in threads} == {not is_long}


@pytest.mark.parametrize("regex", ["a", LONG], ids=["short", "long"])
async def test_a_long_grammar_is_checked_in_a_thread(
    served: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, regex: str
) -> None:
    threads: list[threading.Thread] = []
    checked = grammar.checked

    def noted(parameter: str, written: str) -> str:
        threads.append(threading.current_thread())
        return checked(parameter, written)

    monkeypatch.setattr(grammar, "checked", noted)
    status, found = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_regex": regex})
    assert status == 200, found
    async with AsyncClient(served.grpc_address) as client:
        await client.complete("a", max_tokens=1, regex=regex)
    assert [thread is not threading.main_thread() for thread in threads] == [regex == LONG] * 2


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("tokens", [MANY_TOKENS - 1, MANY_TOKENS])
async def test_an_answer_that_says_something_of_very_many_tokens_is_written_in_a_thread(
    served: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, tokens: int, logprobs: int | None
) -> None:
    threads: list[threading.Thread] = []

    def noting(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def noted(response: Any) -> bytes:
            threads.append(threading.current_thread())
            return encode(response)

        return noted

    for name in ("written", "written_in_slices"):
        monkeypatch.setattr(endpoints, name, noting(getattr(writing, name)))
    body = {"prompt": "a", "max_tokens": tokens, "logprobs": logprobs, "ignore_eos": True}
    status, found = await served.post("/v1/completions", body)
    assert (status, found["usage"]["completion_tokens"]) == (200, tokens)
    in_thread = logprobs is not None and tokens == MANY_TOKENS
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]


async def test_what_is_long_and_wrong_is_refused_by_name(served: RouterUnderTest) -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("/detokenize", {"tokens": [97] * len(LONG) + [257]}, "tokens"),
        ("/tokenize", {"prompt": LONG, "nonsense": 1}, "nonsense"),
        ("/v1/completions", {"prompt": [97] * len(LONG), "nonsense": 1}, "nonsense"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ]
    for path, body, parameter in rows:
        status, found = await served.post(path, body)
        assert (status, found["error"]["param"]) == (400, parameter), found
