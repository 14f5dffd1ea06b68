"""From a body's bytes to one of `bodies`, or a refusal that names the field.

Nothing is silently ignored: a field that is unknown is refused by name, and so is one that other servers know and this one does
not, unless it has the value that changes nothing.

Must not know: what the fields mean.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from router.generation import RequestRefused, invalid
from router.openai.parts import Body

_OFF: tuple[Any, ...] = (None, False, 0, [], {})
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "length_penalty": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "use_beam_search": _OFF,
    "prompt_embeds": (None,),
    "spaces_between_special_tokens": (None, True),
    "echo": (None, False),
    "include_reasoning": (None, True),
    "thinking_token_budget": (None,),
    "watermarking": (None, False),
    "logprob_token_ids": (None, []),
    "session_id": (None,),
    "stream_interval": (None, 1),
    "return_token_offsets": _OFF,
    "return_prompt_text": _OFF,
    "mm_payload": (None, "tensors"),
    "return_mm_kwargs": _OFF,
    "media_io_kwargs": (None, {}),
    "routed_experts_prompt_start": _OFF,
    "ec_transfer_params": (None,),
    "repetition_detection": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "prompt_cache_key": (None,),
    "safety_identifier": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "cache_salt": (None,),
    "priority": _OFF,
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    "logits_processors": (None, []),
    "request_id": (None,),
}
"""Fields of vLLM's and OpenAI's APIs that are not offered here, with the values under which they ask for nothing."""

LONGEST_NAME_SHOWN = 64

BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Raises RequestRefused for malformed JSON, a wrong type, an unknown field or one that is not offered."""
    try:
        # Decoded here: left to itself, json also takes UTF-16, and bytes of half a character.
        found = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_twins)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", "malformed_json") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body must be a JSON object, not {_json_noun(found)}", "malformed_json")
    if b"\\ud" in raw.lower():
        _refuse_half_characters(found)
    offered = kind.model_fields
    for name in [name for name in found if name not in offered]:
        if name not in NEUTRAL_VALUES:
            raise invalid(name, f"unknown field: {name}", "unknown_parameter")
        if not _is_neutral(found[name], NEUTRAL_VALUES[name]):
            raise invalid(name, f"{name} is not offered by this server", "unsupported_parameter")
        del found[name]
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _wrong_field(error) from None


def _is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    # True == 1 and False == 0 in Python, but not on the wire: `best_of: true` asks for something else than 1.
    return any(value == one and (isinstance(value, bool) == isinstance(one, bool) or one is False) for one in neutral)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one name one would be ignored, and whoever has read the body before us may have taken the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twin[:LONGEST_NAME_SHOWN]!r} stands twice in one object")
    return found


def _refuse_half_characters(found: dict[str, Any]) -> None:
    r"""An escape like \ud800 alone is no character: no tokenizer, grammar or file takes it."""
    for name, value in found.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise invalid(name, f"{name} holds half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise invalid(name, f"{name} is nested too deeply") from None


_TYPES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _wrong_field(error: ValidationError) -> RequestRefused:
    """The refusal for the first field that is wrong; of a field with several forms, all that it may be."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    field = str(first["loc"][0])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _real_path(first["loc"]))[1:]
    if first["type"] == "missing":
        return invalid(path, f"{path} is required", "missing_parameter")
    if first["type"] == "extra_forbidden":
        return invalid(path, f"unknown field: {path}", "unknown_parameter")
    if field == "tool_choice":
        return invalid(
            field, f"{field} must be none, auto, required, or an object that names a function", "invalid_type"
        )
    forms = {_TYPES[one["type"]] for one in errors if one["loc"][0] == field and one["type"] in _TYPES}
    if forms and len({len(one["loc"]) for one in errors}) == 1:
        return invalid(path, f"{path} must be {' or '.join(sorted(forms))}", "invalid_type")
    if field in ("prompt", "stop"):
        wanted = {
            "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
            "stop": "a string or a list of strings",
        }
        return invalid(field, f"{field} must be {wanted[field]}", "invalid_type")
    if path.endswith("].content"):
        return invalid(path, f'{path} must be a string or a list of {{"type": "text", "text": ...}}', "invalid_type")
    return invalid(path, f"{path}: {first['msg']}", "invalid_type")


_FORM_NAMES = frozenset({"str", "int", "float", "bool", "NamedTool"})


def _real_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names of a union's forms, which pydantic puts between."""
    return [
        part
        for index, part in enumerate(location)
        if isinstance(part, int) or index == 0 or (part not in _FORM_NAMES and "[" not in part)
    ]


def _json_noun(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "true or false"}.get(type(value), "a number")
