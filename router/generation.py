"""One answer to be generated, as both front ends (OpenAI over HTTP, gRPC) hand it on, and how a request is refused.

Every value that reaches a node has passed `checked_sampling` and `checked_prompt`; so a node never sees one out of range.
Defaults are vLLM's: those of the model's generation_config.json, else temperature 1 and everything else off.

Must not know: HTTP, gRPC, nodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.family import Family

MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 64
MOST_STOP_TOKEN_IDS = 256
LONGEST_STOP_CHARACTERS = 1024
MOST_BIASES = 1024
MOST_BAD_WORDS = 64
LONGEST_BAD_WORD_TOKENS = 64
LARGEST_TEMPERATURE = 1000.0
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0
REPETITION_PENALTIES = (0.01, 100.0)
LARGEST_TOKEN_COUNT = 1 << 31
SEED_RANGE = 1 << 64


class RefusalKind(Enum):
    """Why a request is not served; front ends map it to an HTTP status or a gRPC code."""

    INVALID = "invalid"
    MODEL_NOT_FOUND = "model_not_found"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`parameter` is the field at fault, `code` a name for programs, `message` a sentence for people."""

    kind: RefusalKind
    message: str
    parameter: str | None = None
    code: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None


class RequestRefused(Exception):
    """Carries a refusal from where it is found to the front end, which answers it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def invalid(parameter: str | None, message: str, code: str = "invalid_value") -> RequestRefused:
    return RequestRefused(Refusal(RefusalKind.INVALID, message, parameter, code))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config.json recommends."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class SamplingWishes:
    """What a client asked for; None where it said nothing. Types are right, values unchecked."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    grammar: str = ""
    max_tokens_parameter: str = "max_tokens"
    """The field that gave `max_tokens`, for messages."""
    logprobs_parameter: str = "logprobs"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling of one request; `seed` is always set. Zero temperature is greedy; top_k 0 is off."""

    seed: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's own tokens, with so many of the best of each position; None: of none."""
    include_stop: bool = False
    """What ends the answer (a stop string, or the text of a stop token) belongs to its text."""
    skip_special_tokens: bool = True
    """Special tokens write nothing."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""
    """What the answer must follow, in llguidance's form; see `router.grammar`."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else may be drawn; empty: anything."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not stand in the answer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer (one choice of one prompt) to be generated."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    choice_index: int = 0
    family: Family | None = field(default=None, compare=False)
    """All choices of the prompt, where there are several."""
    correlation_id: str = ""
    """The client's own x-request-id, for logs alone."""

    @property
    def own_prompt_tokens(self) -> int:
        """A prompt with several choices is counted, and read, once: with the first of them."""
        return len(self.prompt) if self.choice_index == 0 else 0


def checked_choices(n: int | None) -> int:
    """How many answers are wanted. Raises RequestRefused."""
    choices = 1 if n is None else n
    if not 1 <= choices <= MOST_CHOICES:
        raise invalid("n", f"n must be between 1 and {MOST_CHOICES}, not {choices}")
    return choices


def mint_request_id() -> str:
    return secrets.token_hex(16)


def chosen_seed(wishes: SamplingWishes) -> int:
    """The client's own, or a new one at each call."""
    return secrets.randbits(64) if wishes.seed is None else wishes.seed % SEED_RANGE


def checked_sampling(
    wishes: SamplingWishes,
    defaults: SamplingDefaults,
    *,
    prompt_tokens: int,
    default_max_tokens: int | None,
    context_limit: int,
    vocabulary_size: int,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> Sampling:
    """Raises RequestRefused naming the first field that is wrong. `default_max_tokens` None: what the context leaves.
    `bad_words`: those of the wishes as tokens."""
    temperature = defaults.temperature if wishes.temperature is None else wishes.temperature
    _check_number("temperature", temperature, 0.0, LARGEST_TEMPERATURE)
    top_p = defaults.top_p if wishes.top_p is None else wishes.top_p
    _check_number("top_p", top_p, 0.0, 1.0, above_minimum=True)
    min_p = defaults.min_p if wishes.min_p is None else wishes.min_p
    _check_number("min_p", min_p, 0.0, 1.0)
    top_k = defaults.top_k if wishes.top_k is None else wishes.top_k
    if not (top_k == -1 or 0 <= top_k < LARGEST_TOKEN_COUNT):
        raise invalid("top_k", f"top_k must be -1 or 0 (off), or a positive whole number, not {top_k}")
    repetition = defaults.repetition_penalty if wishes.repetition_penalty is None else wishes.repetition_penalty
    _check_number("repetition_penalty", repetition, *REPETITION_PENALTIES)
    presence, frequency = wishes.presence_penalty or 0.0, wishes.frequency_penalty or 0.0
    _check_number("presence_penalty", presence, -LARGEST_PENALTY, LARGEST_PENALTY)
    _check_number("frequency_penalty", frequency, -LARGEST_PENALTY, LARGEST_PENALTY)
    if wishes.seed is not None and not -(SEED_RANGE >> 1) <= wishes.seed < SEED_RANGE:
        raise invalid("seed", f"seed must fit 64 bits, not {wishes.seed}")
    for parameter, wanted in (
        (wishes.logprobs_parameter, wishes.logprobs),
        ("prompt_logprobs", wishes.prompt_logprobs),
    ):
        if wanted is not None and not 0 <= wanted <= MOST_LOGPROBS:
            raise invalid(parameter, f"{parameter} must be between 0 and {MOST_LOGPROBS}, not {wanted}")
    max_tokens = checked_max_tokens(wishes, prompt_tokens, default_max_tokens, context_limit)
    min_tokens = wishes.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise invalid("min_tokens", f"min_tokens must be between 0 and max_tokens ({max_tokens}), not {min_tokens}")
    if wishes.grammar and (min_tokens or wishes.ignore_eos):
        parameter = "min_tokens" if min_tokens else "ignore_eos"
        raise invalid(parameter, f"{parameter} contradicts a grammar, whose end ends the answer")
    if wishes.grammar and (wishes.allowed_token_ids or bad_words):
        parameter = "allowed_token_ids" if wishes.allowed_token_ids else "bad_words"
        raise invalid(parameter, f"{parameter} may forbid what a grammar asks for; one of the two may be given")
    return Sampling(
        seed=chosen_seed(wishes),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        min_tokens=min_tokens,
        ignore_eos=bool(wishes.ignore_eos),
        stop_token_ids=_checked_stop_token_ids(wishes.stop_token_ids, vocabulary_size),
        stop=_checked_stops(wishes.stop),
        logprobs=wishes.logprobs,
        prompt_logprobs=wishes.prompt_logprobs,
        include_stop=bool(wishes.include_stop),
        skip_special_tokens=wishes.skip_special_tokens is not False,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=_checked_biases(wishes.logit_bias, vocabulary_size),
        grammar=wishes.grammar,
        allowed_token_ids=_checked_allowed(wishes.allowed_token_ids, bad_words, vocabulary_size),
        bad_words=_checked_bad_words(bad_words),
    )


def checked_prompt(
    parameter: str, token_ids: Sequence[int], *, vocabulary_size: int, context_limit: int
) -> tuple[int, ...]:
    """Raises RequestRefused when the prompt is empty, leaves no room for an answer, or holds an unknown token."""
    if not token_ids:
        raise invalid(parameter, f"{parameter} must not be empty: there is nothing to answer", "empty_prompt")
    if len(token_ids) >= context_limit:
        raise invalid(
            parameter,
            f"This model's context holds {context_limit} tokens, prompt and answer together; "
            f"{parameter} alone has {len(token_ids)}",
            "context_length_exceeded",
        )
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise invalid(parameter, f"{parameter} holds token id {wrong}; the vocabulary has 0 to {vocabulary_size - 1}")
    return tuple(token_ids)


def _check_number(parameter: str, value: float, minimum: float, maximum: float, *, above_minimum: bool = False) -> None:
    if minimum <= value <= maximum and not (above_minimum and value == minimum):  # nan is not
        return
    least = "more than" if above_minimum else "at least"
    raise invalid(parameter, f"{parameter} must be a number, {least} {minimum:g} and at most {maximum:g}, not {value}")


def checked_max_tokens(
    wishes: SamplingWishes, prompt_tokens: int, default_max_tokens: int | None, context_limit: int
) -> int:
    """Raises RequestRefused where the context leaves less."""
    room = context_limit - prompt_tokens
    wanted = wishes.max_tokens
    if wanted is None:
        return room if default_max_tokens is None else min(default_max_tokens, room)
    parameter = wishes.max_tokens_parameter
    if wanted < 1:
        raise invalid(parameter, f"{parameter} must be at least 1, not {wanted}")
    if wanted > min(room, LARGEST_TOKEN_COUNT - 1):
        raise invalid(
            parameter,
            f"This model's context holds {context_limit} tokens, prompt and answer together; the prompt has "
            f"{prompt_tokens} and {parameter} asks for {wanted}",
            "context_length_exceeded",
        )
    return wanted


def _checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MOST_STOPS:
        raise invalid("stop", f"stop may hold at most {MOST_STOPS} strings, not {len(stops)}")
    if not all(stops):
        raise invalid("stop", "stop must not hold an empty string: it would end every answer at once")
    if max(map(len, stops), default=0) > LONGEST_STOP_CHARACTERS:
        raise invalid("stop", f"a stop string may have at most {LONGEST_STOP_CHARACTERS} characters")
    return tuple(stops)


def _checked_stop_token_ids(token_ids: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    if len(token_ids) > MOST_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"stop_token_ids may hold at most {MOST_STOP_TOKEN_IDS} ids")
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_size:
            raise invalid(
                "stop_token_ids", f"stop_token_ids holds {token_id}; the vocabulary has 0 to {vocabulary_size - 1}"
            )
    return tuple(token_ids)


def _checked_allowed(
    token_ids: Sequence[int], bad_words: Sequence[tuple[int, ...]], vocabulary_size: int
) -> tuple[int, ...]:
    if len(token_ids) > vocabulary_size:
        raise invalid(
            "allowed_token_ids",
            f"allowed_token_ids may hold at most as many ids as the vocabulary, {vocabulary_size}, not {len(token_ids)}",
        )
    allowed = frozenset(token_ids)
    lowest, highest = min(allowed, default=0), max(allowed, default=0)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise invalid(
            "allowed_token_ids", f"allowed_token_ids holds {wrong}; the vocabulary has 0 to {vocabulary_size - 1}"
        )
    if allowed and allowed <= {word[-1] for word in bad_words}:
        raise invalid("allowed_token_ids", "allowed_token_ids holds only tokens that bad_words may forbid")
    return tuple(sorted(allowed))


def _checked_bad_words(words: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    for word in words:
        if not 0 < len(word) <= LONGEST_BAD_WORD_TOKENS:
            raise invalid(
                "bad_words", f"one of bad_words must have 1 to {LONGEST_BAD_WORD_TOKENS} tokens, not {len(word)}"
            )
    return tuple(words)


def _checked_biases(biases: Mapping[int, float], vocabulary_size: int) -> dict[int, float]:
    if len(biases) > MOST_BIASES:
        raise invalid("logit_bias", f"logit_bias may hold at most {MOST_BIASES} tokens, not {len(biases)}")
    for token_id, bias in biases.items():
        if not 0 <= token_id < vocabulary_size:
            raise invalid("logit_bias", f"logit_bias holds {token_id}; the vocabulary has 0 to {vocabulary_size - 1}")
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise invalid(
                "logit_bias",
                f"the values of logit_bias must lie between {-LARGEST_BIAS:g} and {LARGEST_BIAS:g}, not {bias}",
            )
    return dict(biases)
