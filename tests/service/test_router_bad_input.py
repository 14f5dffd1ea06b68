"""Every wrong request gets one clear OpenAI-style error that names the field, and nothing reaches a node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from router_fake_node import FakeNode
from router_model_folder import CONTEXT_LIMIT, write_model_folder
from router_under_test import RouterUnderTest, router_with

pytestmark = [pytest.mark.sockets, pytest.mark.asyncio(loop_scope="module")]

BODY_LIMIT = 64 * 1024
MODEL = "tiny-model"
PROMPT = {"model": MODEL, "prompt": "x", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
HUGE = 10**400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RouterUnderTest, FakeNode]]:
    folder = write_model_folder(tmp_path_factory.mktemp("router") / MODEL)
    node = FakeNode("d0")
    async with router_with(folder, node, max_body_bytes=BODY_LIMIT) as router:
        yield router, node


COMPLETION_ROWS: list[tuple[str, Any, str | None]] = [
    ("negative temperature", {"temperature": -0.1}, "temperature"),
    ("infinite temperature", b'{"model":"tiny-model","prompt":"x","temperature":1e999}', "temperature"),
    ("temperature that is not a number", b'{"model":"tiny-model","prompt":"x","temperature":NaN}', None),
    ("temperature of the wrong type", {"temperature": "hot"}, "temperature"),
    ("a temperature that divides everything into nothing", {"temperature": 1e39}, "temperature"),
    ("temperature too large for a float", {"temperature": HUGE}, "temperature"),
    ("top_p of zero", {"top_p": 0}, "top_p"),
    ("top_p above one", {"top_p": 1.5}, "top_p"),
    ("min_p below zero", {"min_p": -1}, "min_p"),
    ("top_k below minus one", {"top_k": -2}, "top_k"),
    ("top_k with a fraction", {"top_k": 1.5}, "top_k"),
    ("no token wanted", {"max_tokens": 0}, "max_tokens"),
    ("max_tokens as text", {"max_tokens": "5"}, "max_tokens"),
    ("max_tokens as a truth value", {"max_tokens": True}, "max_tokens"),
    ("max_tokens beyond any number", {"max_tokens": HUGE}, "max_tokens"),
    ("max_tokens beyond the context", {"max_tokens": CONTEXT_LIMIT}, "max_tokens"),
    ("F20 min_tokens beyond max_tokens", {"min_tokens": 3}, "min_tokens"),
    ("negative min_tokens", {"min_tokens": -1}, "min_tokens"),
    ("a seed beyond 64 bits", {"seed": 1 << 64}, "seed"),
    ("too many log probabilities", {"logprobs": 21}, "logprobs"),
    ("an empty stop string", {"stop": ["a", ""]}, "stop"),
    ("a stop that is no string", {"stop": [1]}, "stop"),
    ("a stop token outside the vocabulary", {"stop_token_ids": [257]}, "stop_token_ids"),
    ("stop tokens that are no list", {"stop_token_ids": 5}, "stop_token_ids"),
    ("no choice wanted", {"n": 0}, "n"),
    ("too many choices", {"n": 129}, "n"),
    ("too many choices of several prompts", {"n": 65, "prompt": ["a", "b"]}, "n"),
    ("options of a stream that is none", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("a stream that is no truth value", {"stream": "yes"}, "stream"),
    ("an unknown stream option", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ("an empty prompt", {"prompt": ""}, "prompt"),
    ("no prompt in the list", {"prompt": []}, "prompt"),
    ("an empty prompt in the list", {"prompt": ["a", ""]}, "prompt"),
    ("a prompt without tokens", {"prompt": [[]]}, "prompt"),
    ("null as prompt", {"prompt": None}, "prompt"),
    ("a number as prompt", {"prompt": 5}, "prompt"),
    ("strings and tokens mixed", {"prompt": ["a", 5]}, "prompt"),
    ("a token outside the vocabulary", {"prompt": [5, 257]}, "prompt"),
    ("a negative token", {"prompt": [-1]}, "prompt"),
    ("half a surrogate pair", b'{"model":"tiny-model","prompt":"\\ud800"}', "prompt"),
    ("half a character as a stop", {"stop": ["a", "\ud800"]}, "stop"),
    ("half a character in a pattern", {"guided_regex": "a\ud800"}, "guided_regex"),
    ("half a character in a grammar", {"guided_grammar": 'start: "\udfff"'}, "guided_grammar"),
    ("half a character in a schema", {"guided_json": {"enum": ["\ud800"]}}, "guided_json"),
    ("a field twice", b'{"model":"tiny-model","prompt":"x","temperature":9,"temperature":1}', None),
    ("a nested field twice", b'{"model":"tiny-model","prompt":"x","logit_bias":{"5":1,"5":2}}', None),
    ("half a character in bytes", b'{"model":"tiny-model","prompt":"\xed\xa0\x80"}', None),
    ("another encoding", '{"model":"tiny-model","prompt":"x"}'.encode("utf-16"), None),
    ("a prompt as long as the context", {"prompt": "x" * CONTEXT_LIMIT}, "prompt"),
    ("no prompt at all", b'{"model":"tiny-model"}', "prompt"),
    ("an unknown field", {"temprature": 1}, "temprature"),
    ("F18 transfer parameters", {"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params"),
    ("F18 a request id", {"request_id": "mine"}, "request_id"),
    ("several choices that echo log probabilities", {"n": 2, "echo": True, "logprobs": 1, "stream": True}, "n"),
    ("a stream of prompt_logprobs", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("too many log probabilities of the prompt", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("log probabilities of the whole vocabulary", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("nothing to be said at all", {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ("best_of", {"best_of": 2}, "best_of"),
    ("a truth value is not one", {"best_of": True}, "best_of"),
    ("a frequency penalty over its range", {"frequency_penalty": 2.5}, "frequency_penalty"),
    ("a presence penalty that is text", {"presence_penalty": "1"}, "presence_penalty"),
    ("no repetition penalty", {"repetition_penalty": 0}, "repetition_penalty"),
    ("a repetition penalty without bounds", {"repetition_penalty": 1e300}, "repetition_penalty"),
    ("a bias for a token outside the vocabulary", {"logit_bias": {"257": 1}}, "logit_bias"),
    ("a bias for a word", {"logit_bias": {"yes": 1}}, "logit_bias"),
    ("a bias for one token twice", {"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ("a bias over its range", {"logit_bias": {"5": -101}}, "logit_bias"),
    ("a format that nobody knows", {"response_format": {"type": "yaml"}}, "response_format.type"),
    ("a schema that is missing", {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        "a schema that is none",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "response_format",
    ),
    ("text that is no schema", {"guided_json": "nonsense"}, "guided_json"),
    ("a regular expression that is none", {"guided_regex": "(ab"}, "guided_regex"),
    ("no choice", {"guided_choice": []}, "guided_choice"),
    ("two grammars", {"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ("a grammar without end", {"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ("a grammar and a least length", {"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ("an allowed token outside the vocabulary", {"allowed_token_ids": [257]}, "allowed_token_ids"),
    ("more allowed tokens than there are", {"allowed_token_ids": [97] * 258}, "allowed_token_ids"),
    ("allowed tokens that are all bad words", {"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    ("allowed tokens that are text", {"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
    ("allowed tokens and a grammar", {"allowed_token_ids": [97], "guided_regex": "a"}, "allowed_token_ids"),
    ("a bad word of spaces", {"bad_words": ["  "]}, "bad_words"),
    ("too many bad words", {"bad_words": ["a"] * 65}, "bad_words"),
    ("a bad word without bounds", {"bad_words": ["a" * 65]}, "bad_words"),
    ("bad words and a grammar", {"bad_words": ["b"], "guided_regex": "a"}, "bad_words"),
    ("no token of the prompt", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("a side without a length", {"truncation_side": "left"}, "truncation_side"),
    ("a side that is none", {"truncation_side": "up", "truncate_prompt_tokens": 3}, "truncation_side"),
    ("tools of a completion", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("a chat's field", {"messages": []}, "messages"),
    ("malformed JSON", b'{"model": ', None),
    ("no JSON object", b"[1, 2]", None),
    ("no JSON at all", b"\x00\xff\xfe", None),
    ("an empty body", b"", None),
    ("JSON nested without end", b"[" * 30_000, None),
]

CHAT_ROWS: list[tuple[str, Any, str | None]] = [
    ("no message", {"messages": []}, "messages"),
    ("messages that are no list", {"messages": "hi"}, "messages"),
    ("a message that is no object", {"messages": ["hi"]}, "messages[0]"),
    ("an unknown role", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    ("a message without content", {"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        "a picture",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    ("content that is a number", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        "a part with what no text has",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "extra": 1}]}]},
        "messages[0].content",
    ),
    ("top_logprobs without logprobs", {"top_logprobs": 2}, "top_logprobs"),
    ("too many top_logprobs", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("logprobs as a number", {"logprobs": 2}, "logprobs"),
    ("max_completion_tokens of zero", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("a chat longer than the context", {"messages": [{"role": "user", "content": "x" * CONTEXT_LIMIT}]}, "messages"),
    ("a plain prompt", {"prompt": "x"}, "prompt"),
    (
        "a turn that is opened and continued",
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]


def nested(depth: int) -> bytes:
    schema = b'{"a":' * depth + b"1" + b"}" * depth
    form = b'{"type":"json_schema","json_schema":{"name":"x","schema":%b}}' % schema
    return b'{"model":"tiny-model","prompt":"x","response_format":%b}' % form


async def refused(served: tuple[RouterUnderTest, FakeNode], path: str, body: Any, parameter: str | None) -> None:
    router, node = served
    before = len(node.submits)
    status, found = await router.post(path, body)
    error = found["error"]
    assert status == 400, found
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if parameter is None:
        assert error["code"] == "malformed_json"
    else:
        assert str(error["param"]).startswith(parameter)
        assert parameter.split("[")[0] in error["message"]
    assert isinstance(error["code"], str)
    assert "Traceback" not in error["message"]
    assert len(node.submits) == before


@pytest.mark.parametrize(
    ("body", "parameter"), [row[1:] for row in COMPLETION_ROWS], ids=[row[0] for row in COMPLETION_ROWS]
)
async def test_a_wrong_completion_is_refused_by_name(
    served: tuple[RouterUnderTest, FakeNode], body: Any, parameter: str | None
) -> None:
    await refused(served, "/v1/completions", body if isinstance(body, bytes) else {**PROMPT, **body}, parameter)


@pytest.mark.parametrize(("body", "parameter"), [row[1:] for row in CHAT_ROWS], ids=[row[0] for row in CHAT_ROWS])
async def test_a_wrong_chat_is_refused_by_name(
    served: tuple[RouterUnderTest, FakeNode], body: Any, parameter: str | None
) -> None:
    await refused(served, "/v1/chat/completions", {**CHAT, **body}, parameter)


async def test_a_schema_is_refused_by_name_however_deep_it_is(served: tuple[RouterUnderTest, FakeNode]) -> None:
    """Also where it can just be read, and not be written again."""
    router, _ = served
    codes = set()
    for depth in range(880, 1000):
        status, found = await router.post("/v1/completions", nested(depth))
        assert status == 400, (depth, found)
        codes.add(found["error"]["code"])
    assert codes == {"invalid_value", "malformed_json"}


async def test_a_body_that_is_not_what_its_head_says_is_400(served: tuple[RouterUnderTest, FakeNode]) -> None:
    router, _ = served
    headers = {"Content-Encoding": "gzip", "X-Request-Id": "mine"}
    async with router.http.post(f"{router.url}/v1/completions", data=b"no gzip", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "malformed_body")
        assert response.headers["X-Request-Id"] == "mine", "refusals bear the client's name for the request too"


async def test_f17_a_body_that_cannot_be_read_leaves_no_traceback(
    served: tuple[RouterUnderTest, FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    router, _ = served
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: 10\r\n\r\n"
    writer.write(head + b"no deflate")
    async with asyncio.timeout(5):
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_an_answer_may_be_handed_back_with_what_is_empty_in_it(
    served: tuple[RouterUnderTest, FakeNode],
) -> None:
    router, _ = served
    answer = await router.openai().chat.completions.create(**CHAT)
    message = answer.choices[0].message.model_dump()
    status, found = await router.post("/v1/chat/completions", {**CHAT, "messages": [*CHAT["messages"], message]})
    assert status == 200, found


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "echo": False,
    "best_of": 1,
    "logit_bias": None,
    "suffix": None,
    "skip_special_tokens": True,
    "user": "somebody",
    "top_k": -1,
    "n": None,
}


async def test_values_that_change_nothing_are_taken(served: tuple[RouterUnderTest, FakeNode]) -> None:
    router, _ = served
    status, found = await router.post("/v1/completions", {**PROMPT, **NEUTRAL})
    assert status == 200, found


async def test_an_unknown_model_is_404(served: tuple[RouterUnderTest, FakeNode]) -> None:
    router, _ = served
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        status, found = await router.post(path, {**body, "model": "other"})
        assert (status, found["error"]["param"], found["error"]["code"]) == (404, "model", "model_not_found")
    assert (await router.get("/v1/models/other"))[0] == 404


async def test_a_body_over_the_limit_is_413(served: tuple[RouterUnderTest, FakeNode]) -> None:
    router, _ = served
    status, found = await router.post("/v1/completions", {**PROMPT, "prompt": "x" * BODY_LIMIT})
    assert (status, found["error"]["code"]) == (413, "body_too_large")
    assert str(BODY_LIMIT) in found["error"]["message"]


async def test_wrong_paths_and_methods_have_the_same_form(served: tuple[RouterUnderTest, FakeNode]) -> None:
    router, _ = served
    assert (await router.post("/v1/nothing", {}))[0] == 404
    async with router.http.get(f"{router.url}/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    async with asyncio.timeout(20), router.http.head(f"{router.url}/ui/events") as response:
        assert response.status == 404, "nobody can look without reading"
    assert router.router._live_page._viewers == 0


async def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / MODEL, chat_template=None)
    async with router_with(folder, FakeNode("d0")) as router:
        status, found = await router.post("/v1/chat/completions", CHAT)
        assert (status, found["error"]["code"]) == (400, "no_chat_template")
        assert "no chat template" in found["error"]["message"]
        assert (await router.post("/v1/completions", PROMPT))[0] == 200


async def test_a_template_that_refuses_messages_is_quoted(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / MODEL, chat_template="{{ raise_exception('roles must alternate') }}")
    async with router_with(folder, FakeNode("d0")) as router:
        status, found = await router.post("/v1/chat/completions", CHAT)
    assert status == 400
    assert "roles must alternate" in found["error"]["message"]


GARBAGE = (
    b"\x00" * 4096,
    b"\xff" * 4096,
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x7f" * 999,
)


async def test_f17_garbage_on_both_ports_closes_the_connection_and_harms_nobody(
    served: tuple[RouterUnderTest, FakeNode],
) -> None:
    router, _ = served
    http_port, grpc_port = router.url.rsplit(":", 1)[1], router.grpc_address.rsplit(":", 1)[1]
    for port in (int(http_port), int(grpc_port)):
        for garbage in GARBAGE:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            writer.write_eof()
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            writer.close()
    assert (await router.post("/v1/completions", PROMPT))[0] == 200
