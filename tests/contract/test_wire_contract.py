"""Nodes of two versions talk to each other during an upgrade: what the last version was promised stays true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from wire_contract import broken, current_files, golden_promises, promises

Change = Callable[[FileDescriptorProto], object]


def message(file: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(found for found in file.message_type if found.name == name)


def field(file: FileDescriptorProto, owner: str, name: str) -> FieldDescriptorProto:
    return next(found for found in message(file, owner).field if found.name == name)


def lost_by(change: Change) -> list[str]:
    files = current_files()
    before = promises(files)
    change(next(file for file in files if file.name.endswith("transfer.proto")))
    return broken(before, promises(files))


def test_what_was_promised_to_the_last_version_is_still_true() -> None:
    lost = broken(golden_promises(), promises(current_files()))
    assert not lost, "nodes of the last version break on this (if that is meant: make contract ARGS=--accept)"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda file: message(file, "Ask").field.remove(field(file, "Ask", "ticket")),
            "decant.v1.Ask.ticket = 2 : bytes",
        ),
        (lambda file: setattr(field(file, "Ask", "ticket"), "number", 99), "decant.v1.Ask.ticket = 2 : bytes"),
        (lambda file: setattr(field(file, "Ask", "ticket"), "name", "permit"), "decant.v1.Ask.ticket = 2 : bytes"),
        (
            lambda file: setattr(field(file, "Ask", "choices"), "type", FieldDescriptorProto.TYPE_SINT32),
            "decant.v1.Ask.choices = 6 : uint32",
        ),
        (
            lambda file: setattr(field(file, "Offer", "ready_positions"), "label", FieldDescriptorProto.LABEL_REPEATED),
            "decant.v1.Offer.ready_positions = 2 : uint32",
        ),
        (
            lambda file: field(file, "ControlMessage", "ask").ClearField("oneof_index"),
            "decant.v1.ControlMessage.ask = 10 : message decant.v1.Ask, of message",
        ),
        (
            lambda file: setattr(file.service[0].method[0], "client_streaming", False),
            "decant.v1.KvTransfer/Session(stream decant.v1.ControlMessage) : stream decant.v1.ControlMessage",
        ),
    ],
)
def test_a_change_that_breaks_the_last_version_is_named(change: Change, named: str) -> None:
    assert lost_by(change) == [named]


def test_new_fields_messages_and_methods_break_nobody() -> None:
    def change(file: FileDescriptorProto) -> None:
        message(file, "Ask").field.add(name="hint", number=200, type=FieldDescriptorProto.TYPE_STRING)
        file.message_type.add(name="Novelty").field.add(name="x", number=1, type=FieldDescriptorProto.TYPE_BOOL)
        file.service[0].method.add(name="More", input_type=".decant.v1.Ask", output_type=".decant.v1.Gone")

    assert lost_by(change) == []


def test_a_number_that_was_given_up_stays_reserved() -> None:
    files = current_files()
    ask = message(next(file for file in files if file.name.endswith("transfer.proto")), "Ask")
    ask.reserved_range.add(start=90, end=92)
    golden = promises(files)
    ask.ClearField("reserved_range")
    assert broken(golden, promises(files)) == ["decant.v1.Ask reserves 90", "decant.v1.Ask reserves 91"]
