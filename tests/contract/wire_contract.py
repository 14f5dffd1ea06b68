"""What the .proto files promise to processes of other versions, as lines of text, and which changes break the promise.

`proto/contract.txt` holds the lines of what was released. A line that is no longer true (a field removed, renumbered, renamed or
retyped, a method with other streams, an enum value gone) breaks nodes of the last version, and is refused by name; new lines are
fine, since proto3 skips what it does not know.

    make contract                    add what is new
    make contract ARGS=--accept      also take away what is no longer true: for a change that is meant to break

Must not know: what messages mean.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from decant_proto.v1 import admin_pb2, inference_pb2, node_pb2, registry_pb2, transfer_pb2, types_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

GOLDEN = Path(__file__).parents[2] / "proto" / "contract.txt"
MODULES = (admin_pb2, inference_pb2, node_pb2, registry_pb2, transfer_pb2, types_pb2)


def current_files() -> list[FileDescriptorProto]:
    return [FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb) for module in MODULES]


def promises(files: Iterable[FileDescriptorProto]) -> list[str]:
    """One line for each field, enum value, reservation and method, sorted."""
    return sorted(line for file in files for line in _of_file(file))


def broken(golden: Iterable[str], now: Iterable[str]) -> list[str]:
    """What was promised and is no longer true."""
    return sorted(set(golden) - set(now))


def golden_promises() -> list[str]:
    return GOLDEN.read_text(encoding="utf-8").splitlines()


def _of_file(file: FileDescriptorProto) -> Iterator[str]:
    for message in file.message_type:
        yield from _of_message(file.package, message)
    for enum in file.enum_type:
        yield from _of_enum(file.package, enum)
    for service in file.service:
        yield from _of_service(file.package, service)


def _of_message(scope: str, message: DescriptorProto) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    for field in message.field:
        yield f"{name}.{field.name} = {field.number} : {_kind(field)}{_place(message, field)}"
    for reserved in message.reserved_range:
        yield from (f"{name} reserves {number}" for number in range(reserved.start, reserved.end))
    yield from (f"{name} reserves {reserved_name!r}" for reserved_name in message.reserved_name)
    for nested in message.nested_type:
        yield from _of_message(name, nested)
    for enum in message.enum_type:
        yield from _of_enum(name, enum)


def _kind(field: FieldDescriptorProto) -> str:
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    named = f" {field.type_name.removeprefix('.')}" if field.type_name else ""
    repeated = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    return f"{repeated}{kind}{named}"


def _place(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """A field's presence is part of the promise: whether it can be told from its default, and whom it excludes."""
    if field.proto3_optional:
        return ", optional"
    return f", of {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else ""


def _of_enum(scope: str, enum: EnumDescriptorProto) -> Iterator[str]:
    yield from (f"{scope}.{enum.name}.{value.name} = {value.number}" for value in enum.value)


def _of_service(scope: str, service: ServiceDescriptorProto) -> Iterator[str]:
    for method in service.method:
        asked = ("stream " if method.client_streaming else "") + method.input_type.removeprefix(".")
        answered = ("stream " if method.server_streaming else "") + method.output_type.removeprefix(".")
        yield f"{scope}.{service.name}/{method.name}({asked}) : {answered}"


def main(arguments: list[str]) -> int:
    now = promises(current_files())
    golden = golden_promises() if GOLDEN.exists() else []
    if (lost := broken(golden, now)) and "--accept" not in arguments:
        sys.stderr.write("These are promised and no longer true; --accept breaks the promise:\n")
        sys.stderr.writelines(f"  {line}\n" for line in lost)
        return 1
    GOLDEN.write_text("".join(f"{line}\n" for line in now), encoding="utf-8")
    sys.stdout.write(f"{len(now)} promises, {len(set(now) - set(golden))} new, {len(lost)} given up\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
