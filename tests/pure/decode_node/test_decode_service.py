"""A decode node's service between a recorder in place of the transfers and a list in place of the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest_asyncio
from decant_proto.v1 import node_pb2, types_pb2

from decode_node.service import DecodeService
from engine import port as engine_port
from engine.config import EngineConfig
from engine.port import Cancel, FinishReason, KvReserved, Mode, ReserveKv, StartFromKv, Submit, TokenSampled
from foundation.ids import BlockId, RequestId, TransferId
from foundation.metrics import NodeMetrics
from kv_transfer.port import BeginTransfer, SettledToken, TransferAccount
from node.router_stream import Attachment

CONFIG = EngineConfig(block_size=16, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=512)
ACCOUNT = TransferAccount(0, 0, 0, 0, 0.0, "")


class AnsweringTransfers:
    """A fake of the transfers: records what the node says; with `unreachable`, a try ends within `begin`."""

    def __init__(self) -> None:
        self.begun: list[BeginTransfer] = []
        self.calls: list[tuple[Any, ...]] = []
        self.unreachable: set[str] = set()
        self.service: DecodeService | None = None

    def begin(self, request: BeginTransfer) -> None:
        self.begun.append(request)
        if request.prefill_node in self.unreachable:
            assert self.service is not None
            self.service.ended(request.transfer, "peer_closed", ACCOUNT)

    def reserved(self, transfer: TransferId, *what: Any) -> None:
        self.calls.append(("reserved", transfer, *what))

    def unavailable(self, transfer: TransferId, reason: str) -> None:
        self.calls.append(("unavailable", transfer, reason))

    def end(self, transfer: TransferId, reason: str) -> None:
        self.calls.append(("end", transfer, reason))


class Desk:
    def __init__(self) -> None:
        self.commands: list[engine_port.Command] = []
        self.metrics = NodeMetrics()
        self.transfers = AnsweringTransfers()
        self.service = self.transfers.service = DecodeService(self.commands.append, CONFIG, 1000, self.metrics)
        self.service.use(self.transfers)
        self.router = Attachment("r", 30.0)

    def submit(self, request_id: str = "a", attempt: int = 1, prefill: tuple[str, ...] = (), length: int = 40) -> None:
        message = node_pb2.Submit(
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=range(length),
            sampling=types_pb2.SamplingParameters(max_tokens=8, seed=3),
            choice_index=2,
            prefill_choices=[node_pb2.PrefillChoice(node_id=name, ticket=b"t") for name in prefill],
        )
        self.service.submit(self.router, message)

    def heard(self) -> list[node_pb2.StepOutput]:
        messages = []
        while not self.router._outbox.empty():
            message = self.router._outbox.get_nowait()
            assert message is not None
            messages.append(message.step)
        return messages

    def counted(self, metric: str) -> dict[str, float]:
        return {
            sample.labels["reason"]: sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"decant_{metric}" and sample.value
        }


@pytest_asyncio.fixture
async def desk() -> Desk:
    return Desk()


def token(name: str, position: int, finish: FinishReason | None = None) -> TokenSampled:
    return TokenSampled(engine_port.RequestKey(name), position, 7, finish)


async def test_the_tokens_of_one_step_are_one_message(desk: Desk) -> None:
    desk.submit("a")
    desk.submit("b")
    desk.service.engine_events([token("a/1", 40), token("b/1", 40)])
    (step,) = desk.heard()
    assert [output.request_id for output in step.outputs] == ["a", "b"]


async def test_a_transfer_is_begun_with_the_choice_in_its_sampling(desk: Desk) -> None:
    desk.submit(prefill=("p1", "p2"))
    (begun,) = desk.transfers.begun
    assert begun.transfer == TransferId(RequestId("a"), 1, 1)
    assert types_pb2.SamplingParameters.FromString(begun.sampling).choice_index == 2
    assert 0 < begun.deadline_s <= 600
    (submit,) = desk.commands
    assert isinstance(submit, Submit)
    assert submit.mode is Mode.AWAIT_KV


async def test_f27_every_prefill_node_is_tried_and_then_the_prompt_is_computed_here(desk: Desk) -> None:
    desk.transfers.unreachable = {"p1", "p2"}
    desk.submit(prefill=("p1", "p2"))
    assert [begun.prefill_node for begun in desk.transfers.begun] == ["p1", "p2"]
    assert desk.commands[-1] == StartFromKv(engine_port.RequestKey("a/1"), 0, None)
    assert desk.counted("local_prefill_total") == {"peer_closed": 1}


async def test_a_reason_nobody_foresaw_is_counted_as_a_failed_transfer(desk: Desk) -> None:
    desk.submit(prefill=("p1",))
    desk.service.ended(TransferId(RequestId("a"), 1, 1), "some_new_reason", ACCOUNT)
    assert desk.counted("local_prefill_total") == {"transfer_failed": 1}


async def test_the_whole_way_of_a_transfer(desk: Desk) -> None:
    key, transfer = engine_port.RequestKey("a/1"), TransferId(RequestId("a"), 1, 1)
    desk.submit(prefill=("p1",))
    desk.service.reserve(transfer, 40)
    desk.service.engine_events([KvReserved(key, (BlockId(1), BlockId(2), BlockId(3)), 16, 40)])
    desk.service.first_token(transfer, SettledToken(7))
    (step,) = desk.heard()
    assert [(output.tokens[0].position, output.tokens[0].token_id) for output in step.outputs] == [(40, 7)]
    desk.service.committed(transfer, TransferAccount(16, 40, 999, 3, 0.1, "tcp"))
    assert desk.transfers.calls == [("reserved", transfer, (1, 2, 3), 16, 40)]
    assert desk.commands[1:] == [ReserveKv(key, 40), StartFromKv(key, 40, 7)]
    account = TokenSampled(key, 41, 8, FinishReason.LENGTH, prompt_cached=16, prompt_transferred=24, prompt_computed=0)
    desk.service.engine_events([account])
    (step,) = desk.heard()
    assert step.outputs[0].prompt_account.prefill_node == "p1"
    assert desk.service.idle.is_set()


async def test_f10_a_router_that_leaves_ends_its_transfers_and_then_frees_the_blocks(desk: Desk) -> None:
    desk.submit(prefill=("p1",))
    desk.service.detached(desk.router, "lease_lapsed")
    transfer = TransferId(RequestId("a"), 1, 1)
    assert desk.transfers.calls == [("end", transfer, "lease_lapsed")]
    assert not desk.service.idle.is_set()
    desk.service.ended(transfer, "lease_lapsed", ACCOUNT)
    assert desk.commands[-1] == Cancel(engine_port.RequestKey("a/1"))
    assert desk.service.idle.is_set()
    assert desk.counted("kv_transfer_failures_total") == {"cancelled": 1}
    assert desk.counted("local_prefill_total") == {}


async def test_f20_a_transfer_that_a_last_first_token_ended_is_no_failure(desk: Desk) -> None:
    desk.submit(prefill=("p1",), length=CONFIG.max_model_len - 1)
    transfer = TransferId(RequestId("a"), 1, 1)
    desk.service.first_token(transfer, SettledToken(7))
    desk.service.ended(transfer, "done", ACCOUNT)
    assert desk.counted("kv_transfer_failures_total") == {}
    assert desk.counted("request_success_total") == {"length": 1}


async def test_f18_another_routers_cancel_ends_nothing(desk: Desk) -> None:
    desk.submit()
    desk.service.cancel(Attachment("stranger", 30.0), node_pb2.Cancel(request_id="a", attempt=1))
    desk.service.cancel(desk.router, node_pb2.Cancel(request_id="a", attempt=2))
    assert desk.service.attempts == 1


async def test_f18_the_same_attempt_twice_at_once_is_one(desk: Desk) -> None:
    desk.submit()
    desk.submit()
    assert len(desk.commands) == 1


async def test_f36_a_higher_attempt_waits_for_nobody_while_the_lower_ones_transfer_ends(desk: Desk) -> None:
    desk.submit(prefill=("p1",))
    desk.submit(attempt=2)
    assert desk.transfers.calls == [("end", TransferId(RequestId("a"), 1, 1), "superseded")]
    assert desk.service.attempts == 2
    desk.service.ended(TransferId(RequestId("a"), 1, 1), "superseded", ACCOUNT)
    desk.service.engine_events([token("a/2", 40)])
    assert [output.attempt for step in desk.heard() for output in step.outputs] == [1, 2]


async def test_late_engine_events_of_a_cancelled_attempt_change_nothing(desk: Desk) -> None:
    desk.submit()
    desk.service.cancel(desk.router, node_pb2.Cancel(request_id="a", attempt=1))
    desk.heard()
    desk.service.engine_events([token("a/1", 40)])
    assert desk.heard() == []


async def test_f29_the_deadline_counts_from_receipt(desk: Desk) -> None:
    message = node_pb2.Submit(
        request_id="a",
        attempt=1,
        prompt_token_ids=[1],
        sampling=types_pb2.SamplingParameters(max_tokens=8),
        deadline_ms=20,
    )
    desk.service.submit(desk.router, message)
    async with asyncio.timeout(10):
        await desk.service.idle.wait()
    assert desk.heard()[-1].outputs[0].failure == "deadline"


async def test_prompt_logprobs_reach_the_router_before_the_first_token(desk: Desk) -> None:
    sampling = types_pb2.SamplingParameters(max_tokens=8, prompt_logprobs=1)
    message = node_pb2.Submit(request_id="a", attempt=1, prompt_token_ids=[5, 6, 7], sampling=sampling)
    desk.service.submit(desk.router, message)
    (submit,) = desk.commands
    assert isinstance(submit, Submit)
    assert submit.sampling.prompt_logprobs == 1
    scored = engine_port.PromptScored(submit.key, 1, (-1.5, -0.25), (3, 1), (9, 7), (-0.5, -0.25))
    desk.service.engine_events([scored, token("a/1", 3)])
    (step,) = desk.heard()
    first, second = step.outputs
    assert (first.prompt_logprobs.position, list(first.prompt_logprobs.logprobs)) == (1, [-1.5, -0.25])
    assert (list(first.prompt_logprobs.ranks), list(first.prompt_logprobs.top_token_ids)) == ([3, 1], [9, 7])
    assert [one.position for one in second.tokens] == [3]


async def test_a_prompt_that_is_to_be_scored_is_not_taken_from_another_node(desk: Desk) -> None:
    choice = node_pb2.PrefillChoice(node_id="p1", ticket=b"t")
    sampling = types_pb2.SamplingParameters(max_tokens=8, prompt_logprobs=0)
    message = node_pb2.Submit(
        request_id="a", attempt=1, prompt_token_ids=[5], sampling=sampling, prefill_choices=[choice]
    )
    desk.service.submit(desk.router, message)
    assert desk.heard()[-1].outputs[0].failure == "invalid_sampling"
    assert not desk.commands
