"""Which decode node answers a request, and which prefill nodes it may ask for the prompt's KV. Pure.

The cost of a node is counted in tokens that it would compute before ours: what is queued there, plus what of our prompt it
does not hold, plus a price for each sequence that shares its steps (after the KV router of NVIDIA Dynamo: prefill blocks to
compute plus blocks that are active). What a node holds is guessed from what this router has sent it: a bounded memory of
prompt prefixes. A wrong guess costs time, never correctness.

Must not know: sockets, clocks, protobuf, tickets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import Role
from router.cost import Prediction, Transfer, Work, alone, predict

PREFIX_CHUNK_TOKENS = 64
SEQUENCE_PRICE_TOKENS = 64
"""One more sequence in a node's batch weighs as much as this many prompt tokens to compute."""
MOST_PREFILL_CHOICES = 3


class Disaggregate(Enum):
    """Whether prompts are computed on prefill nodes: wherever there is one, never, or where it is predicted to be faster."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class NodeKey(NamedTuple):
    """One life of a node: after a restart it holds nothing."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as placement sees it."""

    key: NodeKey
    role: Role
    refusal: str | None
    """Why it takes no work now; None when it does."""
    compatible_with: str
    """Nodes can pair if and only if this agrees (their fingerprints in one word)."""
    context_limit: int
    sequences: int
    queued_tokens: int
    tokens_per_second: float = 0.0
    """Of prompts, as the node measures it; 0: not yet."""
    kv_bytes_per_token: int = 0
    serves_alone: bool = False
    """Decode nodes: no KV comes from any prefill node now."""
    lanes: Mapping[NodeId, float] = field(default_factory=dict)
    """Decode nodes: bytes a second from each prefill node that they are paired with."""
    seats: int = 0
    """Sequences that its engine decodes at once; 0: unknown."""
    step_tokens: int = 0
    """Most tokens of one step; 0: unknown."""

    @property
    def has_room(self) -> bool:
        return not self.seats or self.sequences < self.seats

    broken_lanes: frozenset[NodeId] = frozenset()
    """Decode nodes: prefill nodes from which no KV comes now."""

    @property
    def ahead_tokens(self) -> int:
        return self.queued_tokens + SEQUENCE_PRICE_TOKENS * self.sequences


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` in the order in which the decode node may ask them; when it is empty `local_reason` says why."""

    decode: NodeKey
    prefill: tuple[NodeKey, ...]
    local_reason: str
    prediction: Prediction | None = None
    """Where there was a choice between computing the prompt here or there."""
    expected_s: float | None = None
    """Predicted time to first token of the way taken; None while nothing has been measured."""


@dataclass(frozen=True, slots=True)
class NoPlacement:
    reason: str


def prefix_chain(token_ids: Sequence[int]) -> tuple[int, ...]:
    """One number for each whole chunk of the prompt, which depends on that chunk and all before it."""
    chain, link = [], 0
    for start in range(0, len(token_ids) - PREFIX_CHUNK_TOKENS + 1, PREFIX_CHUNK_TOKENS):
        link = hash((link, *token_ids[start : start + PREFIX_CHUNK_TOKENS]))
        chain.append(link)
    return tuple(chain)


class PrefixMemory:
    """Which nodes recently served which prompt prefix; the least recently used are forgotten."""

    def __init__(self, most_prefixes: int = 65_536, most_nodes: int = 8) -> None:
        self._most_prefixes = most_prefixes
        self._most_nodes = most_nodes
        self._nodes: OrderedDict[int, OrderedDict[NodeKey, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def remember(self, chain: Sequence[int], node: NodeKey) -> None:
        # From the end, so that the beginning of a prompt, which others share, is forgotten last.
        for link in reversed(chain):
            nodes = self._nodes.setdefault(link, OrderedDict())
            self._nodes.move_to_end(link)
            nodes[node] = None
            nodes.move_to_end(node)
            if len(nodes) > self._most_nodes:
                nodes.popitem(last=False)
        while len(self._nodes) > self._most_prefixes:
            self._nodes.popitem(last=False)

    def held_tokens(self, chain: Sequence[int], node: NodeKey) -> int:
        """Tokens of the prompt that the node has probably cached."""
        held = 0
        for link in chain:
            nodes = self._nodes.get(link)
            if nodes is None or node not in nodes:
                break
            held += PREFIX_CHUNK_TOKENS
        return held


def place(
    prompt_tokens: int,
    answer_tokens: int,
    chain: Sequence[int],
    candidates: Iterable[Candidate],
    memory: PrefixMemory,
    avoid: frozenset[NodeId] = frozenset(),
    disaggregate: Disaggregate = Disaggregate.ALWAYS,
    *,
    with_room: bool = False,
    local_reason: str = "",
) -> Placement | NoPlacement:
    """Cheapest decode node, and the cheapest prefill nodes that can pair with it, if they are to compute the prompt.

    `prompt_tokens` counts settled tokens too. Nodes in `avoid` lost this request before: taken only if there is no other.
    `with_room`: only on a decode node with a free seat. `local_reason`: why that node must compute the whole prompt itself;
    empty where it need not.
    """

    def missing(candidate: Candidate) -> int:
        return prompt_tokens - (0 if local_reason else memory.held_tokens(chain, candidate.key))

    def cost(candidate: Candidate) -> tuple[int, str]:
        return missing(candidate) + candidate.ahead_tokens, candidate.key.node

    def work(candidate: Candidate) -> Work:
        streams = candidate.sequences if candidate.role is Role.DECODE else 0
        speed = candidate.tokens_per_second
        return Work(candidate.queued_tokens, missing(candidate), speed, streams, candidate.step_tokens)

    candidates = list(candidates)
    decoders = [candidate for candidate in candidates if candidate.role is Role.DECODE]
    usable = [candidate for candidate in decoders if candidate.refusal is None]
    if not usable:
        return NoPlacement(_common_refusal(decoders, "no_decode_node"))
    fitting = [candidate for candidate in usable if candidate.context_limit >= prompt_tokens + min(answer_tokens, 1)]
    if not fitting:
        return NoPlacement("context_too_short")
    if with_room:
        fitting = [candidate for candidate in fitting if candidate.has_room]
        if not fitting:
            return NoPlacement("no_room")
    fresh = [candidate for candidate in fitting if candidate.key.node not in avoid]
    # One on which the answer would end for want of context, or to which no KV comes, is better than none; the others first.
    whole_tokens = prompt_tokens + answer_tokens
    decode = min(fresh or fitting, key=lambda one: (one.context_limit < whole_tokens, one.serves_alone, *cost(one)))
    prefill, reason = ([], local_reason) if local_reason else _prefill_choices(decode, candidates, disaggregate)
    ranked = sorted(prefill, key=cost)[:MOST_PREFILL_CHOICES]
    choices = tuple(candidate.key for candidate in ranked)
    if not ranked:
        speed = decode.tokens_per_second
        return Placement(decode.key, (), reason, expected_s=alone(work(decode), speed) if speed else None)
    first = ranked[0]
    transfer = Transfer(missing(decode) * decode.kv_bytes_per_token, decode.lanes.get(first.key.node, 0.0))
    prediction = predict(work(decode), work(first), transfer)
    if disaggregate is Disaggregate.AUTO and not prediction.remote:
        return Placement(decode.key, (), prediction.choice.value, prediction, prediction.alone_s)
    return Placement(decode.key, choices, "", prediction, prediction.together_s)


def _prefill_choices(
    decode: Candidate, candidates: Sequence[Candidate], disaggregate: Disaggregate
) -> tuple[list[Candidate], str]:
    if disaggregate is Disaggregate.NEVER:
        return [], "disaggregation_off"
    known = [candidate for candidate in candidates if candidate.role is Role.PREFILL]
    if not known:
        return [], "no_prefill_node"
    paired = [candidate for candidate in known if candidate.compatible_with == decode.compatible_with]
    usable = [candidate for candidate in paired if candidate.refusal is None]
    reached = [candidate for candidate in usable if candidate.key.node not in decode.broken_lanes]
    if usable:
        return reached, "" if reached else "lane_broken"
    if not paired and any(candidate.compatible_with for candidate in known):
        return [], "prefill_incompatible"
    return [], "prefill_not_ready"


def _common_refusal(candidates: Sequence[Candidate], none: str) -> str:
    """The reason when all have the same, else that none is ready."""
    refusals = {candidate.refusal for candidate in candidates if candidate.refusal is not None}
    if not candidates:
        return none
    return refusals.pop() if len(refusals) == 1 else "node_not_ready"
