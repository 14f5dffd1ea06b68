"""From what a client wrote to a checked `Generation`: model name, tokenization, chat template, sampling, limits.

Both front ends use it, so a wrong value gets the same answer over HTTP and gRPC.

Must not know: HTTP, gRPC, nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from router.generation import (
    Generation,
    Refusal,
    RefusalKind,
    RequestRefused,
    SamplingWishes,
    checked_prompt,
    checked_sampling,
    invalid,
    mint_request_id,
)
from router.tokenizer import ChatTemplateRefused, ModelText, NoChatTemplate

LONG_TEXT_CHARACTERS = 16_384
"""Texts from this length on are tokenized in a thread, so that other requests' tokens do not wait for them."""


@dataclass(frozen=True, slots=True)
class Intake:
    """`context_limit` is asked at each request, for it depends on the nodes that are connected."""

    model_name: str
    text: ModelText
    context_limit: Callable[[], int]
    request_timeout_s: float

    def check_model(self, model: str | None) -> None:
        """Raises RequestRefused unless it is the one that is served, or none is named."""
        if model is not None and model != self.model_name:
            raise RequestRefused(
                Refusal(
                    RefusalKind.MODEL_NOT_FOUND,
                    f"the model {model!r} is not served here; {self.model_name!r} is",
                    "model",
                    "model_not_found",
                )
            )

    async def prompt_from_text(self, parameter: str, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        if not text:
            raise invalid(parameter, f"{parameter} must not be empty: there is nothing to answer", "empty_prompt")
        return self.prompt_from_tokens(parameter, await self.tokenize(parameter, text, special_tokens=special_tokens))

    async def tokenize(self, parameter: str, text: str, *, special_tokens: bool) -> list[int]:
        """Raises RequestRefused for a text that is no Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid(parameter, f"{parameter} holds half of a surrogate pair, which is no character") from None
        if len(text) < LONG_TEXT_CHARACTERS:
            return self.text.encode(text, special_tokens=special_tokens)
        return await asyncio.to_thread(self.text.encode, text, special_tokens=special_tokens)

    def prompt_from_tokens(self, parameter: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        return checked_prompt(
            parameter, token_ids, vocabulary_size=self.text.vocabulary_size, context_limit=self.context_limit()
        )

    async def prompt_from_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        continued: bool = False,
        special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """`variables`: further ones of the chat template. `continued`: the answer goes on where the last message ends."""
        text = self.chat_text(messages, variables)
        if continued:
            text = _cut_after_last_message(text, messages)
        return await self.prompt_from_text("messages", text, special_tokens=special_tokens)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """Raises RequestRefused when there are none, or when the model's template cannot render them."""
        if not messages:
            raise invalid("messages", "messages must not be empty: there is nothing to answer", "empty_prompt")
        try:
            return self.text.render_chat(messages, variables)
        except NoChatTemplate:
            raise invalid(
                "messages",
                f"the model {self.model_name!r} has no chat template; use /v1/completions with a prompt",
                "no_chat_template",
            ) from None
        except ChatTemplateRefused as refusal:
            raise invalid("messages", f"the model's chat template refuses these messages: {refusal}") from None

    def generations(
        self,
        prompts: Sequence[tuple[int, ...]],
        wishes: SamplingWishes,
        *,
        choices: int = 1,
        default_max_tokens: int | None = None,
        timeout_s: float | None = None,
        correlation_id: str = "",
    ) -> list[Generation]:
        """One for each choice of each prompt, prompt by prompt. Raises RequestRefused naming the field that is wrong."""
        generations = []
        for prompt in prompts:
            sampling = checked_sampling(
                wishes,
                self.text.sampling_defaults,
                prompt_tokens=len(prompt),
                default_max_tokens=default_max_tokens,
                context_limit=self.context_limit(),
                vocabulary_size=self.text.vocabulary_size,
            )
            deadline_s = min(timeout_s or self.request_timeout_s, self.request_timeout_s)
            generations += [
                Generation(mint_request_id(), prompt, sampling, deadline_s, choice, correlation_id)
                for choice in range(choices)
            ]
        return generations


def _cut_after_last_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Without what the template writes after the last message's content. Raises RequestRefused when it wrote it otherwise."""
    content = str(messages[-1]["content"]).strip()
    start = text.rfind(content) if content else -1
    if start < 0:
        raise invalid(
            "continue_final_message",
            "continue_final_message needs a last message that the chat template writes as it is",
        )
    return text[: start + len(content)]
