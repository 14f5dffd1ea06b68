"""Parts of request bodies: messages, tools, forms of answers.

Must not know: tokenizers, nodes.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.generation import invalid


class Body(BaseModel):
    """No value is made to fit, and nothing unknown is passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: str
    arguments: str | None = None


class ToolCall(Body):
    """A call in an earlier answer. `index`: some clients hand the stream's deltas back as they were."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves. Raises RequestRefused."""
        written = self.function.arguments or "{}"
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise invalid(
                f"{path}.function.arguments", f"{path}.function.arguments is not valid JSON: {error}"
            ) from None
        call = {"type": self.type, "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[None] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None
    """The last six: clients hand an answer back with what was empty in it (`message.model_dump()`)."""

    def for_template(self, path: str = "messages") -> dict[str, Any]:
        """`path`: where it stands in the body. Raises RequestRefused where fields do not fit its role."""
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{path}.tool_calls", f"{path}.tool_calls may only stand in a message of the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise invalid(f"{path}.tool_call_id", f"{path}.tool_call_id may only stand in a message of a tool")
        content = self.content
        if content is None and not self.tool_calls:
            raise invalid(f"{path}.content", f"{path}.content is required", "missing_parameter")
        text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.for_template(f"{path}.tool_calls[{index}]") for index, call in calls]
        return message
