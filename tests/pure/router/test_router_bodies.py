"""Foreign bytes and any values in any field: understood, or refused with a name; never an exception of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.registry_entry import NodeEntry, decode, encode
from router.generation import RequestRefused, SamplingDefaults, checked_prompt, checked_sampling
from router.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.openai.reading import NEUTRAL_VALUES, read_body

FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *NEUTRAL_VALUES, "nonsense", "__class__"})
NUMBERS = st.one_of(st.integers(-5, 300), st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 1 << 63]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=4),
    ),
    max_leaves=8,
)
LIKELY = {
    "prompt": st.one_of(st.text(min_size=1), st.lists(st.integers(0, 256), min_size=1)),
    "messages": st.just([{"role": "user", "content": "x"}]),
}


def accepted(body: CompletionBody | ChatBody) -> None:
    """What an endpoint does with a body before anything reaches a node."""
    body.choices()
    body.streams()
    wishes = body.wishes()
    if isinstance(body, CompletionBody):
        for prompt in body.prompts():
            if not isinstance(prompt, str):
                checked_prompt("prompt", prompt, vocabulary_size=257, context_limit=512)
    else:
        assert all(isinstance(message.for_template()["content"], str) for message in body.messages)
        assert isinstance(body.template_variables()["add_generation_prompt"], bool)
    sampling = checked_sampling(
        wishes, SamplingDefaults(), prompt_tokens=5, default_max_tokens=16, context_limit=512, vocabulary_size=257
    )
    assert 0 <= sampling.temperature < float("inf")
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k < 1 << 31
    assert 0 <= sampling.seed < 1 << 64
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert 1 <= sampling.max_tokens <= 512 - 5
    assert all(sampling.stop)
    assert 0.01 <= sampling.repetition_penalty <= 100
    assert abs(sampling.presence_penalty) <= 2
    assert abs(sampling.frequency_penalty) <= 2
    assert all(0 <= token < 257 and abs(bias) <= 100 for token, bias in sampling.logit_bias.items())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@settings(deadline=None)
@given(st.data())
def test_any_values_in_any_fields_are_taken_or_refused_by_name(
    kind: type[CompletionBody] | type[ChatBody], data: st.DataObject
) -> None:
    found = data.draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5))
    required = "prompt" if kind is CompletionBody else "messages"
    if data.draw(st.booleans()):
        found = {required: data.draw(LIKELY[required]), **found}
    try:
        accepted(read_body(kind, json.dumps(found).encode()))
    except RequestRefused as refused:
        refusal = refused.refusal
        assert refusal.message
        assert refusal.code
        if refusal.parameter is not None:
            field = refusal.parameter.split(".")[0].split("[")[0]
            assert field in found or field == required
            assert field in refusal.message


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_no_body_or_a_body(raw: bytes) -> None:
    for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
        with pytest.raises(RequestRefused):
            read_body(kind, raw + b"}{")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_f17_any_bytes_are_no_registry_entry_or_one_that_reads_back(raw: bytes) -> None:
    entry = decode(raw)
    assert entry is None or decode(encode(entry)) == entry


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["node_id", "role", "control_address", "incarnation"]), VALUES))
def test_a_registry_entry_is_whole_or_none(found: dict[str, Any]) -> None:
    entry = decode(json.dumps(found))
    assert entry is None or (isinstance(entry, NodeEntry) and decode(encode(entry)) == entry)


def test_the_documentation_names_every_field_that_is_offered_or_refused() -> None:
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    fields = {*CompletionBody.model_fields, *ChatBody.model_fields, *NEUTRAL_VALUES}
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []
