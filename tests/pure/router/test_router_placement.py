"""Where requests go: load, prefixes, pairs that fit, and the reasons when there is no place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import Role
from router.placement import (
    PREFIX_CHUNK_TOKENS,
    Candidate,
    Disaggregate,
    NodeKey,
    NoPlacement,
    Placement,
    PrefixMemory,
    place,
    prefix_chain,
)

PROMPT = tuple(range(4 * PREFIX_CHUNK_TOKENS + 5))
CHAIN = prefix_chain(PROMPT)


def node(name: str, role: Role = Role.DECODE, **changes: object) -> Candidate:
    key = NodeKey(NodeId(name), Incarnation(1))
    return replace(Candidate(key, role, None, "same", 8192, 0, 0), **changes)  # type: ignore[arg-type]


def placed(
    *candidates: Candidate, memory: PrefixMemory | None = None, answer_tokens: int = 10, **options: Any
) -> Placement | NoPlacement:
    return place(len(PROMPT), answer_tokens, CHAIN, candidates, memory or PrefixMemory(), **options)


def names(keys: tuple[NodeKey, ...]) -> list[str]:
    return [key.node for key in keys]


def test_the_least_loaded_nodes_are_chosen() -> None:
    found = placed(
        node("d0", sequences=3),
        node("d1"),
        node("p0", Role.PREFILL, queued_tokens=500),
        node("p1", Role.PREFILL, queued_tokens=10),
    )
    assert isinstance(found, Placement)
    assert found.decode.node == "d1"
    assert names(found.prefill) == ["p1", "p0"]
    assert found.local_reason == ""


def test_a_known_prefix_outweighs_a_little_load() -> None:
    memory = PrefixMemory()
    memory.remember(CHAIN, node("d0").key)
    found = placed(node("d0", sequences=2), node("d1"), memory=memory)
    assert isinstance(found, Placement)
    assert found.decode.node == "d0"
    crowded = placed(node("d0", sequences=20), node("d1"), memory=memory)
    assert isinstance(crowded, Placement)
    assert crowded.decode.node == "d1"


def test_a_restarted_node_holds_nothing() -> None:
    memory = PrefixMemory()
    memory.remember(CHAIN, node("d0").key)
    assert memory.held_tokens(CHAIN, node("d0").key) == 4 * PREFIX_CHUNK_TOKENS
    assert memory.held_tokens(CHAIN, NodeKey(NodeId("d0"), Incarnation(2))) == 0


def test_prompts_share_as_much_of_their_chain_as_of_their_tokens() -> None:
    other = prefix_chain((*PROMPT[: 2 * PREFIX_CHUNK_TOKENS], 99999, *PROMPT[2 * PREFIX_CHUNK_TOKENS :]))
    assert other[:2] == CHAIN[:2]
    assert not set(other[2:]) & set(CHAIN)


def test_the_memory_of_prefixes_is_bounded_and_forgets_the_oldest() -> None:
    memory = PrefixMemory(most_prefixes=8, most_nodes=2)
    key = node("d0").key
    memory.remember(CHAIN, key)
    for start in range(1000, 1010):
        memory.remember(prefix_chain(tuple(range(start, start + PREFIX_CHUNK_TOKENS))), key)
    assert len(memory) == 8
    assert memory.held_tokens(CHAIN, key) == 0


def test_nodes_that_take_no_work_are_avoided() -> None:
    found = placed(node("d0", refusal="node_draining"), node("d1", sequences=50))
    assert isinstance(found, Placement)
    assert found.decode.node == "d1"


def test_no_place_names_what_stands_in_the_way() -> None:
    assert placed() == NoPlacement("no_decode_node")
    assert placed(node("p0", Role.PREFILL)) == NoPlacement("no_decode_node")
    assert placed(node("d0", refusal="node_draining")) == NoPlacement("node_draining")
    assert placed(node("d0", refusal="node_draining"), node("d1", refusal="node_lost")) == NoPlacement("node_not_ready")
    assert placed(node("d0", context_limit=100)) == NoPlacement("context_too_short")


def test_an_answer_goes_where_the_context_holds_all_of_it_if_there_is_such_a_node() -> None:
    short, long = node("d0", context_limit=len(PROMPT) + 10), node("d1", sequences=9)
    for answer_tokens, chosen in ((10, "d0"), (11, "d1")):
        found = placed(short, long, answer_tokens=answer_tokens)
        assert isinstance(found, Placement)
        assert found.decode.node == chosen
    alone = placed(short, answer_tokens=11)
    assert isinstance(alone, Placement)
    assert alone.decode.node == "d0"


def test_a_node_that_lost_the_request_is_taken_only_if_there_is_no_other() -> None:
    avoid = frozenset({NodeId("d0")})
    found = placed(node("d0"), node("d1", sequences=9), avoid=avoid)
    assert isinstance(found, Placement)
    assert found.decode.node == "d1"
    alone = placed(node("d0"), avoid=avoid)
    assert isinstance(alone, Placement)
    assert alone.decode.node == "d0"


def test_f25_a_decode_node_to_which_no_kv_comes_is_taken_last_and_computes_prompts_itself() -> None:
    broken = node("d0", serves_alone=True, broken_lanes=frozenset({NodeId("p0")}))
    prefill = node("p0", Role.PREFILL)
    found = placed(broken, node("d1", sequences=50), prefill)
    assert isinstance(found, Placement)
    assert (found.decode.node, names(found.prefill)) == ("d1", ["p0"])
    alone = placed(broken, prefill)
    assert isinstance(alone, Placement)
    assert (alone.decode.node, alone.prefill, alone.local_reason) == ("d0", (), "lane_broken")


def test_f25_a_prefill_node_behind_a_broken_lane_is_not_asked_while_others_are() -> None:
    decode = node("d0", broken_lanes=frozenset({NodeId("p0")}))
    found = placed(decode, node("p0", Role.PREFILL), node("p1", Role.PREFILL, queued_tokens=10_000))
    assert isinstance(found, Placement)
    assert names(found.prefill) == ["p1"]


def test_f27_without_a_prefill_node_the_decode_node_serves_alone_and_the_reason_is_named() -> None:
    def reason(*prefill: Candidate, **options: Any) -> str:
        found = placed(node("d0"), *prefill, **options)
        assert isinstance(found, Placement)
        assert found.prefill == ()
        return found.local_reason

    assert reason() == "no_prefill_node"
    assert reason(node("p0", Role.PREFILL, refusal="node_lost")) == "prefill_not_ready"
    assert reason(node("p0", Role.PREFILL), disaggregate=Disaggregate.NEVER) == "disaggregation_off"


def test_f16_nodes_that_do_not_fit_together_are_never_paired() -> None:
    found = placed(node("d0"), node("p0", Role.PREFILL, compatible_with="other"))
    assert isinstance(found, Placement)
    assert found.prefill == ()
    assert found.local_reason == "prefill_incompatible"
