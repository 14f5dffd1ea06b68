"""Tickets: only what a router signed for this transfer, pair, epoch and prompt is honoured, and once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import ConfigurationError
from foundation.fingerprint import Fingerprint
from foundation.ids import AttemptId, Incarnation, NodeId, RequestId, TransferId
from foundation.keys import MasterKeys, NodeKey, NodeKeys, draw_master_keys, read_key_file, write_key_file
from foundation.ticket import (
    EPOCH_S,
    Ticket,
    TicketRefusal,
    digest_of_fingerprint,
    digest_of_tokens,
    read_ticket,
    sign_ticket,
)
from kv_transfer.ticket import TicketGate

FINGERPRINT = Fingerprint("w", "llama", "t", 100, "float32", "none", "rope", 1)
MASTER = MasterKeys(((7, b"a" * 32), (8, b"b" * 32)))
KEYS = MASTER.for_node(NodeId("p0"))
PROMPT, SETTLED = (1, 2, 3), (4,)
TRANSFER = TransferId(RequestId("r"), 1, 1)
D, P = Incarnation(11), Incarnation(22)
TICKET = Ticket(
    AttemptId(RequestId("r"), 1), 2, D, P, 0, digest_of_fingerprint(FINGERPRINT), digest_of_tokens(PROMPT, SETTLED)
)

tickets = st.builds(
    Ticket,
    attempt=st.builds(AttemptId, st.text(min_size=1, max_size=60), st.integers(0, 2**32 - 1)),
    max_tries=st.integers(0, 2**16 - 1),
    decode_incarnation=st.integers(0, 2**64 - 1).map(Incarnation),
    prefill_incarnation=st.integers(0, 2**64 - 1).map(Incarnation),
    epoch=st.integers(0, 2**64 - 1),
    fingerprint=st.binary(min_size=16, max_size=16),
    tokens=st.binary(min_size=16, max_size=16),
)


def gate(used_limit: int = 10) -> TicketGate:
    return TicketGate(P, KEYS, FINGERPRINT, started_s=100.0, used_limit=used_limit)


def check(
    raw: bytes, transfer: TransferId = TRANSFER, now_s: float = 100.0, at: TicketGate | None = None
) -> TicketRefusal | None:
    return (at or gate()).check(raw, transfer, D, PROMPT, SETTLED, now_s)


@given(tickets)
def test_a_signed_ticket_reads_as_it_was(ticket: Ticket) -> None:
    assert read_ticket(sign_ticket(ticket, KEYS), KEYS) == ticket


@given(st.binary(max_size=500))
def test_random_bytes_are_refused_and_never_raise(raw: bytes) -> None:
    assert isinstance(read_ticket(raw, KEYS), TicketRefusal)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_refused(place: int, flip: int) -> None:
    raw = bytearray(sign_ticket(TICKET, KEYS))
    raw[place % len(raw)] ^= flip
    assert isinstance(read_ticket(bytes(raw), KEYS), TicketRefusal)


@given(st.integers(0, 200))
def test_a_truncated_ticket_is_refused(length: int) -> None:
    raw = sign_ticket(TICKET, KEYS)
    assert isinstance(read_ticket(raw[: min(length, len(raw) - 1)], KEYS), TicketRefusal)


def test_both_live_keys_are_accepted_and_no_other_nodes() -> None:
    rotated = NodeKeys(KEYS.keys[::-1])
    assert read_ticket(sign_ticket(TICKET, rotated), KEYS) == TICKET
    assert read_ticket(sign_ticket(TICKET, MASTER.for_node(NodeId("p1"))), KEYS) is TicketRefusal.FORGED
    assert read_ticket(sign_ticket(TICKET, NodeKeys((NodeKey(9, b"a" * 32),))), KEYS) is TicketRefusal.UNKNOWN_KEY


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"attempt": AttemptId(RequestId("r"), 2)}, TicketRefusal.OTHER_TRANSFER),
        ({"max_tries": 0}, TicketRefusal.OTHER_TRANSFER),
        ({"decode_incarnation": Incarnation(12)}, TicketRefusal.OTHER_DECODE_INCARNATION),
        ({"prefill_incarnation": Incarnation(23)}, TicketRefusal.OTHER_PREFILL_INCARNATION),
        ({"epoch": 1}, TicketRefusal.NOT_YET),
        ({"fingerprint": b"x" * 16}, TicketRefusal.OTHER_FINGERPRINT),
        ({"tokens": digest_of_tokens((1, 2), (3, 4))}, TicketRefusal.OTHER_TOKENS),
    ],
)
def test_f09_a_genuine_ticket_for_something_else_is_refused_by_name(
    changed: dict[str, object], refusal: TicketRefusal
) -> None:
    assert check(sign_ticket(replace(TICKET, **changed), KEYS)) is refusal  # type: ignore[arg-type]


def test_a_ticket_lives_for_its_own_epoch_and_the_next() -> None:
    raw = sign_ticket(TICKET, KEYS)
    assert check(raw, now_s=100.0 + 2 * EPOCH_S - 0.01) is None
    assert check(raw, now_s=100.0 + 2 * EPOCH_S) is TicketRefusal.EXPIRED


def test_each_transfer_is_permitted_once_and_each_try_of_the_ticket_too() -> None:
    raw, at = sign_ticket(TICKET, KEYS), gate()
    assert check(raw, at=at) is None
    assert check(raw, at=at) is TicketRefusal.USED
    assert check(raw, TRANSFER._replace(try_number=2), at=at) is None
    assert check(raw, TRANSFER._replace(try_number=3), at=at) is TicketRefusal.OTHER_TRANSFER


def test_a_used_transfer_is_not_permitted_again_by_a_ticket_of_the_next_epoch() -> None:
    at = gate()
    assert check(sign_ticket(TICKET, KEYS), at=at) is None
    later = sign_ticket(replace(TICKET, epoch=1), KEYS)
    assert check(later, now_s=100.0 + EPOCH_S, at=at) is TicketRefusal.USED


def test_memory_of_used_transfers_is_bounded_and_comes_back_with_the_epochs() -> None:
    at = gate(used_limit=2)
    ticket = replace(TICKET, max_tries=5)
    answers = [check(sign_ticket(ticket, KEYS), TRANSFER._replace(try_number=n), at=at) for n in (1, 2, 3)]
    assert answers == [None, None, TicketRefusal.TOO_MANY]
    fresh = sign_ticket(replace(ticket, epoch=2), KEYS)
    assert check(fresh, TRANSFER._replace(try_number=3), now_s=100.0 + 2 * EPOCH_S, at=at) is None


def test_digests_keep_prompt_and_settled_and_neighbouring_fields_apart() -> None:
    assert digest_of_tokens((1, 2), (3,)) != digest_of_tokens((1,), (2, 3))
    assert digest_of_fingerprint(replace(FINGERPRINT, weights="wl", architecture="lama")) != digest_of_fingerprint(
        FINGERPRINT
    )


def test_a_digest_of_tokens_is_what_routers_and_nodes_of_every_version_have() -> None:
    assert digest_of_tokens((0, 1, 70_000, 2**32 - 1), (5,)).hex() == "f4eb131fa76f53f5a1b16065d9d9bab2"


def test_a_key_file_is_private_and_comes_back_whole_and_never_shows_a_key(tmp_path: Path) -> None:
    master = draw_master_keys()
    path = tmp_path / "key"
    write_key_file(path, master)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == master
    node = master.for_node(NodeId("p0"))
    write_key_file(tmp_path / "node", node)
    assert read_key_file(tmp_path / "node") == node
    for shown in (repr(master), repr(node), str(node.signing())):
        assert str(master.secrets[0][1]) not in shown
        assert str(node.signing().secret) not in shown
    with pytest.raises(FileExistsError):
        write_key_file(path, master)


@pytest.mark.parametrize(
    "text", ["", "master 1 AAAA", "master x " + "A" * 44, "root 1 " + "A" * 43 + "=", "master 1", "\x00"]
)
def test_a_broken_key_file_names_the_setting(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="--key-file"):
        read_key_file(path)


def test_a_key_file_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path, draw_master_keys())
    os.chmod(path, 0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_key_file(path)
