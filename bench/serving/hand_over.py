"""How long KV takes from prefill to decode on an idle system, and what a client sees of it.

Prompts go one by one, so that no other GPU work disturbs them. Each is asked twice: the second time the prefill node holds its
KV (all but the last block, computed again for the first token's logits); the decode node, without a prefix cache, does not.
A third set goes to the decode node alone, through the same router: the difference of the times to first token is the price.

    overlapped:  P knows that the last position is computed  -> D has committed
    cached:      D has its blocks and grants credits         -> D has committed
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.serving.fleet import Arrangement, Fleet
from bench.serving.open_loop import Client, Served
from bench.serving.workload import Shape

ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class HandOverPlan:
    prompt_tokens: int
    prompts: int
    seed: int = 50_000


async def measure_hand_over(fleet: Fleet, client: Client, plan: HandOverPlan) -> dict[str, Any]:
    shape = Shape(plan.prompt_tokens, ANSWER_TOKENS)
    fleet.arrange(Arrangement.APART)
    for warm in range(3):
        await client.ask(shape, plan.seed - 1 - warm)
    fresh, cached = [], []
    for index in range(plan.prompts):
        fresh.append(await client.ask(shape, plan.seed + index))
        cached.append(await client.ask(shape, plan.seed + index))
    transfers = list(transfer_times(fleet).values())[-2 * plan.prompts :]
    for node in fleet.of_role("prefill"):
        fleet.use(node.name, False)
    local = [await client.ask(shape, plan.seed + 10_000 + index) for index in range(plan.prompts + 1)]
    fleet.arrange(Arrangement.APART)
    _require_complete([*fresh, *cached, *local])
    assert len(transfers) == 2 * plan.prompts, (
        f"{len(transfers)} transfers of {2 * plan.prompts} prompts were committed"
    )
    overlapped, repeated = transfers[0::2], transfers[1::2]
    cached_s = statistics.median(transfer.granted_to_committed_s for transfer in repeated)
    payload_bytes = statistics.median(transfer.payload_bytes for transfer in repeated)
    itl_s = statistics.median(gap for served in fresh for gap in _gaps(served)[1:])
    second_s = statistics.median(_gaps(served)[0] for served in fresh)
    apart_s, local_s = (statistics.median(served.ttft_s for served in answers) for answers in (fresh, local[1:]))
    return {
        "lane": overlapped[-1].lane,
        "prompt_tokens": plan.prompt_tokens,
        "payload_mib": payload_bytes / 2**20,
        "handover_ms": {
            "overlapped": _median_ms([transfer.computed_to_committed_s for transfer in overlapped]),
            "cached": cached_s * 1e3,
        },
        "overlapped_worst_ms": max(transfer.computed_to_committed_s for transfer in overlapped) * 1e3,
        "cached_gb_s": payload_bytes / cached_s / 1e9,
        "second_token_gap_ms": (second_s - itl_s) * 1e3,
        "itl_ms": itl_s * 1e3,
        "ttft_ms": {"apart": apart_s * 1e3, "local": local_s * 1e3},
        "ttft_added_ms": (apart_s - local_s) * 1e3,
    }


@dataclass(frozen=True, slots=True)
class TransferTimes:
    computed_to_committed_s: float
    granted_to_committed_s: float
    payload_bytes: int
    lane: str


def transfer_times(fleet: Fleet) -> dict[str, TransferTimes]:
    """Of every committed transfer, in the order of their commits."""
    computed: dict[str, float] = {}
    reserved: dict[str, float] = {}
    for node in fleet.of_role("prefill"):
        computed |= {str(event["transfer"]): float(event["at"]) for event in fleet.events(node.name, "computed")}
    for node in fleet.of_role("decode"):
        reserved |= {str(event["transfer"]): float(event["at"]) for event in fleet.events(node.name, "reserved")}
    committed = [event for node in fleet.of_role("decode") for event in fleet.events(node.name, "committed")]
    times = {}
    for event in sorted(committed, key=lambda event: event["at"]):
        transfer, at_s = str(event["transfer"]), float(event["at"])
        granted_s = reserved[transfer]
        times[transfer] = TransferTimes(
            at_s - computed.get(transfer, granted_s), at_s - granted_s, int(event["bytes"]), str(event["lane"])
        )
    return times


def _gaps(served: Served) -> list[float]:
    return [late - early for early, late in pairwise(served.events_s)]


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def _require_complete(answers: list[Served]) -> None:
    errors = [served.error for served in answers if not served.complete]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(answers)} answers failed, the first with: {errors[0]}")
