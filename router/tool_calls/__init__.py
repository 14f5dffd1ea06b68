"""Tool calls in an answer's text, found piece by piece: the text beside them is content, a call's arguments go on as they come.

The arguments are the model's own words, unchanged, so what a stream's deltas join to is what the whole answer holds. Where the
text is cut into pieces changes nothing. What only looks like a call is content. An answer that is cut in mid-call ends with a
call whose arguments are cut.

`base` is what parsers share; `hermes` is the form that forced calls have, whatever the model; `objects` reads those of Llama and
Mistral.

Must not know: requests, grammars, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from router.tool_calls.base import CallDelta, Parsed, ToolCallParser
from router.tool_calls.hermes import HermesCalls
from router.tool_calls.objects import LlamaCalls, MistralCalls, short_id

__all__ = [
    "FORCED_PARSERS",
    "PARSERS",
    "CallDelta",
    "HermesCalls",
    "LlamaCalls",
    "MistralCalls",
    "Parsed",
    "ToolCallParser",
]

PARSERS: dict[str, Callable[[int | None], ToolCallParser]] = {
    "hermes": HermesCalls,
    "llama3_json": LlamaCalls,
    "mistral": MistralCalls,
}
"""By the name that --tool-call-parser takes, which is vLLM's."""
FORCED_PARSERS: dict[str, Callable[[int | None], ToolCallParser]] = {
    **dict.fromkeys(PARSERS, HermesCalls),
    "mistral": partial(HermesCalls, new_id=short_id),
}
"""By the same names: of calls that had to come, which `router.grammar` writes in one form for all models."""
