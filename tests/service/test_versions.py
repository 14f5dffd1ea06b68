"""Two versions of the protocol side by side, as in a rolling upgrade: the major one must agree, the minor falls to the lower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from driver_pair import FINGERPRINT, driver_pair, until

from foundation.ids import Incarnation
from kv_transfer.protocol import messages as m
from kv_transfer.protocol.peer import agreed_minor
from kv_transfer.wire import WireRefusal, read_envelope, write_envelope

TOKENS = tuple(range(60))
UNKNOWN_FIELD = bytes([0xFA, 0x7F, 3]) + b"new"
"""Field 2047, three bytes: what a later minor version may add to any message."""


def speak_minor(driver: Any, minor: int) -> None:
    local = driver._side.local
    driver._side = replace(driver._side, local=replace(local, hello=replace(local.hello, protocol_minor=minor)))


@pytest.mark.sockets
@pytest.mark.parametrize(("decode", "prefill"), [(0, 3), (3, 0), (7, 7)])
async def test_f16_unlike_minor_versions_pair_and_transfer(decode: int, prefill: int) -> None:
    async with driver_pair() as pair:
        speak_minor(pair.decode, decode)
        speak_minor(pair.prefill, prefill)
        transfer = pair.begin(TOKENS)
        assert (await pair.outcome(transfer))[0] == "committed"
        pair.check_landed(transfer, TOKENS, len(TOKENS))
        (peer,) = pair.decode.side.peers.values()
        assert peer.hello is not None
        assert agreed_minor(pair.decode.side.local.hello, peer.hello) == min(decode, prefill)


@pytest.mark.sockets
async def test_f16_unlike_major_versions_are_refused_by_name_and_both_stay_up() -> None:
    async with driver_pair(decode_fingerprint=replace(FINGERPRINT, protocol_major=2)) as pair:
        reason, _ = await pair.outcome(pair.begin(TOKENS))
        assert reason.startswith("refused: protocol_major: ")
        await until(lambda: not pair.decode.side.peers and not pair.prefill.side.peers)
        assert not pair.decode.failure.done()
        assert not pair.prefill.failure.done()


def test_fields_of_a_later_minor_version_are_skipped() -> None:
    envelope = m.Envelope(Incarnation(1), Incarnation(2), m.Heartbeat(5, True, ()))
    assert read_envelope(write_envelope(envelope) + UNKNOWN_FIELD) == envelope


def test_a_message_that_only_a_later_version_knows_is_refused_by_name() -> None:
    """So it may be sent only where the agreed minor version has it."""
    header = write_envelope(m.Envelope(Incarnation(1), Incarnation(2), m.Heartbeat(5, True, ())))[:18]
    assert read_envelope(header + UNKNOWN_FIELD) == WireRefusal("unknown_message", "message")
