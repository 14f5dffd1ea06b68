"""What clients read of a prompt's tokens: vLLM's `prompt_logprobs`, and OpenAI's legacy `echo` with `logprobs`.

Must not know: where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.answer import AnswerStream
from router.prompt_scores import PromptScores, TokenScore
from router.tokenizer import ModelText

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

TokenText = Callable[[Sequence[int]], str]


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def beside_choice(text: ModelText, best: int, first: AnswerStream) -> list[Any]:
    """vLLM's form: of each token the prompt's own and the `best` likeliest, by id; of the first token nothing is known.

    `first`: of the prompt's choices the first, which has been answered."""
    prompt, scores = first.generation.prompt, _scores_of(first)
    return [None, *(_by_id(text, token, score, best) for token, score in zip(prompt[1:], scores, strict=True))]


def _scores_of(first: AnswerStream) -> PromptScores:
    assert first.prompt_scores is not None, "nobody asked for the log probabilities of this prompt"
    return first.prompt_scores


def _by_id(text: ModelText, token_id: int, score: TokenScore, best: int) -> dict[str, Any]:
    ranked = [(token_id, score.logprob, score.rank)]
    ranked += [(one, logprob, rank) for rank, (one, logprob) in enumerate(score.best[:best], 1) if one != token_id]
    return {
        str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": text.token_text([one])}
        for one, logprob, rank in ranked
    }


def echoed(
    text: ModelText, token_text: TokenText, best: int, first: AnswerStream, written: str
) -> dict[str, list[Any]]:
    """OpenAI's form, for a prompt that is `written` at the beginning of a choice's text."""
    prompt, scores = first.generation.prompt, _scores_of(first)
    tops: list[Any] = [None]
    for token_id, score in zip(prompt[1:], scores, strict=True):
        named = {token_text([one]): finite(logprob) for one, logprob in score.best[:best]}
        tops.append({token_text([token_id]): finite(score.logprob), **named})
    return {
        "text_offset": _offsets(text, prompt, written),
        "token_logprobs": [None, *(finite(score.logprob) for score in scores)],
        "tokens": [token_text([token_id]) for token_id in prompt],
        "top_logprobs": tops,
    }


def _offsets(text: ModelText, prompt: Sequence[int], written: str) -> list[int]:
    """Where in `written` each token begins; one in the middle of a character: where that begins."""
    detokenizer = text.detokenizer((), skip_special_tokens=False)
    offsets, length = [], 0
    for token_id in prompt:
        offsets.append(length)
        length += len(detokenizer.add(token_id))
    # What the tokenizer put before a text (a token that begins it) is no part of it.
    before = max(0, length + len(detokenizer.finish()) - len(written))
    return [max(0, offset - before) for offset in offsets]
