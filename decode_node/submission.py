"""What a router's Submit must be before a decode node takes it, and what it is for `inbound` and for the engine.

Routers check what clients write; a node still lets nothing in that would break its engine for everybody.

Must not know: streams, transfers.
"""

from __future__ import annotations

from decant_proto.v1 import node_pb2

from decode_node.inbound import Facts
from engine.config import EngineConfig
from engine.port import Mode, RequestKey, Submit
from engine.request import finish_rules
from foundation.ids import AttemptId, RequestId
from node.wire import sampling_from_wire, unsound_sampling

MOST_PREFILL_CHOICES = 16
LONGEST_REQUEST_ID = 256


def request_key(attempt: AttemptId) -> RequestKey:
    return RequestKey(f"{attempt.request}/{attempt.attempt}")


def refused_submission(message: node_pb2.Submit, prompt: tuple[int, ...], vocabulary_size: int) -> str | None:
    """Why this node will never serve it, as a name; None when it can be served. `prompt`: the message's token ids."""
    sampling = message.sampling
    if not 0 < len(message.request_id) <= LONGEST_REQUEST_ID or message.attempt < 1:
        return "invalid_request_id"
    if not prompt:
        return "prompt_empty"
    if max(prompt + tuple(message.settled_token_ids)) >= vocabulary_size:
        return "token_outside_vocabulary"
    if len(message.prefill_choices) > MOST_PREFILL_CHOICES:
        return "too_many_prefill_choices"
    if sampling.max_tokens < 1:
        return "invalid_max_tokens"
    if sampling.HasField("prompt_logprobs") and message.prefill_choices:
        return "invalid_sampling"  # what another node has computed says nothing of the prompt's own tokens
    return None if unsound_sampling(sampling, vocabulary_size) is None else "invalid_sampling"


def facts_of(message: node_pb2.Submit, prompt: tuple[int, ...], config: EngineConfig) -> Facts:
    """`prompt`: the message's token ids."""
    return Facts(
        settled_length=len(message.settled_token_ids),
        prefill_choices=len(message.prefill_choices),
        block_size=config.block_size,
        rules=finish_rules(len(prompt), sampling_from_wire(message.sampling), config),
        local_reason=message.local_reason or "no_prefill_node",
        forks=bool(message.fork_of),
    )


def start_engine_request(key: RequestKey, message: node_pb2.Submit, prompt: tuple[int, ...], await_kv: bool) -> Submit:
    """`prompt`: the message's token ids."""
    fork_of = request_key(AttemptId(RequestId(message.fork_of), message.fork_attempt)) if message.fork_of else None
    return Submit(
        key=key,
        prompt=prompt,
        sampling=sampling_from_wire(message.sampling),
        mode=Mode.AWAIT_KV if await_kv else Mode.GENERATE,
        settled=tuple(message.settled_token_ids),
        choice_index=message.choice_index,
        fork_of=None if await_kv else fork_of,
    )
