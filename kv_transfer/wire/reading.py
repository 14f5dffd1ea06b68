"""From bytes to an `Envelope`, or to a `WireRefusal` that names what is wrong. Total: never raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from decant_proto.v1 import transfer_pb2, types_pb2
from google.protobuf.message import DecodeError

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, TransferId
from foundation.kv_layout import DTYPE_BYTES, HeadOrder, KvDtype, KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.port import SettledToken
from kv_transfer.protocol import messages

CREDIT_NUMBER_LIMIT = 1 << 24
NONCE_LIMIT = 1 << 40
LONGEST_TEXT = 256
LARGEST_DIMENSION = 1 << 12
LARGEST_SLOT_BYTES = 1 << 40
LONGEST_STEP_MS = 150_000
"""A quarter of the longest silence limit that a node can be given. Who names a longer step could stand still unnoticed."""


@dataclass(frozen=True, slots=True)
class WireRefusal:
    """`reason` is a name for counters, `field` says what in the message was wrong."""

    reason: str
    field: str


class _Refused(Exception):
    """Leaves the readers below; never this module."""

    def __init__(self, field: str) -> None:
        self.field = field


def read_envelope(raw: bytes) -> messages.Envelope | WireRefusal:
    """The message in these bytes. Total: never raises."""
    wire = transfer_pb2.ControlMessage()
    try:
        wire.ParseFromString(raw)
    except DecodeError:
        return WireRefusal("not_a_control_message", "bytes")
    kind = wire.WhichOneof("message")
    if kind is None:
        return WireRefusal("unknown_message", "message")
    try:
        message = _READERS[kind](getattr(wire, kind))
    except _Refused as refused:
        return WireRefusal("field_out_of_range", f"{kind}.{refused.field}")
    return messages.Envelope(Incarnation(wire.sender), Incarnation(wire.addressee), message)


def _need(holds: bool, field: str) -> None:
    if not holds:
        raise _Refused(field)


def _transfer(wire: Any) -> TransferId:
    named = wire.transfer
    _need(0 < len(named.request_id) <= LONGEST_TEXT, "transfer.request_id")
    _need(named.attempt > 0, "transfer.attempt")
    _need(named.try_number > 0, "transfer.try_number")
    return TransferId(RequestId(named.request_id), named.attempt, named.try_number)


def _text(value: str, field: str) -> str:
    _need(len(value) <= LONGEST_TEXT, field)
    return value


def _bounded(items: Iterable[int], limit: int, field: str) -> tuple[int, ...]:
    values = tuple(items)
    _need(not values or max(values) < limit, field)
    return values


def _layout(wire: transfer_pb2.KvLayout) -> KvLayout:
    for field in (
        "layers",
        "kv_heads",
        "head_dim",
        "block_size",
        "layer_group",
        "tensor_parallel",
        "pipeline_parallel",
    ):
        _need(0 < getattr(wire, field) <= LARGEST_DIMENSION, f"layout.{field}")
    _need(wire.pipeline_parallel <= wire.layers, "layout.pipeline_parallel")
    _need(wire.tensor_parallel >= wire.kv_heads or wire.kv_heads % wire.tensor_parallel == 0, "layout.tensor_parallel")
    _need(wire.dtype in DTYPE_BYTES, "layout.dtype")
    _need(wire.head_order in ("NHD", "HND"), "layout.head_order")
    return KvLayout(
        layers=wire.layers,
        kv_heads=wire.kv_heads,
        head_dim=wire.head_dim,
        dtype=cast(KvDtype, wire.dtype),
        block_size=wire.block_size,
        head_order=cast(HeadOrder, wire.head_order),
        layer_group=wire.layer_group,
        tensor_parallel=wire.tensor_parallel,
        pipeline_parallel=wire.pipeline_parallel,
    )


def _fingerprint(wire: types_pb2.Fingerprint) -> Fingerprint:
    for field in ("weights", "architecture", "tokenizer", "kv_dtype", "quantization", "rope"):
        _text(getattr(wire, field), f"fingerprint.{field}")
    return Fingerprint(
        weights=wire.weights,
        architecture=wire.architecture,
        tokenizer=wire.tokenizer,
        vocabulary_size=wire.vocabulary_size,
        kv_dtype=wire.kv_dtype,
        quantization=wire.quantization,
        rope=wire.rope,
        protocol_major=wire.protocol_major,
    )


def _hello(wire: transfer_pb2.Hello) -> messages.Hello:
    _need(0 < len(wire.node_id) <= LONGEST_TEXT, "node_id")
    _need(wire.session > 0, "session")
    _need(0 < wire.slot_bytes <= LARGEST_SLOT_BYTES, "slot_bytes")
    _need(wire.step_limit_ms <= LONGEST_STEP_MS, "step_limit_ms")
    return messages.Hello(
        node_id=NodeId(wire.node_id),
        protocol_major=wire.protocol_major,
        protocol_minor=wire.protocol_minor,
        fingerprint=_fingerprint(wire.fingerprint),
        layout=_layout(wire.layout),
        slot_bytes=wire.slot_bytes,
        step_limit_s=wire.step_limit_ms / 1000,
        data_address=_text(wire.data_address, "data_address"),
        session=wire.session,
        digest=_text(wire.digest, "digest"),
    )


def _lane_report(wire: transfer_pb2.LaneReport) -> messages.LaneReport:
    _need(math.isfinite(wire.gigabytes_per_second) and wire.gigabytes_per_second >= 0, "gigabytes_per_second")
    return messages.LaneReport(_text(wire.lane, "lane"), wire.gigabytes_per_second)


def _sync(wire: transfer_pb2.Sync) -> messages.Sync:
    return messages.Sync(
        tuple(
            messages.SyncedTransfer(
                _transfer(item), _text(item.state, "state"), item.credits, item.sealed, item.first_token
            )
            for item in wire.transfers
        )
    )


def _heartbeat(wire: transfer_pb2.Heartbeat) -> messages.Heartbeat:
    leases = tuple(_bare_transfer(named) for named in wire.leases)
    return messages.Heartbeat(wire.engine_steps, wire.has_work, leases)


def _bare_transfer(named: transfer_pb2.TransferId) -> TransferId:
    return _transfer(transfer_pb2.Gone(transfer=named))


def _ask(wire: transfer_pb2.Ask) -> messages.Ask:
    _need(len(wire.prompt_token_ids) > 0, "prompt_token_ids")
    _need(wire.choices > 0, "choices")
    _need(wire.deadline_ms > 0, "deadline_ms")
    return messages.Ask(
        transfer=_transfer(wire),
        ticket=wire.ticket,
        prompt=tuple(wire.prompt_token_ids[:]),  # an item at a time takes half as long again
        settled=tuple(wire.settled_token_ids[:]),
        sampling=wire.sampling.SerializeToString(deterministic=True),
        choices=wire.choices,
        deadline_s=wire.deadline_ms / 1000,
        traceparent=_text(wire.traceparent, "traceparent"),
    )


def _refused(wire: transfer_pb2.Refused) -> messages.Refused:
    return messages.Refused(_transfer(wire), _text(wire.reason, "reason"), wire.retry_after_ms / 1000)


def _offer(wire: transfer_pb2.Offer) -> messages.Offer:
    _need(wire.ready_positions <= wire.expected_positions, "ready_positions")
    return messages.Offer(_transfer(wire), wire.ready_positions, wire.expected_positions)


def _credits(wire: transfer_pb2.Credits) -> messages.Credits:
    _need(0 < wire.slot_bytes <= LARGEST_SLOT_BYTES, "slot_bytes")
    _need(wire.nonce < NONCE_LIMIT, "nonce")
    credits = tuple(messages.Credit(CreditNumber(credit.number), credit.length) for credit in wire.credits)
    _need(all(credit.number < CREDIT_NUMBER_LIMIT for credit in credits), "credits.number")
    _need(all(credit.length < LARGEST_SLOT_BYTES for credit in credits), "credits.length")
    return messages.Credits(
        transfer=_transfer(wire),
        from_position=wire.from_position,
        slot_bytes=wire.slot_bytes,
        first_parcel=wire.first_parcel,
        credits=credits,
        nonce=SessionNonce(wire.nonce),
    )


def _first_token(wire: transfer_pb2.FirstToken) -> messages.FirstToken:
    _need(wire.declined == (not wire.tokens), "tokens")
    _need(all(token.position == wire.position for token in wire.tokens), "tokens.position")
    tokens = tuple(
        SettledToken(
            token.token_id,
            token.logprob if token.HasField("logprob") else None,
            tuple((top.token_id, top.logprob) for top in token.top_logprobs),
        )
        for token in wire.tokens
    )
    return messages.FirstToken(_transfer(wire), wire.position, tokens or None)


def _sealed(wire: transfer_pb2.Sealed) -> messages.Sealed:
    parcels = tuple(messages.SealedParcel(_parcel_name(item.name), item.digest) for item in wire.parcels)
    return messages.Sealed(_transfer(wire), parcels, wire.digest_of_all)


def _parcel_name(wire: transfer_pb2.ParcelName) -> ParcelName:
    name = ParcelName(
        wire.first_position, wire.end_position, wire.first_layer, wire.end_layer, wire.first_head, wire.end_head
    )
    in_order = (
        name.first_position < name.end_position
        and name.first_layer < name.end_layer
        and name.first_head < name.end_head
    )
    _need(in_order, "parcels.name")
    return name


def _drained(wire: transfer_pb2.Drained) -> messages.Drained:
    used = _bounded(wire.used_credits, CREDIT_NUMBER_LIMIT, "used_credits")
    return messages.Drained(_transfer(wire), tuple(CreditNumber(number) for number in used))


_READERS: dict[str, Callable[[Any], messages.Message]] = {
    "hello": _hello,
    "hello_refused": lambda wire: messages.HelloRefused(_text(wire.reason, "reason")),
    "lane_report": _lane_report,
    "sync": _sync,
    "heartbeat": _heartbeat,
    "wrong_incarnation": lambda wire: messages.WrongIncarnation(Incarnation(wire.current)),
    "session_closed": lambda wire: messages.SessionClosed(wire.session),
    "ask": _ask,
    "accepted": lambda wire: messages.Accepted(_transfer(wire)),
    "refused": _refused,
    "offer": _offer,
    "credits": _credits,
    "first_token": _first_token,
    "sealed": _sealed,
    "committed": lambda wire: messages.Committed(_transfer(wire)),
    "released": lambda wire: messages.Released(_transfer(wire)),
    "abort": lambda wire: messages.Abort(_transfer(wire), _text(wire.reason, "reason")),
    "failed": lambda wire: messages.Failed(_transfer(wire), _text(wire.reason, "reason")),
    "drained": _drained,
    "gone": lambda wire: messages.Gone(_transfer(wire)),
}
