"""Faults between two drivers: each parcel lost once, data that comes late into memory with a new tenant, wall clocks that jump by
days, decode nodes that vanish one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial

import pytest
from driver_pair import LIMITS, WHOLE, Pair, another_decode_node, another_prefill_node, driver_pair, until

from kv_transfer.faults import Faults

pytestmark = pytest.mark.sockets

Pairing = Callable[..., AbstractAsyncContextManager[Pair]]
TOKENS = list(range(100, 228))
SMALL_SLOTS = replace(LIMITS, slot_bytes=16 * WHOLE.token_bytes)
"""A parcel holds 16 positions, one block."""
PARCELS = len(TOKENS) // 16


@pytest.fixture(params=["memory", "ucx"])
def pairing(request: pytest.FixtureRequest) -> Pairing:
    return partial(driver_pair, ucx=request.param == "ucx")


async def test_f21_whichever_parcel_is_lost_only_its_own_transfer_is_hurt_and_the_prefix_before_it_stands(
    pairing: Pairing,
) -> None:
    faults = Faults()
    async with pairing(limits=SMALL_SLOTS, prefill_faults=faults) as pair:
        for parcel in range(PARCELS):
            faults.flip_byte_of_parcel = parcel
            both = [pair.begin(TOKENS), pair.begin(TOKENS)]
            outcomes = {transfer: await pair.outcome(transfer) for transfer in both}
            (hurt,) = [transfer for transfer in both if outcomes[transfer][0] == "bad_digest"]
            (whole,) = [transfer for transfer in both if outcomes[transfer][0] == "committed"]
            verified = outcomes[hurt][1].verified_positions
            assert verified <= parcel * 16
            pair.check_landed(hurt, TOKENS, verified)
            pair.check_landed(whole, TOKENS, len(TOKENS))
            again = pair.begin(TOKENS, try_number=1)
            assert (await pair.outcome(again))[0] == "committed"
            for transfer in (*both, again):
                pair.decode_engine.blocks.give_back(transfer)
            await pair.at_rest()


async def test_f03_a_parcel_that_was_held_up_never_reaches_blocks_that_have_another_owner(pairing: Pairing) -> None:
    faults = Faults(hold_landed_from=2)
    async with pairing(limits=SMALL_SLOTS, decode_faults=faults) as pair:
        first = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", first) == 2 * 16 * WHOLE.token_bytes)
        pair.decode.end(first, "client_left")
        assert (await pair.outcome(first))[0] == "client_left"
        pair.decode_engine.blocks.give_back(first)
        faults.hold_landed_from = None
        others = [list(range(1000 * number, 1000 * number + 128)) for number in range(1, 5)]
        transfers = [pair.begin(tokens) for tokens in others]
        for transfer, tokens in zip(transfers, others, strict=True):
            assert (await pair.outcome(transfer))[0] == "committed"
            pair.check_landed(transfer, tokens, len(tokens))


async def test_f29_wall_clocks_that_jump_by_days_change_nothing(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_time = time.time
    async with pairing(limits=SMALL_SLOTS) as pair:
        pair.prefill_engine.hold_at = 64
        transfer = pair.begin(TOKENS)
        await until(lambda: pair.decode_watcher.payload("scattered", transfer) == 64 * WHOLE.token_bytes)
        for days in (1, -3, 10):
            shift_s = days * 86_400.0
            monkeypatch.setattr(time, "time", lambda shift_s=shift_s: real_time() + shift_s)
            await asyncio.sleep(LIMITS.heartbeat_s)  # every deadline is looked at
        assert transfer not in pair.decode_engine.outcomes
        pair.prefill_engine.hold_at = None
        assert (await pair.outcome(transfer))[0] == "committed"
        pair.check_landed(transfer, TOKENS, len(TOKENS))
        await pair.at_rest()


async def test_f40_decode_nodes_that_vanish_one_after_the_other_take_nothing_from_a_good_one(pairing: Pairing) -> None:
    async with pairing(limits=SMALL_SLOTS) as pair:
        pair.prefill_engine.hold_at = 64
        for number in range(8):
            async with AsyncExitStack() as stack:
                peer = await stack.enter_async_context(another_decode_node(pair, f"gone{number}"))
                lost = peer.begin(TOKENS)
                await until(lambda peer=peer, lost=lost: peer.decode_watcher.payload("scattered", lost) > 0)  # type: ignore[misc]
        pair.prefill_engine.hold_at = None
        await until(lambda: not pair.prefill.side.transfers)
        transfers = [pair.begin(TOKENS) for _ in range(3)]
        for transfer in transfers:
            assert (await pair.outcome(transfer))[0] == "committed"
            pair.check_landed(transfer, TOKENS, len(TOKENS))
        await pair.at_rest()
        assert all(slot.state.name == "FREE" for slot in pair.prefill.side.sending.slots)


@pytest.mark.parametrize("pairing", ["ucx"], indirect=True)
async def test_f40_prefill_nodes_that_hang_one_after_the_other_take_no_staging_from_a_good_one(
    pairing: Pairing,
) -> None:
    impatient = replace(SMALL_SLOTS, silence_limit_s=1.0, heartbeat_s=0.2)
    async with pairing(limits=impatient) as pair:
        assert (await pair.outcome(pair.begin(TOKENS)))[0] == "committed"
        good_bytes = pair.decode.staging_drawn_bytes
        assert good_bytes
        for number in range(4):
            hanging = another_prefill_node(pair, f"hangs{number}", impatient, Faults(hold_sends_from=2))
            async with hanging as other:
                lost = other.begin(TOKENS)
                await until(lambda: other.decode_watcher.payload("scattered", lost) == 2 * 16 * WHOLE.token_bytes)  # noqa: B023
                other.proxy.mute("to_decode")
                reason, account = await other.outcome(lost)
                assert reason in ("silent", "transfer_stalled")
                assert account.verified_positions == 32
                other.check_landed(lost, TOKENS, 32)
                other.decode_engine.blocks.give_back(lost)
            await until(lambda: pair.decode.staging_drawn_bytes == good_bytes)
            assert not any(arena.quarantined for arena in pair.decode.side.arenas.values())
            transfer = pair.begin(TOKENS)
            assert (await pair.outcome(transfer))[0] == "committed"
            pair.check_landed(transfer, TOKENS, len(TOKENS))
            pair.decode_engine.blocks.give_back(transfer)


async def test_f06_a_receive_that_fails_on_d_is_known_to_p_within_a_second(pairing: Pairing) -> None:
    async with pairing(limits=SMALL_SLOTS, prefill_faults=Faults(stretch_parcel=2)) as pair:
        pair.prefill_engine.hold_at = 64
        transfer = pair.begin(TOKENS)
        reason, account = await pair.outcome(transfer)
        assert reason == "bad_length"
        pair.check_landed(transfer, TOKENS, account.verified_positions)
        await until(lambda: transfer in pair.prefill_engine.released_reasons, limit_s=1.0)
        assert pair.prefill_engine.released_reasons[transfer] == "bad_length"
        await pair.at_rest()
