"""From an `Envelope` to bytes."""

from __future__ import annotations

import math
from typing import Any, assert_never

from decant_proto.v1 import transfer_pb2, types_pb2

from foundation.fingerprint import Fingerprint
from foundation.ids import TransferId
from kv_transfer.protocol import messages
from kv_transfer.wire.reading import LONGEST_TEXT

LONGEST_MS = 0xFFFF_FFFF


def write_envelope(envelope: messages.Envelope) -> bytes:
    """Bytes of one message. Our own messages are in range: a ValueError here is a bug."""
    kind, body = _body(envelope.message)
    wire = transfer_pb2.ControlMessage(sender=envelope.sender, addressee=envelope.addressee, **{kind: body})
    return wire.SerializeToString()


def write_fingerprint(fingerprint: Fingerprint) -> types_pb2.Fingerprint:
    return types_pb2.Fingerprint(
        weights=fingerprint.weights,
        architecture=fingerprint.architecture,
        tokenizer=fingerprint.tokenizer,
        vocabulary_size=fingerprint.vocabulary_size,
        kv_dtype=fingerprint.kv_dtype,
        quantization=fingerprint.quantization,
        rope=fingerprint.rope,
        protocol_major=fingerprint.protocol_major,
    )


def _wire_transfer(transfer: TransferId) -> transfer_pb2.TransferId:
    return transfer_pb2.TransferId(
        request_id=transfer.request, attempt=transfer.attempt, try_number=transfer.try_number
    )


def _milliseconds(seconds: float) -> int:
    """Rounded up, so that a short wait never becomes none."""
    nearest = round(seconds * 1000)  # 2.011 * 1000 is a little more than 2011
    return min(nearest if nearest / 1000 == seconds else math.ceil(seconds * 1000), LONGEST_MS)


def _body(message: messages.Message) -> tuple[str, Any]:
    """The field's name, and what it holds: a message, or its fields."""
    match message:
        case messages.Hello():
            return "hello", _write_hello(message)
        case messages.HelloRefused():
            return "hello_refused", transfer_pb2.HelloRefused(reason=_cut(message.reason))
        case messages.LaneReport():
            return "lane_report", transfer_pb2.LaneReport(
                lane=message.lane, gigabytes_per_second=message.gigabytes_per_second
            )
        case messages.Heartbeat():
            return "heartbeat", transfer_pb2.Heartbeat(
                engine_steps=message.engine_steps,
                has_work=message.has_work,
                leases=[_wire_transfer(transfer) for transfer in message.leases],
            )
        case messages.WrongIncarnation():
            return "wrong_incarnation", transfer_pb2.WrongIncarnation(current=message.current)
        case messages.SessionClosed():
            return "session_closed", transfer_pb2.SessionClosed(session=message.session)
        case messages.Sync():
            return "sync", transfer_pb2.Sync(transfers=[_write_synced(item) for item in message.transfers])
        case messages.Gone():
            return "gone", transfer_pb2.Gone(transfer=_wire_transfer(message.transfer))
        case messages.Ask() | messages.Credits() | messages.Committed() | messages.Abort():
            return _from_decode(message)
        case _:
            return _from_prefill(message)


def _from_decode(message: messages.FromDecode) -> tuple[str, Any]:
    transfer = _wire_transfer(message.transfer)
    match message:
        case messages.Ask():
            return "ask", {  # a message would be copied once more, and a prompt can be long
                "transfer": transfer,
                "ticket": message.ticket,
                "prompt_token_ids": message.prompt,
                "settled_token_ids": message.settled,
                "sampling": types_pb2.SamplingParameters.FromString(message.sampling),
                "choices": message.choices,
                "deadline_ms": _milliseconds(message.deadline_s),
                "traceparent": message.traceparent,
            }
        case messages.Credits():
            return "credits", transfer_pb2.Credits(
                transfer=transfer,
                from_position=message.from_position,
                slot_bytes=message.slot_bytes,
                first_parcel=message.first_parcel,
                credits=[transfer_pb2.Credit(number=item.number, length=item.length) for item in message.credits],
                nonce=message.nonce,
            )
        case messages.Committed():
            return "committed", transfer_pb2.Committed(transfer=transfer)
        case messages.Abort():
            return "abort", transfer_pb2.Abort(transfer=transfer, reason=_cut(message.reason))
        case _:
            assert_never(message)


def _from_prefill(message: messages.FromPrefill) -> tuple[str, Any]:
    transfer = _wire_transfer(message.transfer)
    match message:
        case messages.Accepted():
            return "accepted", transfer_pb2.Accepted(transfer=transfer)
        case messages.Refused():
            return "refused", transfer_pb2.Refused(
                transfer=transfer, reason=_cut(message.reason), retry_after_ms=_milliseconds(message.retry_after_s)
            )
        case messages.Offer():
            return "offer", transfer_pb2.Offer(
                transfer=transfer,
                ready_positions=message.ready_positions,
                expected_positions=message.expected_positions,
            )
        case messages.FirstToken():
            return "first_token", _write_first_token(message)
        case messages.Sealed():
            return "sealed", transfer_pb2.Sealed(
                transfer=transfer,
                parcels=[_write_sealed(item) for item in message.parcels],
                digest_of_all=message.digest_of_all,
            )
        case messages.Released():
            return "released", transfer_pb2.Released(transfer=transfer)
        case messages.Failed():
            return "failed", transfer_pb2.Failed(transfer=transfer, reason=_cut(message.reason))
        case messages.Drained():
            return "drained", transfer_pb2.Drained(transfer=transfer, used_credits=message.used_credits)
        case _:
            assert_never(message)


def _cut(reason: str) -> str:
    return reason[:LONGEST_TEXT]


def _write_hello(message: messages.Hello) -> transfer_pb2.Hello:
    layout = message.layout
    return transfer_pb2.Hello(
        node_id=message.node_id,
        protocol_major=message.protocol_major,
        protocol_minor=message.protocol_minor,
        fingerprint=write_fingerprint(message.fingerprint),
        layout=transfer_pb2.KvLayout(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            block_size=layout.block_size,
            head_order=layout.head_order,
            layer_group=layout.layer_group,
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
        ),
        slot_bytes=message.slot_bytes,
        step_limit_ms=_milliseconds(message.step_limit_s),
        data_address=message.data_address,
        session=message.session,
        digest=message.digest,
    )


def _write_synced(item: messages.SyncedTransfer) -> transfer_pb2.SyncedTransfer:
    return transfer_pb2.SyncedTransfer(
        transfer=_wire_transfer(item.transfer),
        state=item.state,
        credits=item.credits,
        sealed=item.sealed,
        first_token=item.first_token,
    )


def _write_first_token(message: messages.FirstToken) -> transfer_pb2.FirstToken:
    return transfer_pb2.FirstToken(
        transfer=_wire_transfer(message.transfer),
        position=message.position,
        declined=message.tokens is None,
        tokens=[
            types_pb2.Token(
                position=message.position,
                token_id=token.token_id,
                logprob=token.logprob,
                top_logprobs=[types_pb2.TokenLogprob(token_id=top, logprob=value) for top, value in token.top_logprobs],
            )
            for token in message.tokens or ()
        ],
    )


def _write_sealed(item: messages.SealedParcel) -> transfer_pb2.SealedParcel:
    name = item.name
    return transfer_pb2.SealedParcel(
        name=transfer_pb2.ParcelName(
            first_position=name.first_position,
            end_position=name.end_position,
            first_layer=name.first_layer,
            end_layer=name.end_layer,
            first_head=name.first_head,
            end_head=name.end_head,
        ),
        digest=item.digest,
    )
