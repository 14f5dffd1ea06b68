from __future__ import annotations

import struct
import zlib

import pytest

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.contact import HANDLE_BYTES, HANDLES_AT_MOST, Contact, read_contact


@pytest.mark.parametrize("count", [0, 1, 3, HANDLES_AT_MOST])
def test_a_contact_is_read_as_it_was_written(count: int) -> None:
    contact = Contact(b"address", tuple(bytes([number]) * HANDLE_BYTES for number in range(count)))
    assert read_contact(contact.to_bytes()) == contact


@pytest.mark.parametrize(
    "said", [b"", b"\0", b"\0\0", b"\1\0" + bytes(HANDLE_BYTES), b"\xff\xff" + bytes(70_000), b"\1\0address"]
)
def test_f17_a_contact_that_lacks_what_it_names_is_garbage(said: bytes) -> None:
    with pytest.raises(TransportError, match=r"garbage: .* should name"):
        read_contact(struct.pack("<I", zlib.crc32(said)) + said)


def test_f17_a_contact_that_is_cut_off_or_of_which_one_bit_is_wrong_never_reaches_ucx() -> None:
    whole = Contact(b"address", (bytes(HANDLE_BYTES),)).to_bytes()
    cut = [whole[:length] for length in range(len(whole))]
    number = int.from_bytes(whole, "big")
    flipped = [(number ^ 1 << bit).to_bytes(len(whole), "big") for bit in range(8 * len(whole))]
    for damaged in cut + flipped:
        with pytest.raises(TransportError, match="garbage"):
            read_contact(damaged)
