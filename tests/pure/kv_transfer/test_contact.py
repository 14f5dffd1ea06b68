from __future__ import annotations

import pytest

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.contact import HANDLE_BYTES, HANDLES_AT_MOST, Contact, read_contact


@pytest.mark.parametrize("count", [0, 1, 3, HANDLES_AT_MOST])
def test_a_contact_is_read_as_it_was_written(count: int) -> None:
    contact = Contact(b"address", tuple(bytes([number]) * HANDLE_BYTES for number in range(count)))
    assert read_contact(contact.to_bytes()) == contact


@pytest.mark.parametrize(
    "text",
    [b"", b"\0", b"\0\0", b"\1\0" + bytes(HANDLE_BYTES), b"\xff\xff" + bytes(70_000), b"\1\0address"],
)
def test_f17_a_contact_that_lacks_what_it_names_is_garbage(text: bytes) -> None:
    with pytest.raises(TransportError, match="garbage"):
        read_contact(text)
