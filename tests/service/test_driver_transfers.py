"""Transfers between two drivers: real control streams, and each test over the modelled data plane and over UCX on TCP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Literal

import grpc
import pytest
from driver_pair import FINGERPRINT, LIMITS, MASTER, THREE_SHARDS, WHOLE, Pair, another_decode_node, driver_pair, until

from foundation.ids import AttemptId, Incarnation, NodeId, TransferId
from foundation.kv_layout import KvLayout
from foundation.ticket import Ticket, digest_of_tokens, sign_ticket
from kv_transfer import staging
from kv_transfer.control_stream import METHOD
from kv_transfer.faults import Faults
from kv_transfer.landing_rate import LandingRate
from kv_transfer.pool_copy import KvPool
from kv_transfer.protocol.peer import PeerState
from kv_transfer.transport.memory_network import WRITES

pytestmark = pytest.mark.sockets

Pairing = Callable[..., AbstractAsyncContextManager[Pair]]
TOKENS = list(range(100, 330))
"""230 positions: not a whole number of either side's blocks."""


CLOSED_THERE = ("closing", "closed_by_peer", "connection_reset", "peer_closed", "endpoint_failed")
"""The control plane says why; the data plane may notice first."""


@pytest.fixture(params=["memory", "ucx"])
def pairing(request: pytest.FixtureRequest) -> Pairing:
    return partial(driver_pair, ucx=request.param == "ucx")


LAYOUTS = {
    "block 32 to block 16": (replace(WHOLE, block_size=32), WHOLE),
    "three single-head shards to a whole": (THREE_SHARDS, WHOLE),
    "a whole to three single-head shards": (WHOLE, THREE_SHARDS),
    "two stages to six ranks with replicated heads": (
        replace(WHOLE, pipeline_parallel=2, layer_group=2),
        replace(WHOLE, tensor_parallel=6, head_order="HND", block_size=8),
    ),
}


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS.keys())
async def test_what_lands_is_what_was_there_whatever_the_layouts(
    pairing: Pairing, layouts: tuple[KvLayout, KvLayout]
) -> None:
    async with pairing(source=layouts[0], target=layouts[1]) as pair:
        transfer = pair.begin(TOKENS)
        reason, account = await pair.outcome(transfer)
        assert reason == "committed"
        assert account.verified_positions == len(TOKENS)
        pair.check_landed(transfer, TOKENS, len(TOKENS))
        assert account.payload_bytes == len(TOKENS) * WHOLE.token_bytes
        await pair.at_rest()


async def test_f19_only_what_d_lacks_travels_to_the_byte_in_at_least_eight_parcels(pairing: Pairing) -> None:
    async with pairing(limits=replace(LIMITS, slot_bytes=8 << 10)) as pair:
        pair.decode_engine.cached, pair.prefill_engine.cached = 70, 96
        transfer = pair.begin(TOKENS)
        reason, account = await pair.outcome(transfer)
        assert reason == "committed"
        lacking = (len(TOKENS) - 64) * WHOLE.token_bytes
        assert (account.from_position, account.payload_bytes) == (64, lacking)
        assert account.parcels >= 8
        pair.check_landed(transfer, TOKENS, len(TOKENS))
        await pair.at_rest()
        for watcher, stage in ((pair.prefill_watcher, "sent"), (pair.decode_watcher, "landed")):
            assert watcher.payload(stage, transfer) == lacking


async def test_many_transfers_at_once_stay_apart(pairing: Pairing) -> None:
    async with pairing(limits=replace(LIMITS, slot_bytes=4 << 10)) as pair:
        histories = [[1000 * number + token for token in range(50 + 3 * number)] for number in range(10)]
        transfers = [pair.begin(tokens) for tokens in histories]
        for transfer, tokens in zip(transfers, histories, strict=True):
            assert (await pair.outcome(transfer))[0] == "committed"
            pair.check_landed(transfer, tokens, len(tokens))
        await pair.at_rest()


async def test_two_decode_nodes_share_a_prefill_node_and_one_that_closes_harms_not_the_other(pairing: Pairing) -> None:
    limits = replace(LIMITS, slot_bytes=4 << 10)
    async with pairing(limits=limits) as first:
        first.prefill_engine.hold_at = 128
        kept = first.begin(TOKENS)
        async with another_decode_node(first, "d1", target=THREE_SHARDS) as second:
            lost = second.begin(TOKENS[::-1])
            await until(lambda: first.decode_watcher.payload("scattered", kept) > 0)
            await until(lambda: second.decode_watcher.payload("scattered", lost) > 0)
        assert second.decode_engine.outcomes[lost][0] == "closing"
        first.prefill_engine.hold_at = None
        assert (await first.outcome(kept))[0] == "committed"
        first.check_landed(kept, TOKENS, len(TOKENS))
        await first.at_rest()


async def test_parcels_leave_while_later_chunks_are_not_yet_computed(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) == 128 * WHOLE.token_bytes)
        assert transfer not in pair.decode_engine.outcomes
        pair.prefill_engine.hold_at = None
        assert (await pair.outcome(transfer))[0] == "committed"
        pair.check_landed(transfer, TOKENS, len(TOKENS))


TWO_GROUPS = replace(WHOLE, layer_group=2)
ONE_RUN = replace(LIMITS, slot_bytes=256 << 10)
"""Slots that hold one layer group of all positions."""


async def test_early_layers_leave_while_later_layers_of_the_same_step_are_not_yet_computed(pairing: Pairing) -> None:
    async with pairing(source=TWO_GROUPS, limits=ONE_RUN) as pair:
        engine = pair.prefill_engine
        engine.chunk, engine.layers_at_once, engine.hold_at = len(TOKENS), 2, 0
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) == len(TOKENS) * WHOLE.token_bytes // 2)
        assert transfer not in pair.decode_engine.outcomes
        engine.hold_at = None
        assert (await pair.outcome(transfer))[0] == "committed"
        pair.check_landed(transfer, TOKENS, len(TOKENS))
        assert pair.prefill_watcher.early_parcels == [(transfer, 0)]
        await pair.at_rest()


async def test_what_lands_before_its_offer_does_not_count_as_the_lane_s_pace(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed: list[bool] = []
    monkeypatch.setattr(LandingRate, "landed", lambda rate, payload_bytes, now_s, *, early: landed.append(early))
    async with pairing(source=TWO_GROUPS, limits=ONE_RUN) as pair:
        engine = pair.prefill_engine
        engine.chunk, engine.layers_at_once, engine.hold_at = len(TOKENS), 2, 0
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("landed", transfer) > 0)
        assert landed == [True]
        engine.hold_at = None
        assert (await pair.outcome(transfer))[0] == "committed"
        landed.clear()
        engine.cached = len(TOKENS)
        assert (await pair.outcome(pair.begin(TOKENS)))[0] == "committed"
        assert landed == [False, False]
        await pair.at_rest()


async def test_f21_of_a_step_that_fails_nothing_counts_though_its_early_layers_have_landed(pairing: Pairing) -> None:
    async with pairing(source=TWO_GROUPS, limits=replace(LIMITS, slot_bytes=128 * WHOLE.token_bytes // 2)) as pair:
        engine = pair.prefill_engine
        engine.chunk, engine.layers_at_once, engine.hold_at, engine.fail_at = 128, 2, 128, 128
        transfer = pair.begin(TOKENS)
        half = WHOLE.token_bytes // 2
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) == (128 + len(TOKENS)) * half)
        engine.hold_at = None
        reason, account = await pair.outcome(transfer)
        assert (reason, account.verified_positions) == ("engine_error", 128)
        pair.check_landed(transfer, TOKENS, 128)
        await pair.at_rest()


async def test_the_first_token_does_not_wait_for_the_kv(pairing: Pairing) -> None:
    async with pairing(prefill_faults=Faults(hold_sends_from=0)) as pair:
        transfer = pair.begin(TOKENS)
        await until(lambda: transfer in pair.decode_engine.tokens)
        token = pair.decode_engine.tokens[transfer]
        assert token is not None
        assert (token.token_id, token.logprob, token.top_logprobs) == (sum(TOKENS) % 1000, -0.5, ((7, -1.5),))
        assert pair.decode_watcher.payload("landed", transfer) == 0


async def test_a_declined_first_token_is_told_and_the_kv_comes_all_the_same(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.declines = True
        transfer = pair.begin(TOKENS)
        assert (await pair.outcome(transfer))[0] == "committed"
        assert pair.decode_engine.tokens == {transfer: None}


async def test_f10_an_abort_in_the_middle_frees_both_sides_and_harms_no_neighbour(pairing: Pairing) -> None:
    async with pairing(limits=replace(LIMITS, slot_bytes=4 << 10)) as pair:
        pair.prefill_engine.hold_at = 128
        doomed, neighbour = pair.begin(TOKENS), pair.begin(TOKENS[::-1])
        await until(lambda: pair.decode_watcher.payload("scattered", doomed) > 0)
        pair.decode.end(doomed, "cancelled")
        reason, account = await pair.outcome(doomed, limit_s=1.0)
        assert reason == "cancelled"
        pair.check_landed(doomed, TOKENS, account.verified_positions)
        await until(lambda: pair.prefill_engine.released_reasons.get(doomed) == "cancelled", limit_s=1.0)
        pair.prefill_engine.hold_at = None
        assert (await pair.outcome(neighbour))[0] == "committed"
        pair.check_landed(neighbour, TOKENS[::-1], len(TOKENS))
        await pair.at_rest()


async def test_f06_a_failure_on_p_is_known_at_d_by_name_and_the_verified_prefix_is_kept(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.fail_at = 128
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) == 128 * WHOLE.token_bytes)
        pair.prefill_engine.hold_at = None
        reason, account = await pair.outcome(transfer, limit_s=1.0)
        assert (reason, account.verified_positions) == ("engine_error", 128)
        pair.check_landed(transfer, TOKENS, 128)
        await pair.at_rest()


@pytest.mark.parametrize("parcel", [0, 2])
async def test_f21_a_flipped_byte_is_noticed_and_never_counts_as_verified(pairing: Pairing, parcel: int) -> None:
    faults = Faults(flip_byte_of_parcel=parcel)
    async with pairing(prefill_faults=faults) as pair:
        transfer = pair.begin(TOKENS)
        reason, account = await pair.outcome(transfer)
        assert faults.flip_byte_of_parcel is None, "the fault did not take effect"
        assert reason == "bad_digest"
        assert account.verified_positions == parcel * 16
        pair.check_landed(transfer, TOKENS, account.verified_positions)
        again = pair.begin(TOKENS)
        assert (await pair.outcome(again))[0] == "committed"
        pair.check_landed(again, TOKENS, len(TOKENS))
        await pair.at_rest()


@pytest.mark.parametrize(
    ("faults", "named"), [(Faults(shorten_parcel=1), "bad_digest"), (Faults(stretch_parcel=1), "bad_length")]
)
async def test_f35_a_short_or_oversize_parcel_is_refused_by_name(pairing: Pairing, faults: Faults, named: str) -> None:
    async with pairing(prefill_faults=replace(faults)) as pair:
        assert (await pair.outcome(pair.begin(TOKENS)))[0] == named
        again = pair.begin(TOKENS)
        assert (await pair.outcome(again))[0] == "committed"
        pair.check_landed(again, TOKENS, len(TOKENS))
        await pair.at_rest()


async def test_f39_blocks_that_changed_owner_are_never_sent_as_this_requests(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: transfer in pair.prefill_engine.blocks.taken)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) > 0)
        pair.prefill_engine.pool.owner_words[pair.prefill_engine.blocks.taken[transfer][-2]] += 1
        pair.prefill_engine.hold_at = None
        reason, account = await pair.outcome(transfer)
        assert reason == "owner_changed"
        pair.check_landed(transfer, TOKENS, account.verified_positions)
        await pair.at_rest()


async def test_f41_a_blink_of_the_control_stream_resumes_and_nothing_happens_twice(pairing: Pairing) -> None:
    async with pairing(limits=replace(LIMITS, silence_limit_s=4.0)) as pair:
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) > 0)
        session = pair.decode.side.peers[NodeId("p0")].session
        pair.proxy.cut()
        assert pair.proxy.cuts > 0
        await until(lambda: pair.decode.side.peers[NodeId("p0")].state is PeerState.SUSPECT)
        pair.prefill_engine.hold_at = None
        await until(lambda: not pair.prefill.side.peers[NodeId("d0")].streaming)
        await asyncio.sleep(0.3)  # the blink itself
        pair.proxy.heal()
        assert (await pair.outcome(transfer))[0] == "committed"
        assert pair.decode.side.peers[NodeId("p0")].session == session
        pair.check_landed(transfer, TOKENS, len(TOKENS))
        landed = [index for stage, _, index, _ in pair.decode_watcher.parcels if stage == "landed"]
        assert sorted(landed) == sorted(set(landed))
        await pair.at_rest()


async def test_f02_a_p_that_stops_sending_is_given_up_for_lack_of_progress(pairing: Pairing) -> None:
    limits = replace(LIMITS, silence_limit_s=0.8, heartbeat_s=0.2)
    async with pairing(prefill_faults=Faults(hold_sends_from=2), limits=limits) as pair:
        transfer = pair.begin(TOKENS)
        reason, account = await pair.outcome(transfer, limit_s=10.0)
        assert reason == "transfer_stalled"
        assert account.verified_positions == 2 * 16
        pair.check_landed(transfer, TOKENS, account.verified_positions)


@pytest.mark.parametrize("direction", ["to_prefill", "to_decode"])
async def test_f07_a_control_stream_that_loses_one_direction_ends_in_time_and_recovers(
    pairing: Pairing, direction: Literal["to_prefill", "to_decode"]
) -> None:
    limits = replace(LIMITS, silence_limit_s=0.6, heartbeat_s=0.2, reservation_limit_s=2.0)
    async with pairing(limits=limits) as pair:
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) > 0)
        pair.proxy.mute(direction)
        await until(lambda: pair.proxy.swallowed_bytes > 0)
        # Twice, where this process was stopped for a moment, which does not count; still sooner than a stall.
        _, account = await pair.outcome(transfer, limit_s=2 * limits.silence_limit_s + 0.2)
        pair.check_landed(transfer, TOKENS, account.verified_positions)
        pair.proxy.heal()
        pair.prefill_engine.hold_at = None
        await until(lambda: not pair.decode.side.peers and not pair.prefill.side.peers)
        again = pair.begin(TOKENS)
        assert (await pair.outcome(again))[0] == "committed"
        pair.check_landed(again, TOKENS, len(TOKENS))
        await pair.at_rest()


async def test_a_decode_node_that_closes_is_known_to_p_at_once_and_leaves_nothing(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) > 0)
        await pair.decode.close()
        assert pair.decode_engine.outcomes[transfer][0] == "closing"
        await until(lambda: transfer in pair.prefill_engine.released_reasons, limit_s=1.0)
        assert pair.prefill_engine.released_reasons[transfer] in CLOSED_THERE
        assert pair.decode.staging_drawn_bytes == 0


async def test_a_prefill_node_that_closes_is_known_to_d_at_once(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.hold_at = 128
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) > 0)
        await pair.prefill.close()
        assert pair.prefill_engine.released_reasons[transfer] == "closing"
        reason, account = await pair.outcome(transfer, limit_s=1.0)
        assert reason in CLOSED_THERE
        pair.check_landed(transfer, TOKENS, account.verified_positions)


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_a_node_that_closes_while_it_copies_tells_its_engine_how_the_transfer_ended_once_the_copy_is_over(
    pairing: Pairing, side: Literal["decode", "prefill"], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, name = threading.Event(), threading.Event(), {"decode": "scatter", "prefill": "gather"}[side]
    copy = getattr(staging, name)

    def held(pool: KvPool, job: staging.Gather | staging.Scatter) -> object:
        begun.set()
        assert go_on.wait(60)
        return copy(pool, job)

    monkeypatch.setattr(staging, name, held)
    async with pairing() as pair:
        transfer = pair.begin(TOKENS)
        await until(begun.is_set)
        ended_here: Container[TransferId] = pair.decode_engine.outcomes
        ended_there: Container[TransferId] = pair.prefill_engine.released_reasons
        if side == "prefill":
            ended_here, ended_there = ended_there, ended_here
        closing = asyncio.create_task(pair.decode.close() if side == "decode" else pair.prefill.close())
        await until(lambda: transfer in ended_there)
        assert transfer not in ended_here, "blocks were given back while a copy used them"
        go_on.set()
        await closing
        assert transfer in ended_here


async def test_a_lane_that_cannot_be_fenced_is_refused_and_costs_no_memory() -> None:
    async with driver_pair(lane=WRITES) as pair:
        for _ in range(3):
            assert (await pair.outcome(pair.begin(TOKENS)))[0] == "lane_cannot_fence"
        await until(lambda: pair.decode.staging_drawn_bytes == 0)


async def test_f16_nodes_that_differ_are_refused_by_the_field_and_both_stay_up(pairing: Pairing) -> None:
    async with pairing(decode_fingerprint=replace(FINGERPRINT, rope="yarn 4")) as pair:
        transfer = pair.begin(TOKENS)
        reason, _ = await pair.outcome(transfer)
        assert reason.startswith("refused: rope")
        assert "yarn 4" in reason
        assert not pair.prefill_engine.blocks.taken
        await until(lambda: not pair.decode.side.peers and not pair.prefill.side.peers)
        again, _ = await pair.outcome(pair.begin(TOKENS))
        assert again.startswith("refused: rope")


async def test_f09_forged_replayed_expired_and_misused_tickets_are_refused_by_name(pairing: Pairing) -> None:
    async with pairing() as pair:
        first = pair.begin(TOKENS)
        assert (await pair.outcome(first))[0] == "committed"
        prompt = tuple(TOKENS)

        async def refusal(ticket: Callable[[TransferId], bytes]) -> str:
            transfer = TransferId(first.request, len(pair.decode_engine.outcomes) + 1, 1)
            pair.begin_as(transfer, TOKENS, ticket(transfer))
            return (await pair.outcome(transfer))[0].removeprefix("refused: ")

        stranger = MASTER.for_node(NodeId("p1"))
        content = Ticket(AttemptId(first.request, 2), 1, Incarnation(1), Incarnation(1), 0, b"f" * 16, b"t" * 16)
        assert await refusal(lambda transfer: sign_ticket(content, stranger)) == "ticket_forged"
        assert await refusal(lambda transfer: b"garbage") == "ticket_malformed"
        assert await refusal(lambda transfer: pair.ticket(first, prompt)) == "ticket_for_another_transfer"
        other = digest_of_tokens((1,), ())
        assert await refusal(lambda transfer: pair.ticket(transfer, prompt, tokens=other)) == "ticket_for_other_tokens"
        assert await refusal(lambda transfer: pair.ticket(transfer, prompt, epoch=9)) == "ticket_of_a_future_epoch"
        pair.decode_engine.outcomes.pop(first)
        pair.decode_engine.tokens.pop(first)
        pair.begin_as(first, TOKENS, pair.ticket(first, prompt))
        assert (await pair.outcome(first))[0] == "refused: ticket_already_used"
        await pair.at_rest()


async def test_a_node_without_room_ends_the_transfer_and_p_stops_computing(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.decode_engine.unavailable_reason = "prompt_too_long"
        transfer = pair.begin(TOKENS)
        assert (await pair.outcome(transfer))[0] == "prompt_too_long"
        await until(lambda: transfer in pair.prefill_engine.released_reasons)
        await pair.at_rest()


async def test_a_refusal_of_p_reaches_d_by_name(pairing: Pairing) -> None:
    async with pairing() as pair:
        pair.prefill_engine.refuse_with = "draining"
        assert (await pair.outcome(pair.begin(TOKENS)))[0] == "refused: draining"
        await pair.at_rest()


async def test_an_idle_session_gives_its_memory_back_and_the_next_transfer_opens_a_new_one(pairing: Pairing) -> None:
    async with pairing(limits=replace(LIMITS, idle_limit_s=0.2, heartbeat_s=0.1)) as pair:
        assert (await pair.outcome(pair.begin(TOKENS)))[0] == "committed"
        await until(lambda: not pair.decode.side.peers and not pair.prefill.side.peers)
        await until(lambda: pair.decode.staging_drawn_bytes == 0)
        transfer = pair.begin(TOKENS)
        assert (await pair.outcome(transfer))[0] == "committed"
        pair.check_landed(transfer, TOKENS, len(TOKENS))


async def test_the_lane_is_measured_in_both_directions_before_it_is_used(pairing: Pairing) -> None:
    async with pairing() as pair:
        assert (await pair.outcome(pair.begin(TOKENS)))[0] == "committed"
        await until(lambda: len(pair.decode_watcher.lanes) == len(pair.prefill_watcher.lanes) == 2)
        assert all(measured > 0 for _, _, measured in pair.decode_watcher.lanes + pair.prefill_watcher.lanes)


async def test_f17_garbage_on_the_control_port_is_counted_and_harms_nobody(pairing: Pairing) -> None:
    async with pairing() as pair:
        for garbage in (b"", b"\xff" * 100, b"\x08\x01" * 50):
            async with grpc.aio.insecure_channel(pair.proxy.address) as channel:
                call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
                await call.write(garbage)
                assert await call.read() is grpc.aio.EOF
        reader, writer = await asyncio.open_connection(*pair.proxy.address.split(":"))
        writer.write(b"\x00garbage" * 1000)
        await reader.read()
        writer.close()
        assert sum(pair.prefill_watcher.drops.values()) == 3
        transfer = pair.begin(TOKENS)
        assert (await pair.outcome(transfer))[0] == "committed"
        pair.check_landed(transfer, TOKENS, len(TOKENS))


async def test_f34_strangers_on_the_data_port_are_refused(pairing: Pairing) -> None:
    async with pairing(limits=LIMITS) as pair:
        transfer = pair.begin(TOKENS)
        assert (await pair.outcome(transfer))[0] == "committed"
        session = pair.decode.side.peers[NodeId("p0")].session
        await pair.stranger_is_refused(session)
        again = pair.begin(TOKENS)
        assert (await pair.outcome(again))[0] == "committed"
