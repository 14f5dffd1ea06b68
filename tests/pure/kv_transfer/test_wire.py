"""Control messages survive the wire unchanged, and foreign bytes never do harm."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from decant_proto.v1 import transfer_pb2, types_pb2
from hypothesis import given
from hypothesis import strategies as st

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.port import SettledToken
from kv_transfer.protocol import messages as m
from kv_transfer.wire import WireRefusal, read_envelope, write_envelope
from kv_transfer.wire.reading import LONGEST_STEP_MS

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
position = st.integers(0, 2**31)
text = st.text(st.characters(codec="utf-8"), max_size=40)
seconds = st.integers(0, 2**32 - 1).map(lambda ms: ms / 1000)
float32 = st.floats(width=32, allow_nan=False)
transfer = st.builds(TransferId, text.filter(bool).map(RequestId), st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1))
dimension = st.integers(1, 100)
layout = st.builds(
    KvLayout,
    layers=st.integers(3, 100),
    kv_heads=st.just(6),
    head_dim=dimension,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    block_size=dimension,
    head_order=st.sampled_from(["NHD", "HND"]),
    layer_group=dimension,
    tensor_parallel=st.sampled_from([1, 2, 3, 6, 12]),
    pipeline_parallel=st.integers(1, 3),
)
fingerprint = st.builds(Fingerprint, text, text, text, u32, text, text, text, u32)
token = st.builds(SettledToken, u32, st.none() | float32, st.lists(st.tuples(u32, float32), max_size=3).map(tuple))
credit = st.builds(m.Credit, st.integers(0, 2**24 - 1).map(CreditNumber), st.integers(0, 2**40 - 1))
span = st.tuples(st.integers(0, 1000), st.integers(1, 1000)).map(lambda pair: (pair[0], pair[0] + pair[1]))
parcel = st.tuples(span, span, span).map(lambda spans: ParcelName(*spans[0], *spans[1], *spans[2]))
sampling = st.builds(
    lambda seed, stop: types_pb2.SamplingParameters(seed=seed, stop_token_ids=stop).SerializeToString(
        deterministic=True
    ),
    u64,
    st.lists(u32, max_size=4),
)


def tuples(items: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, min_size=least, max_size=4).map(tuple)


MESSAGES: dict[type[Any], st.SearchStrategy[Any]] = {
    m.Hello: st.builds(
        m.Hello,
        text.filter(bool).map(NodeId),
        u32,
        u32,
        fingerprint,
        layout,
        st.integers(1, 2**40),
        st.integers(0, LONGEST_STEP_MS).map(lambda ms: ms / 1000),
        text,
        st.integers(1, 2**64 - 1),
        text,
    ),
    m.HelloRefused: st.builds(m.HelloRefused, text),
    m.LaneReport: st.builds(m.LaneReport, text, st.floats(0, 1e6)),
    m.Heartbeat: st.builds(m.Heartbeat, u64, st.booleans(), tuples(transfer)),
    m.WrongIncarnation: st.builds(m.WrongIncarnation, u64.map(Incarnation)),
    m.SessionClosed: st.builds(m.SessionClosed, u64),
    m.Sync: st.builds(m.Sync, tuples(st.builds(m.SyncedTransfer, transfer, text, u32, st.booleans(), st.booleans()))),
    m.Ask: st.builds(
        m.Ask,
        transfer,
        st.binary(max_size=200),
        tuples(u32, 1),
        tuples(u32),
        sampling,
        st.integers(1, 9),
        st.integers(1, 2**32 - 1).map(lambda ms: ms / 1000),
    ),
    m.Accepted: st.builds(m.Accepted, transfer),
    m.Refused: st.builds(m.Refused, transfer, text, seconds),
    m.Offer: st.tuples(transfer, position, position).map(lambda x: m.Offer(x[0], min(x[1:]), max(x[1:]))),
    m.Credits: st.builds(
        m.Credits,
        transfer,
        position,
        st.integers(1, 2**40),
        u32,
        tuples(credit),
        st.integers(0, 2**40 - 1).map(SessionNonce),
    ),
    m.FirstToken: st.builds(m.FirstToken, transfer, position, st.none() | tuples(token, 1)),
    m.Sealed: st.builds(m.Sealed, transfer, tuples(st.builds(m.SealedParcel, parcel, u64)), u64),
    m.Committed: st.builds(m.Committed, transfer),
    m.Released: st.builds(m.Released, transfer),
    m.Abort: st.builds(m.Abort, transfer, text),
    m.Failed: st.builds(m.Failed, transfer, text),
    m.Drained: st.builds(m.Drained, transfer, tuples(st.integers(0, 2**24 - 1).map(CreditNumber))),
    m.Gone: st.builds(m.Gone, transfer),
}
envelopes = st.builds(m.Envelope, u64.map(Incarnation), u64.map(Incarnation), st.one_of(*MESSAGES.values()))


def test_every_message_of_the_protocol_is_covered_here_and_on_the_wire() -> None:
    assert set(MESSAGES) == set(get_args(m.Message))
    assert len(transfer_pb2.ControlMessage.DESCRIPTOR.oneofs_by_name["message"].fields) == len(MESSAGES)


@given(envelopes)
def test_what_is_written_reads_as_it_was(envelope: m.Envelope) -> None:
    assert read_envelope(write_envelope(envelope)) == envelope


@given(st.binary(max_size=300))
def test_f17_random_bytes_become_a_message_or_a_named_refusal(raw: bytes) -> None:
    found = read_envelope(raw)
    assert isinstance(found, m.Envelope) or found.reason


@given(envelopes, st.data())
def test_f17_a_damaged_or_truncated_message_never_raises(envelope: m.Envelope, data: st.DataObject) -> None:
    raw = bytearray(write_envelope(envelope))
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found = read_envelope(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    assert isinstance(found, m.Envelope | WireRefusal)


@given(envelopes)
def test_what_reads_writes_again(envelope: m.Envelope) -> None:
    found = read_envelope(write_envelope(envelope))
    assert isinstance(found, m.Envelope)
    assert read_envelope(write_envelope(found)) == found


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (transfer_pb2.ControlMessage(accepted=transfer_pb2.Accepted()), "accepted.transfer.request_id"),
        (
            transfer_pb2.ControlMessage(
                gone=transfer_pb2.Gone(transfer=transfer_pb2.TransferId(request_id="r", attempt=1))
            ),
            "gone.transfer.try_number",
        ),
        (
            transfer_pb2.ControlMessage(credits=transfer_pb2.Credits(slot_bytes=1, nonce=1 << 40)),
            "credits.nonce",
        ),
        (
            transfer_pb2.ControlMessage(lane_report=transfer_pb2.LaneReport(gigabytes_per_second=float("nan"))),
            "lane_report.gigabytes_per_second",
        ),
        (
            transfer_pb2.ControlMessage(hello=transfer_pb2.Hello(node_id="d", session=1, slot_bytes=1)),
            "hello.layout.layers",
        ),
        (
            transfer_pb2.ControlMessage(
                hello=transfer_pb2.Hello(node_id="d", session=1, slot_bytes=1, step_limit_ms=LONGEST_STEP_MS + 1)
            ),
            "hello.step_limit_ms",
        ),
        (
            transfer_pb2.ControlMessage(
                hello=transfer_pb2.Hello(
                    node_id="d", session=1, slot_bytes=1, fingerprint=types_pb2.Fingerprint(rope="r" * 257)
                )
            ),
            "hello.fingerprint.rope",
        ),
    ],
)
def test_a_field_out_of_range_is_refused_by_its_name(wire: transfer_pb2.ControlMessage, field: str) -> None:
    found = read_envelope(wire.SerializeToString())
    assert found == WireRefusal("field_out_of_range", field)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", 4097),
        ("layer_group", 0),
        ("tensor_parallel", 1 << 30),
        ("pipeline_parallel", 5),
        ("layers", 1 << 31),
    ],
)
def test_f16_a_layout_that_cannot_be_is_refused_by_the_name_of_its_field(name: str, value: int) -> None:
    layout = transfer_pb2.KvLayout(
        layers=4, kv_heads=3, head_dim=8, block_size=16, layer_group=1, tensor_parallel=1, pipeline_parallel=1
    )
    layout.dtype, layout.head_order = "float32", "NHD"
    hello = transfer_pb2.Hello(node_id="d", session=1, slot_bytes=4096, layout=layout)
    assert isinstance(read_envelope(transfer_pb2.ControlMessage(hello=hello).SerializeToString()), m.Envelope)
    setattr(hello.layout, name, value)
    found = read_envelope(transfer_pb2.ControlMessage(hello=hello).SerializeToString())
    assert found == WireRefusal("field_out_of_range", f"hello.layout.{name}")


def test_an_empty_and_an_unknown_message_are_refused() -> None:
    assert read_envelope(b"") == WireRefusal("unknown_message", "message")
    assert read_envelope(b"\xff\xff") == WireRefusal("not_a_control_message", "bytes")


def test_whole_milliseconds_are_kept_and_others_are_rounded_up() -> None:
    for seconds, read in ((2.011, 2.011), (0.0004, 0.001), (1.0001, 1.001)):
        sent = m.Refused(TransferId(RequestId("r"), 1, 1), "busy", seconds)
        envelope = read_envelope(write_envelope(m.Envelope(Incarnation(1), Incarnation(2), sent)))
        assert isinstance(envelope, m.Envelope)
        assert isinstance(envelope.message, m.Refused)
        assert envelope.message.retry_after_s == read
