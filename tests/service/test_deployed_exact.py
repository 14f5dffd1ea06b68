"""Golden prompts through router, prefill node and decode node, over UCX, whatever is cached where: transformers' tokens, and
exactly the KV that the decode node lacked.

The pairings are of unlike nodes (blocks of 16 and 32, a whole pool and three single-head shards, HND and NHD), and one of
them cuts every transfer into at least 8 parcels. The default run takes 12 prompts, GOLDEN=all takes all 64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import openai
import pytest
from deployment import TOKEN_BYTES, Deployment, Generated, RouterProcess, Spent
from pd_nodes import NodeProcess, json_lines
from references import Reference, load_references, near_tie_or_none
from tcp_connections import carried_bytes

pytestmark = [pytest.mark.sockets, pytest.mark.model, pytest.mark.timeout(400)]

MOST_TOKENS = 8
"""Of an answer: its first tokens are those that read the KV that came by this way. Colder runs take all 32."""
BLOCK = 16
"""Of the nodes that cache, p and d3."""


def first_tokens(references: Iterable[Reference], count: int) -> list[Reference]:
    return [replace(one, output_ids=one.output_ids[:count], margins=one.margins[:count]) for one in references]


def compare(references: Sequence[Reference], found: Sequence[Generated]) -> None:
    parted = {r.name: near_tie_or_none(one.tokens, r) for r, one in zip(references, found, strict=True)}
    ties = {name: position for name, position in parted.items() if position is not None}
    print(f"{len(references)} golden prompts, near-ties: {ties or 'none'}")  # noqa: T201


def lengths(references: Iterable[Reference]) -> int:
    return sum(len(one.prompt_ids) for one in references)


def decoded(found: Iterable[Generated]) -> int:
    """Tokens that went through the decode node's model to give these answers: all but each one's last."""
    return sum(len(one.tokens) - 1 for one in found)


def whole_blocks(reference: Reference) -> int:
    return len(reference.prompt_ids) // BLOCK * BLOCK


def computed_to_draw(reference: Reference, on_prefill: int, on_decode: int) -> int:
    """Positions that decode computes for the first token, which a prefill node with the whole prompt cached leaves to it:
    the last one, or the block of it where others may read that block."""
    length = len(reference.prompt_ids)
    if on_prefill < length:
        return 0
    return BLOCK if on_decode == length else 1


def used(on_decode: int, drawn: int) -> int:
    """Of the cached positions, those that were not computed again."""
    return on_decode - BLOCK if drawn == BLOCK else on_decode


def check_one_wasted_step_at_most(stepped: int, expected: int, found: Iterable[Generated], most_tokens: int) -> None:
    """A step is launched before the last one's tokens are known, so an answer that stops by itself may cost one token more."""
    stopped = sum(len(one.tokens) < most_tokens for one in found)
    assert expected <= stepped <= expected + stopped


async def warm(router: RouterProcess, prompts: Iterable[Sequence[int]]) -> None:
    """Have the nodes that cache hold these prompts: an answer of one token ends before the KV has come to the decode node."""
    await router.generate_all(list(prompts), max_tokens=2)


def block_ends(positions: int) -> range:
    return range(BLOCK, positions + 1, BLOCK)


async def test_prompts_that_are_partly_cached_on_both_nodes(deployment: Deployment) -> None:
    """The first to use the caches: half of each prompt is asked for, then all of it."""
    router = await deployment.router("p", "d3")
    references = first_tokens(load_references(), MOST_TOKENS)
    # Whole blocks: a half that lacks one token of a block may be answered with the very token that its prompt goes on with.
    halves = [one.prompt_ids[: max(BLOCK, whole_blocks(one) // 2 // BLOCK * BLOCK)] for one in references]
    await warm(router, halves)
    held = {tuple(half[:end]) for half in halves for end in range(BLOCK, len(half) + 1, BLOCK)}
    asked_for = Counter(tuple(one.prompt_ids[:end]) for one in references for end in block_ends(len(one.prompt_ids)))

    def held_positions(reference: Reference, at_most: int) -> int:
        ends = block_ends(at_most)
        return next((end - BLOCK for end in ends if tuple(reference.prompt_ids[:end]) not in held), at_most)

    def shares_no_new_block(reference: Reference) -> bool:
        """Whether no other prompt, asked for at the same time, may bring a block into the caches before this one does."""
        new = tuple(reference.prompt_ids[: held_positions(reference, len(reference.prompt_ids)) + BLOCK])
        return asked_for[new] <= 1

    references = list(filter(shares_no_new_block, references))
    on_decode = [held_positions(one, whole_blocks(one)) for one in references]
    on_prefill = [held_positions(one, whole_blocks(one)) for one in references]
    drawn = list(map(computed_to_draw, references, on_prefill, on_decode))
    assert any(0 < cached < len(one.prompt_ids) - BLOCK for cached, one in zip(on_decode, references, strict=True))
    async with Spent(deployment, "p", "d3") as spent:
        found = await router.generate_all([one.prompt_ids for one in references], MOST_TOKENS)
    compare(references, found)
    assert [one.cached_tokens for one in found] == list(map(used, on_decode, drawn))
    assert spent.cached("d3") == sum(map(used, on_decode, drawn))
    assert spent.cached("p") == sum(on_prefill)
    assert spent.stepped("p") == lengths(references) - sum(on_prefill)
    assert spent.moved("p") == spent.moved("d3") == (lengths(references) - sum(on_decode)) * TOKEN_BYTES
    check_one_wasted_step_at_most(spent.stepped("d3"), decoded(found) + sum(drawn), found, MOST_TOKENS)
    assert spent.failures("d3") == {}


async def test_prompts_that_are_cached_on_both_nodes(deployment: Deployment) -> None:
    router = await deployment.router("p", "d3")
    references = first_tokens(load_references(), MOST_TOKENS)
    await warm(router, (one.prompt_ids for one in references))
    async with Spent(deployment, "p", "d3") as spent:
        found = await router.generate_all([one.prompt_ids for one in references], MOST_TOKENS)
    compare(references, found)
    cached = list(map(whole_blocks, references))
    drawn = list(map(computed_to_draw, references, cached, cached))
    assert [one.cached_tokens for one in found] == list(map(used, cached, drawn))
    assert spent.cached("p") == sum(cached)
    assert spent.stepped("p") == lengths(references) - sum(cached)
    assert spent.moved("p") == spent.moved("d3") == (lengths(references) - sum(cached)) * TOKEN_BYTES
    check_one_wasted_step_at_most(spent.stepped("d3"), decoded(found) + sum(drawn), found, MOST_TOKENS)
    assert spent.failures("d3") == {}


async def test_openai_clients_are_told_what_was_cached(deployment: Deployment) -> None:
    router = await deployment.router("p", "d3")
    reference = next(one for one in load_references() if len(one.prompt_ids) > 100)
    await warm(router, [reference.prompt_ids])
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(
            model=deployment.model.name, prompt=reference.prompt_ids, temperature=0, max_tokens=32
        )
    assert answer.choices[0].text == reference.output_text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(reference.prompt_ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == whole_blocks(reference)


async def test_prompts_that_are_cached_on_the_prefill_node_alone(deployment: Deployment) -> None:
    """From a pool of blocks of 16 into one of blocks of 32."""
    router = await deployment.router("p", "d")
    references = first_tokens(load_references(), MOST_TOKENS)
    await warm(router, (one.prompt_ids for one in references))
    async with Spent(deployment, "p", "d") as spent:
        found = await router.generate_all([one.prompt_ids for one in references], MOST_TOKENS)
    compare(references, found)
    cached = list(map(whole_blocks, references))
    drawn = [computed_to_draw(one, on_prefill, 0) for one, on_prefill in zip(references, cached, strict=True)]
    assert spent.cached("p") == sum(cached)
    assert spent.stepped("p") == lengths(references) - sum(cached)
    assert spent.moved("p") == spent.moved("d") == lengths(references) * TOKEN_BYTES
    assert [one.cached_tokens for one in found] == [0] * len(found)
    check_one_wasted_step_at_most(spent.stepped("d"), decoded(found) + sum(drawn), found, MOST_TOKENS)
    assert spent.failures("d") == {}


async def test_prompts_that_are_cached_on_the_decode_node_alone(deployment: Deployment) -> None:
    """From blocks of 32 into blocks of 16, both sides in three shards, in parcels that hold little."""
    references = first_tokens(load_references(), MOST_TOKENS)
    await warm(await deployment.router("p", "d3"), (one.prompt_ids for one in references))
    router = await deployment.router("p3", "d3")
    async with Spent(deployment, "p3", "d3") as spent:
        found = await router.generate_all([one.prompt_ids for one in references], MOST_TOKENS)
    compare(references, found)
    assert [one.cached_tokens for one in found] == [whole_blocks(one) for one in references]
    assert spent.cached("p3") == 0
    assert spent.stepped("p3") == lengths(references)
    moved = sum(len(one.prompt_ids) % BLOCK for one in references) * TOKEN_BYTES
    assert spent.moved("p3") == spent.moved("d3") == moved
    check_one_wasted_step_at_most(spent.stepped("d3"), decoded(found), found, MOST_TOKENS)
    assert spent.failures("d3") == {}


async def test_prompts_on_a_decode_node_without_any_prefill_node(deployment: Deployment) -> None:
    router = await deployment.router("d")
    references = load_references()
    async with Spent(deployment, "d") as spent:
        found = await router.generate_all([one.prompt_ids for one in references], max_tokens=32)
    compare(references, found)
    assert spent.moved("d") == 0
    assert spent.grown("d", "local_prefill_total", reason="no_prefill_node") == len(references)
    check_one_wasted_step_at_most(spent.stepped("d"), lengths(references) + decoded(found), found, 32)


async def test_three_single_head_shards_to_a_whole_pool_cut_into_at_least_eight_parcels_each(
    deployment: Deployment,
) -> None:
    router = await deployment.router("p3", "d")
    references = first_tokens((one for one in load_references() if len(one.prompt_ids) < 1000), MOST_TOKENS)
    already = parcels_sent(deployment.node("p3"))
    async with Spent(deployment, "p3", "d") as spent:
        found = await router.generate_all([one.prompt_ids for one in references], MOST_TOKENS)
    compare(references, found)
    assert spent.moved("p3") == spent.moved("d") == lengths(references) * TOKEN_BYTES
    assert spent.stepped("p3") == lengths(references)
    parcels = parcels_sent(deployment.node("p3")) - already
    assert len(parcels) == len(references)
    assert min(parcels.values()) >= 8
    assert spent.failures("d") == {}


def parcels_sent(prefill: NodeProcess) -> Counter[str]:
    """Parcels of each transfer, as the log of a prefill node tells."""
    return Counter(line["transfer"] for line in json_lines(prefill.log_path) if line.get("stage") == "sent")


async def test_the_kv_travels_beside_the_control_stream_and_never_on_it(deployment: Deployment) -> None:
    router = await deployment.router("p3", "d")
    reference = first_tokens((one for one in load_references() if len(one.prompt_ids) > 200), MOST_TOKENS)[0]
    d, p = deployment.node("d").process.pid, deployment.node("p3").process.pid
    before = carried_bytes(d, p)
    await router.generate(reference.prompt_ids, MOST_TOKENS)
    after = carried_bytes(d, p)
    carried = {ends: after[ends] - before.get(ends, 0) for ends in after}
    ports = deployment.node("p3").ports
    control = sum(count for ends, count in carried.items() if ends.remote_port == ports.control)
    greeting = sum(count for ends, count in carried.items() if ends.remote_port == ports.data)
    elsewhere = sum(carried.values()) - control - greeting
    kv_bytes = len(reference.prompt_ids) * TOKEN_BYTES
    print(f"KV {kv_bytes}: on UCX's connections {elsewhere}, on the control stream {control}")  # noqa: T201
    assert elsewhere >= kv_bytes
    assert 0 < control < kv_bytes / 50
    assert greeting < 1000
