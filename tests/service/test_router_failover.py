"""Nodes die, hang, refuse and come back while streams run; clients leave. Real streams over gRPC, fake nodes behind them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from decant_proto.v1 import node_pb2, types_pb2
from router_fake_node import FakeNode, expected_answer
from router_model_folder import write_model_folder
from router_under_test import SILENCE_LIMIT_S, RouterUnderTest, router_with, until

from foundation.ids import AttemptId, Incarnation, NodeId, RequestId
from foundation.registry_entry import Role
from foundation.ticket import Ticket, digest_of_tokens, read_ticket

pytestmark = pytest.mark.sockets

ANSWER_TOKENS = 60
SEED = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")


def unharmed(prompt: str) -> str:
    return bytes(expected_answer(list(prompt.encode()), ANSWER_TOKENS, SEED)).decode()


async def streamed(router: RouterUnderTest, prompt: str) -> str:
    stream = await router.openai().completions.create(
        model=router.model, prompt=prompt, max_tokens=ANSWER_TOKENS, seed=SEED, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(chunk.choices[0].text for chunk in chunks)


async def test_f05_a_decode_node_killed_in_mid_stream_loses_and_repeats_no_token(folder: Path) -> None:
    nodes = [FakeNode("d0", tokens_until_pause=7), FakeNode("d1", tokens_until_pause=7)]
    async with router_with(folder, *nodes) as router:
        prompts = [f"prompt {index}" for index in range(8)]
        answers = asyncio.gather(*(streamed(router, prompt) for prompt in prompts))
        await router.heard(7, requests=8)
        assert nodes[0].requests
        assert nodes[1].requests, "load is spread"
        for node in nodes:
            node.tokens_until_pause = None
        await nodes[0].kill()
        assert await answers == [unharmed(prompt) for prompt in prompts]
        resumed = [submit for submit in nodes[1].submits if submit.attempt == 2]
        assert resumed
        assert all(len(submit.settled_token_ids) >= 7 for submit in resumed)
        assert await router.metric('decant_request_attempts_total{reason="node_lost"}') == len(resumed)


async def test_a_decode_node_that_falls_silent_is_given_up_at_the_silence_limit(folder: Path) -> None:
    hanging, other = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False)
    async with router_with(folder, hanging, other) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        other.ready = True
        hanging.silent = True
        # Later, where this process was stopped for a moment: that time does not count.
        await until(lambda: other.submits, 2 * SILENCE_LIMIT_S + 0.5)
        assert await answer == unharmed("hello")


async def test_f25_a_decode_node_that_speaks_but_takes_no_step_is_given_up_too(folder: Path) -> None:
    stalled, other = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False)
    async with router_with(folder, stalled, other) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        other.ready = True
        stalled.has_work = True  # and engine_steps stays where it is
        assert await answer == unharmed("hello")
        assert [cancel.reason for cancel in stalled.cancels] == ["node_stalled"]
        assert await router.metric('decant_nodes{role="decode"}') == 2


async def test_f22_the_only_decode_node_comes_back_under_its_address_and_the_stream_goes_on(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=5)
    async with router_with(folder, node) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        await node.kill()
        node.incarnation, node.tokens_until_pause = 2, None
        await node.start()
        assert await answer == unharmed("hello")
        link = router.router.fleet.link(NodeId("d0"))
        assert link is not None
        assert link.hello is not None
        assert link.hello.incarnation == 2


async def test_f36_a_cut_off_node_that_lives_on_adds_nothing_to_the_stream(folder: Path) -> None:
    """The former node goes on sending for its attempt; what it sends is dropped and counted."""
    first, second = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False, tokens_until_pause=20)
    async with router_with(folder, first, second) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        (request,) = first.requests.values()
        second.ready = True
        first.has_work = True
        await until(lambda: second.submits and all(one.emitted == 20 for one in second.requests.values()))
        late = [types_pb2.Token(position=len(request.history) + offset, token_id=33) for offset in range(3)]
        output = node_pb2.RequestOutput(request_id=request.submit.request_id, attempt=1, tokens=late)
        before = await router.metric('decant_dropped_total{reason="stale_attempt"}')
        first.say(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=[output])))
        await until(
            lambda: (
                router.router.metrics.registry.get_sample_value("decant_dropped_total", {"reason": "stale_attempt"})
                == before + 3
            )
        )
        second.tokens_until_pause = None
        assert await answer == unharmed("hello")


async def test_a_token_that_was_lost_on_the_way_is_computed_again_elsewhere(folder: Path) -> None:
    first, second = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False)
    async with router_with(folder, first, second) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        (request,) = first.requests.values()
        second.ready = True
        await until(lambda: router.router.fleet.link(NodeId("d1")).usable)  # type: ignore[union-attr]
        request.step()  # computed, never sent
        first.tokens_until_pause = None
        assert await answer == unharmed("hello")
        assert [len(submit.settled_token_ids) for submit in second.submits] == [5]


async def test_a_node_that_refuses_is_passed_over(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0", refusal="overloaded"), FakeNode("d1")) as router:
        assert await streamed(router, "hello") == unharmed("hello")


async def test_when_every_node_refuses_the_client_gets_503_with_the_reason(folder: Path) -> None:
    nodes = [FakeNode("d0", refusal="overloaded"), FakeNode("d1", refusal="overloaded")]
    async with (
        router_with(folder, *nodes) as router,
        router.http.post(
            f"{router.url}/v1/completions", json={"model": router.model, "prompt": "x", "stream": True}
        ) as response,
    ):
        error = (await response.json())["error"]
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
    assert (error["code"], error["retryable"], error["type"]) == ("overloaded", True, "server_error")


async def test_a_final_failure_is_500_and_not_tried_elsewhere(folder: Path) -> None:
    nodes = [FakeNode("d0", refusal="engine_error", refusal_retryable=False), FakeNode("d1", ready=False)]
    async with router_with(folder, *nodes) as router:
        status, found = await router.post("/v1/completions", {"model": router.model, "prompt": "x"})
    assert (status, found["error"]["code"], found["error"]["retryable"]) == (500, "engine_error", False)
    assert not nodes[1].submits


async def test_f20_what_only_a_node_finds_wrong_with_a_request_is_400(folder: Path) -> None:
    async with router_with(folder, FakeNode("d0", refusal="invalid_grammar", refusal_retryable=False)) as router:
        status, body = await router.post("/v1/completions", {"prompt": "x", "guided_grammar": "start: <[999]>"})
    assert (status, body["error"]["code"]) == (400, "invalid_grammar")


async def test_without_any_node_the_answer_is_503_and_names_it(folder: Path) -> None:
    async with router_with(folder) as router:
        router.router.dispatcher._around = replace(router.router.dispatcher._around, patience_s=0.05)
        status, found = await router.post("/v1/completions", {"model": router.model, "prompt": "x"})
        assert (status, found["error"]["code"], found["error"]["retryable"]) == (503, "no_decode_node", True)
        assert await router.metric('decant_requests_refused_total{reason="no_node"}') == 1
        assert (await router.get("/health"))[0] == 503


async def test_after_the_first_byte_a_failure_is_an_error_event_and_not_an_end(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=5)
    async with router_with(folder, node, request_timeout_s=0.5) as router:
        body: Any = {"model": router.model, "prompt": "x", "max_tokens": 50, "stream": True}
        async with router.http.post(f"{router.url}/v1/completions", json=body) as response:
            events = (await response.text()).strip().split("\n\n")
        assert response.status == 200
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline"
        assert "data: [DONE]" not in events
        stream = await router.openai().completions.create(**body)
        with pytest.raises(openai.APIError, match="longer than it may"):
            _ = [chunk async for chunk in stream]


async def test_a_stream_waits_for_a_node_whose_context_is_as_long_as_the_one_it_lost(folder: Path) -> None:
    long, short = FakeNode("d0", tokens_until_pause=7), FakeNode("d1", max_model_len=8, ready=False)
    async with router_with(folder, long, short) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(7)
        short.ready = True
        await until(lambda: router.router.fleet.usable_by_role()["decode"] == 2)
        await long.kill()
        await until(lambda: [one.waits_for for one in router.router.dispatcher.accounts()] == ["context_too_short"])
        long.incarnation, long.tokens_until_pause = 2, None
        await long.start()
        assert await answer == unharmed("hello")


async def test_f10_a_client_that_leaves_frees_the_node_within_a_second(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=3)
    async with router_with(folder, node) as router:
        for stream in (True, False):
            body: Any = {"model": router.model, "prompt": "x", "max_tokens": 50, "stream": stream}
            asking = asyncio.ensure_future(router.http.post(f"{router.url}/v1/completions", json=body))
            await until(lambda: any(one.emitted == 3 for one in node.requests.values()))
            if stream:
                (await asking).close()
            else:
                asking.cancel()
            await until(lambda: not node.requests, 1.0)
            await until(lambda: router.router.dispatcher.in_flight == 0, 1.0)
        assert [cancel.reason for cancel in node.cancels] == ["client_left", "client_left"]
        assert await router.metric('decant_request_success_total{reason="cancelled"}') == 2


async def test_f11_after_a_cancel_storm_nothing_remains(folder: Path) -> None:
    node = FakeNode("d0")
    async with router_with(folder, node) as router:
        body = {"model": router.model, "prompt": "x" * 200, "max_tokens": 300}
        asking = [asyncio.ensure_future(router.post("/v1/completions", body)) for _ in range(60)]
        await until(lambda: len(node.submits) >= 20)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: not node.requests and router.router.dispatcher.in_flight == 0, 2.0)
        link = router.router.fleet.link(NodeId("d0"))
        assert link is not None
        assert (link.attempts, link.pending_prompts, link.pending_tokens) == (set(), 0, 0)
        assert await streamed(router, "hello") == unharmed("hello")


async def test_too_many_waiting_requests_are_refused_at_once(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=0)
    async with router_with(folder, node, max_waiting_requests=2) as router:
        body = {"model": router.model, "prompt": "x"}
        waiting = [asyncio.ensure_future(router.post("/v1/completions", body)) for _ in range(2)]
        await until(lambda: len(node.requests) == 2)
        status, found = await router.post("/v1/completions", body)
        assert (status, found["error"]["code"], found["error"]["retryable"]) == (503, "overloaded", True)
        _, why = await router.get("/waiting")
        assert {one["waits_on"] for one in json.loads(why)["waiting"]} == {"d0"}
        node.tokens_until_pause = None
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_f23_a_draining_router_ends_what_it_has_and_takes_nothing_new(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=5)
    async with router_with(folder, node) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        draining = asyncio.ensure_future(router.router.drain(10.0))
        await until(lambda: router.router.dispatcher.draining)
        assert (await router.get("/live"))[0] == 200
        assert (await router.get("/health"))[0] == 503
        status, found = await router.post("/v1/completions", {"model": router.model, "prompt": "x"})
        assert (status, found["error"]["code"]) == (503, "draining")
        assert not draining.done()
        node.tokens_until_pause = None
        assert await answer == unharmed("hello")
        await asyncio.wait_for(draining, 8.0)  # and not when the grace is over


async def test_f23_when_the_grace_period_is_over_streams_end_with_an_error_event(folder: Path) -> None:
    node = FakeNode("d0", tokens_until_pause=5)
    async with router_with(folder, node) as router:
        body: Any = {"model": router.model, "prompt": "x", "max_tokens": 50, "stream": True}
        async with router.http.post(f"{router.url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            await router.router.drain(0.05)
            last = (await response.text()).strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        await until(lambda: not node.requests)


async def test_f23_a_draining_node_gets_nothing_new_and_keeps_what_no_other_node_takes(folder: Path) -> None:
    first, second = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False, max_num_seqs=1)
    async with router_with(folder, first, second) as router:
        answers = [asyncio.ensure_future(streamed(router, prompt)) for prompt in ("hello", "again")]
        await router.heard(5, requests=2)
        second.tokens_until_pause = 1
        first.draining, second.ready = True, True
        await until(lambda: len(second.submits) == 1)
        await until(lambda: router.router.fleet.link(NodeId("d0")).health.status.draining)  # type: ignore[union-attr]
        await until(lambda: len(first.requests) == 1)
        assert len(second.submits) == 1, "one seat, one stream moved"
        assert [len(submit.settled_token_ids) for submit in second.submits] == [5]
        first.tokens_until_pause = second.tokens_until_pause = None
        assert await asyncio.gather(*answers) == [unharmed("hello"), unharmed("again")]
        assert await streamed(router, "other") == unharmed("other")
        assert len(first.submits) == 2
        assert await router.metric('decant_request_attempts_total{reason="node_lost"}') == 0


async def test_f23_streams_leave_a_draining_node_one_by_one_as_seats_become_free(folder: Path) -> None:
    first, second = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False, max_num_seqs=1)
    async with router_with(folder, first, second) as router:
        prompts = ("hello", "again", "third")
        answers = [asyncio.ensure_future(streamed(router, prompt)) for prompt in prompts]
        await router.heard(5, requests=3)
        first.draining, second.ready = True, True
        assert await asyncio.gather(*answers) == [unharmed(prompt) for prompt in prompts]
        assert await router.metric('decant_request_attempts_total{reason="node_draining"}') == 3
        await until(lambda: [cancel.reason for cancel in first.cancels] == ["moved"] * 3)


async def test_f23_a_node_that_an_operator_spares_gives_its_streams_away_and_gets_work_again(folder: Path) -> None:
    first, second = FakeNode("d0", tokens_until_pause=5), FakeNode("d1", ready=False)
    async with router_with(folder, first, second) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        fleet = router.router.fleet
        second.ready = True
        await until(lambda: fleet.link(NodeId("d1")).usable)  # type: ignore[union-attr]
        assert fleet.withhold(NodeId("d0"), resume=False)
        assert not fleet.link(NodeId("d0")).attempts  # type: ignore[union-attr]
        assert await answer == unharmed("hello")
        assert await streamed(router, "other") == unharmed("other")
        assert len(first.submits) == 1
        fleet.withhold(NodeId("d0"), resume=True)
        fleet.withhold(NodeId("d1"), resume=False)
        first.tokens_until_pause = None
        assert await streamed(router, "third") == unharmed("third")


async def test_a_stream_that_finds_only_a_full_node_goes_on_when_the_node_has_room_again(folder: Path) -> None:
    first = FakeNode("d0", tokens_until_pause=5)
    second = FakeNode("d1", refusal="overloaded", retry_after_s=0.02, ready=False)
    async with router_with(folder, first, second) as router:
        answer = asyncio.ensure_future(streamed(router, "hello"))
        await router.heard(5)
        second.ready = True
        await until(lambda: router.router.fleet.link(NodeId("d1")).usable)  # type: ignore[union-attr]
        await first.kill()
        await until(lambda: len(second.submits) >= 4)
        second.refusal = None
        assert await answer == unharmed("hello")
        link = router.router.fleet.link(NodeId("d1"))
        assert link is not None
        assert (link.attempts, link.pending_prompts, link.pending_tokens) == (set(), 0, 0)


async def test_a_submission_names_prefill_nodes_with_tickets_that_they_accept(folder: Path) -> None:
    prompt = "a prompt that is to be computed elsewhere"
    decode = FakeNode("d0", incarnation=21)
    prefill = [FakeNode("p0", Role.PREFILL, incarnation=31), FakeNode("p1", Role.PREFILL, incarnation=32)]
    async with router_with(folder, decode, *prefill) as router:
        await until(lambda: all(router.router.fleet.link(NodeId(node.node_id)).usable for node in prefill))  # type: ignore[union-attr]
        await streamed(router, prompt)
        (submit,) = decode.submits
        assert {choice.node_id for choice in submit.prefill_choices} == {"p0", "p1"}
        assert submit.local_reason == ""
        for choice in submit.prefill_choices:
            node = next(node for node in prefill if node.node_id == choice.node_id)
            assert choice.control_address == node.entry.control_address
            ticket = read_ticket(choice.ticket, router.keys.for_node(NodeId(choice.node_id)))
            assert isinstance(ticket, Ticket)
            assert ticket.attempt == AttemptId(RequestId(submit.request_id), 1)
            assert ticket.decode_incarnation == Incarnation(21)
            assert ticket.prefill_incarnation == node.incarnation
            assert ticket.epoch == node.epoch
            assert ticket.tokens == digest_of_tokens(tuple(submit.prompt_token_ids), ())
        for node in prefill:
            await node.kill()
        await until(lambda: router.router.fleet.connected_by_role()["prefill"] == 0)
        await streamed(router, "another prompt")
        assert not decode.submits[-1].prefill_choices
        assert decode.submits[-1].local_reason in ("prefill_not_ready", "no_prefill_node")


async def test_f16_a_node_with_another_tokenizer_gets_no_work_and_is_named(folder: Path) -> None:
    stranger = FakeNode("d0", tokenizer="xxh3:0000")
    async with router_with(folder, stranger, wait_ready=False) as router:
        await until(lambda: router.router.fleet.connected_by_role()["decode"] == 1)
        await until(lambda: router.router.fleet.not_ready_reasons() == ["d0: node_has_another_tokenizer"])


async def test_what_answers_under_another_name_is_not_taken_for_the_node(folder: Path) -> None:
    impostor = FakeNode("d0", hello_node_id="d9")
    async with router_with(folder, impostor, wait_ready=False) as router:
        await until(lambda: impostor.attached >= 3)
        assert router.router.fleet.connected_by_role()["decode"] == 0


async def test_an_entry_of_an_unknown_incarnation_is_corrected_by_the_node_itself(folder: Path) -> None:
    """The registry may lag behind a restart: tickets must name the incarnation that the node says it has."""
    decode, prefill = FakeNode("d0"), FakeNode("p0", Role.PREFILL, incarnation=5)
    async with router_with(folder, decode, prefill, wait_ready=False) as router:
        await until(lambda: sum(router.router.fleet.connected_by_role().values()) == 2)
        await prefill.kill()
        prefill.incarnation = 6
        await prefill.start()  # the registry goes on naming 5
        link = router.router.fleet.link(NodeId("p0"))
        assert link is not None
        await until(lambda: link.hello is not None and link.hello.incarnation == 6 and link.usable)
        await streamed(router, "hello")
        (choice,) = decode.submits[-1].prefill_choices
        ticket = read_ticket(choice.ticket, router.keys.for_node(NodeId("p0")))
        assert isinstance(ticket, Ticket)
        assert ticket.prefill_incarnation == 6
