"""A prefill node's service between a recorder in place of the transfers and a list in place of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio
from decant_proto.v1 import types_pb2

from engine import port as engine_port
from engine.config import EngineConfig
from engine.port import (
    Cancel,
    KvComputed,
    KvLayersComputed,
    Mode,
    PrefillReserved,
    ReleaseKv,
    RequestFailed,
    Submit,
    TokenSampled,
)
from foundation.ids import BlockId, RequestId, TransferId
from foundation.metrics import NodeMetrics
from kv_transfer.port import PrefillRequest, SettledToken
from prefill_node.service import PrefillService, request_key

CONFIG = EngineConfig(block_size=16, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=512)
TRANSFER = TransferId(RequestId("r"), 1, 1)
KEY = request_key(TRANSFER)


class RecordedTransfers:
    """A fake of the transfers: records what the node tells them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def refuse(self, transfer: TransferId, reason: str, retry_after_s: float) -> None:
        self.calls.append(("refuse", transfer, reason, retry_after_s > 0))

    def reserved(self, transfer: TransferId, *what: Any) -> None:
        self.calls.append(("reserved", transfer, *what))

    def layers_computed(self, transfer: TransferId, positions: int, end_layer: int) -> None:
        self.calls.append(("layers_computed", transfer, positions, end_layer))

    def computed(self, transfer: TransferId, positions: int) -> None:
        self.calls.append(("computed", transfer, positions))

    def first_token(self, transfer: TransferId, tokens: Any) -> None:
        self.calls.append(("first_token", transfer, tokens))

    def failed(self, transfer: TransferId, reason: str) -> None:
        self.calls.append(("failed", transfer, reason))


class Desk:
    def __init__(self) -> None:
        self.commands: list[engine_port.Command] = []
        self.transfers = RecordedTransfers()
        self.service = PrefillService(self.commands.append, CONFIG, 1000, NodeMetrics())
        self.service.use(self.transfers)

    def ask(self, transfer: TransferId = TRANSFER, choices: int = 1, **sampling: Any) -> None:
        parameters = types_pb2.SamplingParameters(max_tokens=8, **sampling)
        wire = parameters.SerializeToString()
        self.service.prefill(PrefillRequest(transfer, tuple(range(40)), (5,), wire, choices, 60.0))


@pytest_asyncio.fixture
async def desk() -> Desk:
    return Desk()


RESERVED = PrefillReserved(KEY, (BlockId(3), BlockId(4), BlockId(5)), (7, 7, 7), 16)
SAMPLED = TokenSampled(KEY, 41, 99, logprob=-0.5)


async def test_a_prompt_is_computed_and_its_progress_goes_back_in_order(desk: Desk) -> None:
    desk.ask(choice_index=3, seed=4)
    desk.service.engine_events([RESERVED, KvComputed(KEY, 32)])
    desk.service.engine_events([KvLayersComputed(KEY, 41, 8)])
    desk.service.engine_events([KvComputed(KEY, 41), SAMPLED])
    (submit,) = desk.commands
    assert isinstance(submit, Submit)
    assert (submit.mode, submit.choice_index, submit.settled) == (Mode.PREFILL_ONLY, 3, (5,))
    assert desk.transfers.calls == [
        ("reserved", TRANSFER, (3, 4, 5), (7, 7, 7), 16, 41),
        ("computed", TRANSFER, 32),
        ("layers_computed", TRANSFER, 41, 8),
        ("computed", TRANSFER, 41),
        ("first_token", TRANSFER, (SettledToken(99, -0.5),)),
    ]


async def test_a_finished_prefill_that_is_released_keeps_its_kv_for_the_cache(desk: Desk) -> None:
    desk.ask()
    desk.service.engine_events([RESERVED, KvComputed(KEY, 41), SAMPLED])
    desk.service.released(TRANSFER, "committed")
    assert desk.commands[1:] == [ReleaseKv(KEY)]
    assert desk.service.idle.is_set()


@pytest.mark.parametrize("events", [[], [RESERVED], [RESERVED, KvComputed(KEY, 32)]])
async def test_f10_a_release_before_the_end_stops_the_computation(
    desk: Desk, events: list[engine_port.EngineEvent]
) -> None:
    desk.ask()
    desk.service.engine_events(events)
    desk.service.released(TRANSFER, "client_gone")
    assert desk.commands[1:] == [Cancel(KEY)]
    calls = len(desk.transfers.calls)
    desk.service.engine_events([KvComputed(KEY, 41), SAMPLED])
    assert len(desk.transfers.calls) == calls
    desk.service.released(TRANSFER, "again")
    assert len(desk.commands) == 2


async def test_first_tokens_of_several_answers_are_declined_and_the_kv_computed_all_the_same(desk: Desk) -> None:
    desk.ask(choices=2)
    desk.service.engine_events([RESERVED, KvComputed(KEY, 41), SAMPLED])
    assert desk.transfers.calls[-1] == ("first_token", TRANSFER, None)


async def test_where_all_kv_is_cached_the_first_token_is_declined_at_once(desk: Desk) -> None:
    desk.ask()
    desk.service.engine_events([PrefillReserved(KEY, (BlockId(3), BlockId(4), BlockId(5)), (7, 7, 7), 41)])
    assert desk.transfers.calls == [
        ("reserved", TRANSFER, (3, 4, 5), (7, 7, 7), 41, 41),
        ("first_token", TRANSFER, None),
    ]
    desk.service.released(TRANSFER, "committed")
    assert desk.commands[1:] == [ReleaseKv(KEY)]


async def test_a_failure_before_blocks_were_given_is_a_refusal_and_later_a_failure(desk: Desk) -> None:
    desk.ask()
    desk.service.engine_events([RequestFailed(KEY, "prompt_too_long")])
    assert desk.transfers.calls == [("refuse", TRANSFER, "prompt_too_long", False)]
    other = TransferId(RequestId("r"), 1, 2)
    desk.ask(other)
    desk.service.engine_events([PrefillReserved(request_key(other), (), (), 0)])
    desk.service.engine_events([RequestFailed(request_key(other), "engine_error")])
    assert desk.transfers.calls[-1] == ("failed", other, "engine_error")
    commands = len(desk.commands)
    desk.service.released(other, "prefill_failed")
    assert len(desk.commands) == commands


async def test_f13_beyond_the_queue_limit_an_ask_is_refused_with_a_retry_hint(desk: Desk) -> None:
    for number in range(1, 20):
        desk.ask(TransferId(RequestId("r"), 1, number))
    refused = [call for call in desk.transfers.calls if call[0] == "refuse"]
    assert len(refused) == 19 - 5 * CONFIG.max_num_seqs
    assert {call[2:] for call in refused} == {("overloaded", True)}


async def test_f23_a_draining_node_refuses_asks_and_is_idle_when_the_last_is_released(desk: Desk) -> None:
    desk.ask()
    desk.service.drain()
    assert not desk.service.idle.is_set()
    desk.ask(TransferId(RequestId("q"), 1, 1))
    assert desk.transfers.calls == [("refuse", TransferId(RequestId("q"), 1, 1), "draining", True)]
    desk.service.released(TRANSFER, "committed")
    assert desk.service.idle.is_set()


async def test_f17_sampling_that_is_no_protobuf_is_refused(desk: Desk) -> None:
    desk.service.prefill(PrefillRequest(TRANSFER, (1, 2), (), b"\xff\xff\xff", 1, 60.0))
    assert desk.transfers.calls == [("refuse", TRANSFER, "invalid_sampling", False)]
    assert desk.commands == []


async def test_f17_a_token_outside_the_vocabulary_never_reaches_the_engine(desk: Desk) -> None:
    wire = types_pb2.SamplingParameters(max_tokens=4).SerializeToString()
    desk.service.prefill(PrefillRequest(TRANSFER, (1, 1000), (), wire, 1, 60.0))
    assert desk.transfers.calls == [("refuse", TRANSFER, "token_outside_vocabulary", False)]
    assert desk.commands == []
