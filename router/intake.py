"""From what a client wrote to a checked `Generation`: model name, tokenization, chat template, sampling, limits.

Both front ends use it, so a wrong value gets the same answer over HTTP and gRPC.

Must not know: HTTP, gRPC, nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from router.family import Family
from router.generation import (
    LONGEST_STOP_CHARACTERS,
    MOST_BAD_WORDS,
    Generation,
    Refusal,
    RefusalKind,
    RequestRefused,
    SamplingWishes,
    checked_max_tokens,
    checked_prompt,
    checked_sampling,
    chosen_seed,
    invalid,
    mint_request_id,
)
from router.tokenizer import ChatTemplateRefused, ModelText, NoChatTemplate

LONG_TEXT_CHARACTERS = 16_384
"""Texts that are together so long are tokenized in a thread, so that other requests' tokens do not wait for them."""


Cut = Callable[[Sequence[int]], Sequence[int]]
"""What is left of a prompt."""


def uncut(tokens: Sequence[int]) -> Sequence[int]:
    return tokens


@dataclass(frozen=True, slots=True)
class Intake:
    """`context_limit` is asked at each request, for it depends on the nodes that are connected."""

    model_name: str
    text: ModelText
    context_limit: Callable[[], int]
    request_timeout_s: float
    tool_call_parser: str = "hermes"
    """One of `router.tool_calls.PARSERS`."""

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

    async def prompt_from_text(
        self, parameter: str, text: str, *, special_tokens: bool = True, cut: Cut = uncut
    ) -> tuple[int, ...]:
        (prompt,) = await self.prompts_from_texts(parameter, (text,), special_tokens=special_tokens, cut=cut)
        return prompt

    async def prompts_from_texts(
        self, parameter: str, texts: Sequence[str], *, special_tokens: bool = True, cut: Cut = uncut
    ) -> list[tuple[int, ...]]:
        """Raises RequestRefused when one of them is empty, no Unicode, or too long."""
        if not all(texts):
            raise invalid(parameter, f"{parameter} must not be empty: there is nothing to answer", "empty_prompt")
        found = await self.tokenize(parameter, texts, special_tokens=special_tokens)
        return [self.prompt_from_tokens(parameter, cut(tokens)) for tokens in found]

    async def tokenize(self, parameter: str, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Raises RequestRefused for a text that is no Unicode."""
        characters = sum(map(len, texts))

        def all_tokens() -> list[list[int]]:
            return [self.tokens(parameter, text, special_tokens=special_tokens, among=characters) for text in texts]

        return all_tokens() if characters < LONG_TEXT_CHARACTERS else await asyncio.to_thread(all_tokens)

    def tokens(self, parameter: str, text: str, *, special_tokens: bool = False, among: int = 0) -> list[int]:
        """Of one text at once, in whatever thread this is. `among`: characters of all texts that are read there."""
        _check_unicode(parameter, text)
        encode = self.text.encode if max(len(text), among) < LONG_TEXT_CHARACTERS else self.text.encode_unlocked
        return encode(text, special_tokens=special_tokens)

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
        cut: Cut = uncut,
    ) -> tuple[int, ...]:
        """`variables`: further ones of the chat template. `continued`: the answer goes on where the last message ends."""
        text = self.chat_text(messages, variables, continued=continued)
        return await self.prompt_from_text("messages", text, special_tokens=special_tokens, cut=cut)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        continued: bool = False,
    ) -> str:
        """Raises RequestRefused when there are none, or when the model's template cannot render them."""
        if not messages:
            raise invalid("messages", "messages must not be empty: there is nothing to answer", "empty_prompt")
        for name in ("tools", "documents"):
            if variables.get(name) and not self.text.template_knows(name):
                raise _template_without(name)
        for index, message in enumerate(messages):
            if message.get("tool_calls") and not self.text.template_knows("tool_calls"):
                raise _template_without(f"messages[{index}].tool_calls")
        try:
            text = self.text.render_chat(messages, variables)
            return _cut_after_last_message(text, messages) if continued else text
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
        context_limit = self.context_limit()
        # Once for all of them, as lists may be long; the longest prompt leaves the least room for an answer.
        strictest = checked_sampling(
            wishes,
            self.text.sampling_defaults,
            prompt_tokens=max(map(len, prompts)),
            default_max_tokens=default_max_tokens,
            context_limit=context_limit,
            vocabulary_size=self.text.vocabulary_size,
            bad_words=self._bad_words(wishes.bad_words),
        )
        deadline_s = min(timeout_s or self.request_timeout_s, self.request_timeout_s)
        generations = []
        for prompt in prompts:
            family = Family(choices) if choices > 1 else None
            max_tokens = checked_max_tokens(wishes, len(prompt), default_max_tokens, context_limit)
            sampling = replace(strictest, seed=chosen_seed(wishes), max_tokens=max_tokens)
            further = replace(sampling, prompt_logprobs=None)  # the first choice tells of the prompt for all of them
            generations += [
                Generation(
                    mint_request_id(),
                    prompt,
                    further if choice else sampling,
                    deadline_s,
                    choice,
                    family,
                    correlation_id,
                )
                for choice in range(choices)
            ]
        return generations

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each as it is written at the beginning of a text and, where that is as long, after a space (as vLLM takes them).

        Raises RequestRefused.
        """
        if len(words) > MOST_BAD_WORDS:
            raise invalid("bad_words", f"bad_words may hold at most {MOST_BAD_WORDS} words, not {len(words)}")
        found: list[tuple[int, ...]] = []
        for word in words:
            if not word.strip() or len(word) > LONGEST_STOP_CHARACTERS:
                raise invalid(
                    "bad_words",
                    f"one of bad_words must have 1 to {LONGEST_STOP_CHARACTERS} characters, not only spaces",
                )
            bare = tuple(self.tokens("bad_words", word.lstrip()))
            spaced = tuple(self.tokens("bad_words", " " + word.lstrip()))
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return found

    def cut(self, most_tokens: int | None, side: str | None, max_tokens: int | None) -> Cut:
        """At most `most_tokens` of a prompt, the last ones unless `side` is right; -1: as many as the context leaves beside
        max_tokens. Raises RequestRefused."""
        if most_tokens is None:
            if side is not None:
                raise invalid("truncation_side", "truncation_side may only be given with truncate_prompt_tokens")
            return uncut
        if most_tokens == -1:
            most_tokens = max(1, self.context_limit() - max(1, max_tokens or 1))
        if most_tokens < 1:
            raise invalid(
                "truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or at least 1, not {most_tokens}"
            )
        kept = slice(most_tokens) if side == "right" else slice(-most_tokens, None)
        return lambda tokens: tokens[kept]


def _template_without(parameter: str) -> RequestRefused:
    return invalid(
        parameter,
        f"{parameter} cannot be given to this model: its chat template does not write it (--chat-template sets another)",
        "unsupported_parameter",
    )


def _check_unicode(parameter: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(parameter, f"{parameter} holds half of a surrogate pair, which is no character") from None


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
