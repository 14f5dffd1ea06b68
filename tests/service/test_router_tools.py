"""Tools through the chat template, calls out of the answer, and what a template without tools is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from router_fake_node import FakeNode
from router_model_folder import CHAT_TEMPLATE, write_model_folder
from router_under_test import RouterUnderTest, router_with, until

from foundation.errors import ConfigurationError
from router import tool_calls
from router.tokenizer import ModelText
from router.tool_calls import HermesCalls, Parsed

pytestmark = pytest.mark.sockets

TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}{{ newline }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ newline }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
).replace("newline", "'\n'")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Ulm"}'
CALL = f'Hm. <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "rain?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tools") / "tiny-model", chat_template=TOOL_TEMPLATE)


def saying(text: str) -> FakeNode:
    return FakeNode("d0", script=[*text.encode(), 256])


async def chat(router: RouterUnderTest, **asked: Any) -> Any:
    ask = router.openai().chat.completions.create
    return await ask(model=router.model, **{"messages": ASK, "tools": [TOOL], **asked})


async def test_a_call_in_a_whole_answer(folder: Path) -> None:
    node = saying(CALL)
    async with router_with(folder, node) as router:
        choice = (await chat(router)).choices[0]
    assert bytes(node.submits[0].prompt_token_ids).decode() == f"TOOL {json.dumps(TOOL)}\nuser: rain?\nassistant: "
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Hm. ")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    assert call.id


async def test_a_call_in_a_stream(folder: Path) -> None:
    async with router_with(folder, saying(CALL)) as router:
        chunks = [chunk.choices[0] async for chunk in await chat(router, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Hm. "
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert (deltas[0].function.name, bool(deltas[0].id)) == ("weather", True)
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == ARGUMENTS
    assert len(deltas) > 2
    assert chunks[-1].finish_reason == "tool_calls"


async def test_f28_a_stream_that_fails_inside_the_router_ends_with_an_error_and_harms_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(HermesCalls):
        def add(self, text: str) -> Parsed:
            assert "e" not in text, "a bug"
            return super().add(text)

    monkeypatch.setitem(tool_calls.PARSERS, "hermes", Failing)
    node = saying("fine words, all of them")
    body = {"messages": ASK, "max_tokens": 30, "stream": True}
    async with router_with(folder, node) as router:
        node.tokens_until_pause = 3
        posts = [
            router.http.post(f"{router.url}/v1/chat/completions", json=body | asked)
            for asked in ({"tools": [TOOL]}, {})
        ]
        asking = [asyncio.ensure_future(post) for post in posts]
        await router.heard(3, requests=2)
        node.tokens_until_pause = None
        failed, other = [await (await response).text() for response in asking]
        assert [json.loads(line[6:]) for line in failed.split("\n\n") if line][-1]["error"]["code"] == "internal_error"
        assert other.endswith("data: [DONE]\n\n")
        await until(lambda: node.cancels)
        assert (node.attached, [cancel.reason for cancel in node.cancels]) == (1, ["client_left"])


async def test_the_answer_of_a_tool_goes_back_to_the_model(folder: Path) -> None:
    node = saying("fine")
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
    ]
    async with router_with(folder, node) as router:
        choice = (await chat(router, messages=history)).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "fine", None)
    prompt = bytes(node.submits[0].prompt_token_ids).decode()
    assert prompt.endswith(f"user: rain?\nassistant: CALL weather {ARGUMENTS}\ntool: dry\nassistant: ")


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_call_that_is_asked_for_is_decided_by_a_grammar(folder: Path, choice: Any, finish: str) -> None:
    node = saying(CALL[4:])
    async with router_with(folder, node) as router:
        found = (await chat(router, tool_choice=choice)).choices[0]
    assert LLMatcher.validate_grammar(node.submits[0].sampling.grammar) == ""
    assert "weather" in node.submits[0].sampling.grammar
    assert (found.finish_reason, found.message.content) == (finish, None)
    assert found.message.tool_calls[0].function.arguments == ARGUMENTS


async def test_without_a_choice_of_tools_the_text_stays_as_it_is(folder: Path) -> None:
    node = saying(CALL)
    async with router_with(folder, node) as router:
        found = (await chat(router, tool_choice="none")).choices[0]
    assert (found.finish_reason, found.message.content, found.message.tool_calls) == ("stop", CALL, None)
    assert node.submits[0].sampling.grammar == ""


async def test_one_call_at_most_where_parallel_calls_are_not_wanted(folder: Path) -> None:
    async with router_with(folder, saying(CALL + CALL)) as router:
        found = (await chat(router, parallel_tool_calls=False)).choices[0]
        both = (await chat(router)).choices[0]
    assert (len(found.message.tool_calls), len(both.message.tool_calls)) == (1, 2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a choice without tools": ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    "a choice of another tool": ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    "a choice of nothing": ({"tool_choice": "maybe"}, "tool_choice"),
    "a call and a form of the text": (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    "a schema that is none": (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
        },
        "tools",
    ),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a tool of another type": ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    "arguments that are no JSON": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}, "type": "function"}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "calls of a user": (
        {
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
            ]
        },
        "messages[0].tool_calls",
    ),
    "an id of no tool": (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
        "messages[0].tool_call_id",
    ),
    "documents": ({"documents": [{"text": "x"}]}, "documents"),
}


async def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    node = saying("x")
    async with router_with(folder, node) as router:
        for name, (asked, parameter) in REFUSED.items():
            body = {"messages": ASK, "tools": [TOOL], **asked}
            status, found = await router.post("/v1/chat/completions", body)
            assert (status, found["error"]["param"]) == (400, parameter), (name, found)
            assert parameter.split("[")[0] in found["error"]["message"]
    assert not node.submits


async def test_a_template_without_tools_is_told_so_and_another_may_be_set(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", chat_template=CHAT_TEMPLATE)
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    async with router_with(folder, saying(CALL)) as router:
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(router)
        assert refused.value.param == "tools"
        status, found = await router.post("/v1/chat/completions", {"messages": [*ASK, called]})
        assert (status, found["error"]["param"]) == (400, "messages[1].tool_calls")
    template = tmp_path / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    text = ModelText.from_folder(folder, template)
    assert "TOOL" in text.render_chat(ASK, {"tools": [TOOL]})
    template.write_text("{% for %}")
    for file in (template, tmp_path / "nowhere"):
        with pytest.raises(ConfigurationError) as wrong:
            ModelText.from_folder(folder, file)
        assert wrong.value.setting == "--chat-template"


async def test_tools_count_among_a_chats_tokens(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0")) as router:
        body = {"messages": ASK, "tools": [TOOL], "add_generation_prompt": False, "return_token_strs": True}
        status, found = await router.post("/tokenize", body)
    text = f"TOOL {json.dumps(TOOL)}\nuser: rain?\n"
    assert (status, found["count"], found["tokens"]) == (200, len(text), list(text.encode()))
    assert (found["token_strs"][0], len(found["token_strs"])) == ("T", len(text))


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}'),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ],
)
async def test_a_models_own_form_is_read_and_a_forced_call_in_the_form_that_is_forced(
    folder: Path, parser: str, text: str
) -> None:
    for said, choice in ((text, "auto"), (CALL[4:], "required")):
        async with router_with(folder, saying(said), tool_call_parser=parser) as router:
            answer = (await chat(router, tool_choice=choice)).choices[0]
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert answer.finish_reason == "tool_calls"
        assert (len(call.id) == 9) is (parser == "mistral")
