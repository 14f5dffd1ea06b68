"""From the contracts' protobuf to the plain data of engine and transfers, and back.

Must not know: streams, roles.
"""

from __future__ import annotations

from collections.abc import Iterable

from decant_proto.v1 import types_pb2

from engine.port import MOST_BANNED_TOKENS, FinishReason, SamplingParameters
from foundation.registry_entry import NodeEntry, Role

FINISH_REASONS: dict[FinishReason, types_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.FAILED: types_pb2.FINISH_REASON_FAILED,
}

SOUND_AMOUNT = 1000.0
"""What is added to logits, multiplied with them, or divides them stays so small that no float32 becomes infinite."""

MOST_LOGPROBS = 100
"""Best tokens of each position of a prompt: what goes to a router with one step stays small."""

_ROLES: dict[Role, types_pb2.Role.ValueType] = {
    Role.PREFILL: types_pb2.ROLE_PREFILL,
    Role.DECODE: types_pb2.ROLE_DECODE,
}


def unsound_sampling(message: types_pb2.SamplingParameters, vocabulary_size: int) -> str | None:
    """Name of the first field that would break a step for everybody; None when all are sound.

    Routers check what clients write; this is a node's own last look.
    """
    for name in ("temperature", "top_p", "min_p"):
        if not 0 <= getattr(message, name) <= SOUND_AMOUNT:
            return name
    if message.repetition_penalty and not 1 / SOUND_AMOUNT <= message.repetition_penalty <= SOUND_AMOUNT:
        return "repetition_penalty"
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(message, name)) <= SOUND_AMOUNT:
            return name
    if not all(token < vocabulary_size and abs(bias) <= SOUND_AMOUNT for token, bias in message.logit_bias.items()):
        return "logit_bias"
    if not all(token < vocabulary_size for token in message.allowed_token_ids):
        return "allowed_token_ids"
    if message.prompt_logprobs > MOST_LOGPROBS:
        return "prompt_logprobs"
    words = message.bad_words
    if not all(word.ids and max(word.ids) < vocabulary_size for word in words):
        return "bad_words"
    # A step has room for so many, and something must be left to draw.
    if len(words) + len(message.stop_token_ids) > min(MOST_BANNED_TOKENS, vocabulary_size - 1):
        return "bad_words" if words else "stop_token_ids"
    if message.grammar and (message.allowed_token_ids or words):
        return "grammar"
    if message.grammar and (message.min_tokens or message.ignore_eos):  # nothing at all could follow a complete answer
        return "grammar"
    return None


def sampling_from_wire(message: types_pb2.SamplingParameters) -> SamplingParameters:
    """Unset top_p and repetition_penalty (0 in protobuf) mean off, as 1 does."""
    return SamplingParameters(
        seed=message.seed,
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        grammar=message.grammar,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
    )


def token_to_wire(
    position: int, token_id: int, logprob: float | None, top_logprobs: Iterable[tuple[int, float]]
) -> types_pb2.Token:
    token = types_pb2.Token(
        position=position,
        token_id=token_id,
        top_logprobs=[types_pb2.TokenLogprob(token_id=other, logprob=value) for other, value in top_logprobs],
    )
    if logprob is not None:
        token.logprob = logprob
    return token


def entry_to_wire(entry: NodeEntry) -> types_pb2.NodeEntry:
    return types_pb2.NodeEntry(
        node_id=entry.node_id,
        role=_ROLES[entry.role],
        control_address=entry.control_address,
        incarnation=entry.incarnation,
    )
