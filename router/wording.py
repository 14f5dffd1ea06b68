"""How the dispatcher says things: sampling to nodes, failures to clients, placements to operators.

Must not know: requests in flight, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from decant_proto.v1 import types_pb2

from router.generation import Refusal, RefusalKind, Sampling
from router.journey import Fail
from router.placement import Placement

RETRY_AFTER_S = 1.0

INTERNAL_ERROR = Refusal(RefusalKind.INTERNAL, "internal error of the router", code="internal_error")


@dataclass(frozen=True, slots=True)
class Account:
    """One request in flight, for people."""

    request: str
    correlation: str
    attempt: int
    waits_on: str | None
    waits_for: str
    since_s: float
    expected_s: float | None
    computed_on: str | None
    placed_because: str | None
    prompt_tokens: int
    answer_tokens: int
    lost: tuple[str, ...]

    def named(self, name: str) -> bool:
        """Whether people may mean this one: by our id, as it stands in a response, or by the client's own."""
        return self.request in (name, name.partition("-")[2]) or (bool(self.correlation) and self.correlation == name)


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that went wrong, for people. `what`: an attempt (the request may have gone on elsewhere), or the request."""

    what: str
    reason: str
    request: str
    node: str
    at_s: float


def computed_on(placement: Placement) -> str:
    return (placement.prefill[0] if placement.prefill else placement.decode).node


def placement_reason(placement: Placement) -> str:
    """Why the prompt is computed where it is, as a label of placements_total."""
    if not placement.prefill:
        return placement.local_reason
    assert placement.prediction is not None
    # `always` goes to a prefill node against the prediction.
    return placement.prediction.choice.value if placement.prediction.remote else "always"


def sampling_message(sampling: Sampling) -> types_pb2.SamplingParameters:
    return types_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        grammar=sampling.grammar,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[types_pb2.TokenSequence(ids=word) for word in sampling.bad_words],
    )


_SENTENCES = {
    "deadline": (RefusalKind.DEADLINE, "the request took longer than it may"),
    "overloaded": (RefusalKind.OVERLOADED, "every decode node has as many requests as it takes"),
    "deadline_unmeetable": (
        RefusalKind.OVERLOADED,
        "the first token is predicted to come after the request's deadline",
    ),
    "no_decode_node": (RefusalKind.UNAVAILABLE, "no decode node is connected to this router"),
    "context_too_short": (RefusalKind.INVALID, "no decode node that is up has a context long enough for this prompt"),
    "prompt_too_long": (RefusalKind.INVALID, "the prompt is longer than the decode node can hold"),
    "invalid_grammar": (
        RefusalKind.INVALID,
        "the decode node cannot follow this grammar: it names tokens that the model does not have, or is too complex",
    ),
    "prompt_logprobs_not_offered": (
        RefusalKind.INVALID,
        "prompt_logprobs (and echo with logprobs) are not offered by decode nodes on a GPU, and there is no other",
    ),
    "nothing_allowed": (
        RefusalKind.INVALID,
        "allowed_token_ids, bad_words, min_tokens and what ends an answer leave no token that may be drawn",
    ),
}


def refusal_of(effect: Fail, *, begun: bool) -> Refusal:
    """`begun`: a part of the answer has been given, so what may succeed elsewhere was not asked wrongly."""
    kind, sentence = _SENTENCES.get(effect.reason, (None, f"the request could not be completed: {effect.reason}"))
    if kind is None or (begun and effect.retryable and kind is RefusalKind.INVALID):
        kind = RefusalKind.UNAVAILABLE if effect.retryable else RefusalKind.INTERNAL
    # Where the node's clock was faster than ours it says, rightly, that no other node would be in time.
    retryable = (effect.retryable or kind is RefusalKind.DEADLINE) and kind is not RefusalKind.INVALID
    return Refusal(
        kind, sentence, code=effect.reason, retryable=retryable, retry_after_s=RETRY_AFTER_S if retryable else None
    )


def unavailable(sentence: str, code: str) -> Refusal:
    return Refusal(RefusalKind.UNAVAILABLE, sentence, code=code, retryable=True, retry_after_s=RETRY_AFTER_S)
