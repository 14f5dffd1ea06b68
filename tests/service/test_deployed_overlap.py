"""The transfer of a long prompt is hidden behind its computation, but for the last chunk's: the timeline of a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deployment import SMALL_SLOT_BYTES, TOKEN_BYTES, Deployment, Spent
from pd_nodes import NodeProcess, json_lines
from references import ONLY_WITH_ALL, all_references, near_tie_or_none

from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import cut_parcels

pytestmark = [pytest.mark.sockets, pytest.mark.model, pytest.mark.timeout(240), ONLY_WITH_ALL]

OF_DECODE = KvLayout(30, 3, 64, "float32", 32, "HND", layer_group=30)
OF_PREFILL = replace(OF_DECODE, head_order="NHD", tensor_parallel=3)
ANSWER_TOKENS = 4
TRIES = 3
"""Where the machine keeps a process waiting just then, nothing is hidden; so one of these must show it."""


def told(node: NodeProcess, event: str) -> list[dict[str, Any]]:
    """Lines of a node's log; timestamps of processes on one machine can be compared, and sorted as they are written."""
    return [line for line in json_lines(node.log_path) if line["event"] == event]


async def test_all_but_the_last_chunk_has_landed_when_the_last_chunk_is_computed(deployment: Deployment) -> None:
    late = [await parcels_of_earlier_chunks_that_were_not_hidden(deployment)]
    while late[-1] and len(late) < TRIES:
        late.append(await parcels_of_earlier_chunks_that_were_not_hidden(deployment))
    assert not late[-1], late


async def parcels_of_earlier_chunks_that_were_not_hidden(deployment: Deployment) -> list[int]:
    """Of the transfer of one long prompt, which nobody caches."""
    router = await deployment.router("p3", "d")
    prefill, decode = deployment.node("p3"), deployment.node("d")
    reference = next(one for one in all_references() if len(one.prompt_ids) == 1900)
    length = len(reference.prompt_ids)
    async with Spent(deployment, "p3", "d") as spent:
        answer = await router.generate(reference.prompt_ids, ANSWER_TOKENS)
    near_tie_or_none(answer.tokens, replace(reference, output_ids=reference.output_ids[:ANSWER_TOKENS]))
    assert spent.moved("p3") == spent.moved("d") == length * TOKEN_BYTES

    transfer = [line["transfer"] for line in told(prefill, "computed") if line["positions"] == length][-1]
    computed = [
        (line["timestamp"], line["positions"]) for line in told(prefill, "computed") if line["transfer"] == transfer
    ]
    assert len(computed) >= 6, "a long prompt is computed in chunks"
    assert computed == sorted(computed)

    def when(node: NodeProcess, stage: str) -> dict[int, str]:
        lines = (line for line in told(node, "parcel") if (line["transfer"], line["stage"]) == (transfer, stage))
        return {line["parcel"]: line["timestamp"] for line in lines}

    plan = cut_parcels(0, length, OF_PREFILL, OF_DECODE, SMALL_SLOT_BYTES)
    gathered, sent, landed = when(prefill, "gathered"), when(prefill, "sent"), when(decode, "landed")
    assert sorted(gathered) == sorted(sent) == sorted(landed) == list(range(len(plan)))

    begin = 0
    for at, positions in computed:
        of_chunk = [landed[index] for index, parcel in enumerate(plan) if begin < parcel.end_position <= positions]
        print(f"[{begin}, {positions}): computed {at}, landed {min(of_chunk)} to {max(of_chunk)}")  # noqa: T201
        begin = positions

    all_computed_at, _ = computed[-1]
    _, positions_before = computed[-2]
    for index, parcel in enumerate(plan):
        ready_at = next(at for at, positions in computed if positions >= parcel.end_position)
        assert ready_at < gathered[index] < landed[index]
    assert max(landed.values()) > all_computed_at
    earlier = (index for index, parcel in enumerate(plan) if parcel.end_position <= positions_before)
    return [index for index in earlier if landed[index] >= all_computed_at]
