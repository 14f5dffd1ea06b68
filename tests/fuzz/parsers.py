"""Every parser of foreign bytes: valid seeds to damage, and what must hold whatever comes of them.

A `Parser` takes bytes and returns whether they were accepted. Refusals are caught inside, by their types; whatever else comes
out, an AssertionError of a broken property or an exception that nobody expected, is a finding.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from decant_proto.v1 import inference_pb2, node_pb2, types_pb2
from google.protobuf.message import DecodeError, Message

from decode_node.submission import refused_submission, start_engine_request
from engine.port import RequestKey
from foundation import registry_entry
from foundation.api_keys import ApiKeyStore, Scope, add_api_key, read_api_keys
from foundation.config import Setting, build
from foundation.errors import ConfigurationError
from foundation.fingerprint import Fingerprint
from foundation.ids import AttemptId, CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, TransferId
from foundation.keys import NodeKey, NodeKeys, draw_master_keys, read_key_file, write_key_file
from foundation.kv_layout import KvLayout
from foundation.option_sources import _from_file
from foundation.ticket import Ticket, read_ticket, sign_ticket
from kv_transfer.digest import TRAILER_BYTES, payload_digest
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import SettledToken
from kv_transfer.protocol import messages as m
from kv_transfer.staging import Scatter, Scattered, scatter
from kv_transfer.transfer_blocks import TransferBlocks
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.contact import HANDLE_BYTES, Contact, read_contact
from kv_transfer.transport.rendezvous import MAGIC, read_call
from kv_transfer.wire.reading import WireRefusal, read_envelope
from kv_transfer.wire.writing import write_envelope
from node.options import PrefillOptions
from router.access import Access, Caller
from router.generation import RequestRefused
from router.inference_service import _wishes
from router.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.openai.reading import read_body
from router.registry import entry_from_proto
from router.tool_calls import PARSERS, ToolCallParser

VOCABULARY = 1000


@dataclass(frozen=True)
class Parser:
    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], bool]
    refuses_damage: bool = False
    """Whatever differs from all seeds must be refused: the bytes carry a proof."""


# --- the transfer's control stream --------------------------------------------------------------------------------

TRANSFER = TransferId(RequestId("request-1"), 2, 1)
FINGERPRINT = Fingerprint("weights", "architecture", "tokenizer", VOCABULARY, "float32", "none", "rope", 1)
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_size=4, layer_group=2)
PARCEL = ParcelName(0, 4, 0, 2, 0, 2)
CONTROL_MESSAGES: tuple[m.Message, ...] = (
    m.Hello(NodeId("p"), 1, 0, FINGERPRINT, LAYOUT, 4096, 0.5, "127.0.0.1:7101", 7, "xxh3_64"),
    m.HelloRefused("digest"),
    m.LaneReport("tcp", 2.5),
    m.Heartbeat(9, True, (TRANSFER,)),
    m.WrongIncarnation(Incarnation(3)),
    m.SessionClosed(7),
    m.Sync((m.SyncedTransfer(TRANSFER, "LANDING", 2, False, True),)),
    m.Ask(TRANSFER, b"ticket", (1, 2, 3), (4,), b"", 1, 30.0),
    m.Accepted(TRANSFER),
    m.Refused(TRANSFER, "busy", 1.0),
    m.Offer(TRANSFER, 2, 4),
    m.Credits(TRANSFER, 0, 4096, 0, (m.Credit(CreditNumber(1), 264),), SessionNonce(5)),
    m.FirstToken(TRANSFER, 4, (SettledToken(7, -0.5, ((8, -1.0),)),)),
    m.Sealed(TRANSFER, (m.SealedParcel(PARCEL, 11),), 12),
    m.Committed(TRANSFER),
    m.Released(TRANSFER),
    m.Abort(TRANSFER, "cancelled"),
    m.Failed(TRANSFER, "lease"),
    m.Drained(TRANSFER, (CreditNumber(1),)),
    m.Gone(TRANSFER),
)


def _control_message(raw: bytes) -> bool:
    found = read_envelope(raw)
    if isinstance(found, WireRefusal):
        assert found.reason, "a refusal without a reason"
        return False
    again = read_envelope(write_envelope(found))
    assert repr(again) == repr(found), f"{found} is written as {again}"
    return True


# --- parcels ------------------------------------------------------------------------------------------------------


def _parcel(raw: bytes) -> bool:
    """Nothing is written into the pool unless the digest under D's own seed is right. (Other lengths end in the transport.)"""
    memory = np.zeros((1, 2, 2, 2, 4, 2, LAYOUT.head_bytes), np.uint8)
    pool = KvPool(LAYOUT, (memory,), np.zeros(2, np.uint64))
    message = np.frombuffer(raw, np.uint8)
    if message.size != PARCEL.wire_bytes(LAYOUT) + TRAILER_BYTES:
        return False
    outcome = scatter(pool, Scatter(TransferBlocks.of([1]), PARCEL, 99, message))
    assert isinstance(outcome, Scattered) or not memory.any(), "a parcel that was refused has been written"
    return isinstance(outcome, Scattered)


def _sealed_parcel() -> bytes:
    payload = np.arange(PARCEL.wire_bytes(LAYOUT), dtype=np.uint8)
    return payload.tobytes() + payload_digest(99, payload).to_bytes(TRAILER_BYTES, "little")


# --- the data port ------------------------------------------------------------------------------------------------


def _data_port(raw: bytes) -> bool:
    async def call() -> bool:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        try:
            found = await read_call(reader)
        except TransportError:
            return False
        assert found.contact, "a call without a contact was taken"
        return True

    return _loop().run_until_complete(call())


def _contact(raw: bytes) -> bool:
    try:
        contact = read_contact(raw)
    except TransportError:
        return False
    assert contact.to_bytes() == raw
    return True


_CONTACT = Contact(bytes(range(1, 200)), (bytes([7]) * HANDLE_BYTES,)).to_bytes()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


_CALL = MAGIC + (7).to_bytes(8, "little") + (8).to_bytes(8, "little") + (16).to_bytes(4, "little") + b"w" * 16

# --- tickets, registry, keys, settings ----------------------------------------------------------------------------

NODE_KEYS = NodeKeys((NodeKey(1, b"k" * 32), NodeKey(2, b"l" * 32)))
TICKET = Ticket(AttemptId(RequestId("request-1"), 2), 4, Incarnation(5), Incarnation(6), 3, b"f" * 16, b"t" * 16)


def _ticket(raw: bytes) -> bool:
    return isinstance(read_ticket(raw, NODE_KEYS), Ticket)


def _registry_entry(raw: bytes) -> bool:
    entry = registry_entry.decode(raw)
    if entry is not None:
        assert registry_entry.decode(registry_entry.encode(entry)) == entry
    return entry is not None


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="decant-fuzz-"))


def _key_file(raw: bytes) -> bool:
    path = _scratch() / "key"
    path.write_bytes(raw)
    path.chmod(0o600)
    try:
        read_key_file(path)
    except ConfigurationError:
        return False
    return True


def _written_key_file() -> bytes:
    path = _scratch() / "written.key"
    path.unlink(missing_ok=True)
    write_key_file(path, draw_master_keys())
    return path.read_bytes()


def _api_key_file(raw: bytes) -> bool:
    path = _scratch() / "api-keys"
    path.write_bytes(raw)
    path.chmod(0o600)
    try:
        keys = read_api_keys(path)
    except ConfigurationError:
        return False
    assert keys.find("decant-a-key-that-was-never-drawn") is None
    return True


def _written_api_keys() -> bytes:
    path = _scratch() / "written-api-keys"
    path.unlink(missing_ok=True)
    for scope in Scope:
        add_api_key(path, scope.value, scope)
    return path.read_bytes()


ACCESS = Access(ApiKeyStore(None, "the-only-key-that-is-good"), lambda reason: None)


def _authorization(raw: bytes) -> bool:
    """As aiohttp hands headers on: bytes that are no text are surrogates."""
    judged = ACCESS.to_path("/v1/models", raw.decode(errors="surrogateescape"))
    return isinstance(judged, Caller)


OPTION_FIELDS = {field.name: field for field in fields(PrefillOptions)}


def _configuration(raw: bytes) -> bool:
    path = _scratch() / "decant.yaml"
    path.write_bytes(raw)
    given = {name: Setting(name, "fuzz") for name in ("model", "key_file")}
    try:
        build(PrefillOptions, {**_from_file(OPTION_FIELDS, str(path)), **given})
    except ConfigurationError:
        return False
    return True


# --- between routers, nodes and clients ---------------------------------------------------------------------------


def _as_proto(kind: type[Message], take: Callable[[Any], bool]) -> Callable[[bytes], bool]:
    def read(raw: bytes) -> bool:
        message = kind()
        try:
            message.ParseFromString(raw)
        except DecodeError:
            return False
        return take(message)

    return read


def _submission(message: Any) -> bool:
    if message.WhichOneof("message") != "submit":
        return False
    prompt = tuple(message.submit.prompt_token_ids)
    if refused_submission(message.submit, prompt, VOCABULARY) is not None:
        return False
    start_engine_request(RequestKey("r/1"), message.submit, prompt, await_kv=True)
    return True


def _entry(message: Any) -> bool:
    return not isinstance(entry_from_proto(message), str)


def _generate(message: Any) -> bool:
    try:
        _wishes(message)
    except RequestRefused:
        return False
    return True


def _http_body(kind: Any) -> Callable[[bytes], bool]:
    def read(raw: bytes) -> bool:
        try:
            body = read_body(kind, raw)
            if hasattr(body, "wishes"):
                body.wishes()
        except RequestRefused as refused:
            if not refused.refusal.message:
                raise AssertionError("a refusal without a message") from refused
            return False
        return True

    return read


SAMPLING = types_pb2.SamplingParameters(temperature=0.5, top_p=0.9, top_k=4, seed=1, max_tokens=4, stop_token_ids=[2])
SUBMIT = node_pb2.Submit(request_id="r", attempt=1, prompt_token_ids=[1, 2], sampling=SAMPLING)
GENERATE = inference_pb2.GenerateRequest(text="hello", stop=["x"])
GENERATE.sampling.temperature = 0.5
ENTRY = types_pb2.NodeEntry(node_id="p", role=types_pb2.ROLE_PREFILL, control_address="h:1", incarnation=9)
COMPLETION = {
    "model": "m",
    "prompt": "hello",
    "max_tokens": 4,
    "stop": ["a"],
    "logit_bias": {"5": -1.5},
    "stream": True,
}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "temperature": 0.5,
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
}
YAML = b"block-size: 16\nmax-num-seqs: 8\ndtype: float32\nenable-prefix-caching: false\nkv-cache-memory-bytes: 1GiB\n"


def _json(*values: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


# --- what a model writes ------------------------------------------------------------------------------------------

TOOL_CALLS = (
    'Well.\n<tool_call>\n{"name": "f\\n", "arguments": {"a": "}\\"", "b": [1, {}]}}\n</tool_call>',
    '<tool_call>{"arguments": {}, "name": "g"}</tool_call><tool_call>{"name": "h", "arguments": {}}</tool_call>',
    '{"name": "f", "parameters": {"a": "}\\""}}; {"parameters": {}, "name": "g"}',
    '[TOOL_CALLS] [{"name": "f", "arguments": {"b": [1, {}]}, "id": "a"}, {"name": "g", "arguments": {}}]',
    '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": "}"}[TOOL_CALLS]g{}',
)


def _tool_calls(raw: bytes) -> bool:
    """Whole and character by character the same calls are found, in each model's form."""
    text = raw.decode(errors="replace")
    found = [_calls_whole_and_in_pieces(parser, text) for parser in PARSERS.values()]
    return any(found)


def _calls_whole_and_in_pieces(parser: Callable[[int | None], ToolCallParser], text: str) -> bool:
    found = []
    for pieces in ((text,), text):
        calls = parser(None)
        parsed = [*(calls.add(piece) for piece in pieces), calls.finish()]
        deltas = [delta for one in parsed for delta in one.calls]
        names = [delta.name for delta in deltas if delta.name is not None]
        found.append(("".join(one.content for one in parsed), names, "".join(delta.arguments for delta in deltas)))
    assert found[0] == found[1], f"read otherwise in pieces: {found}"
    return bool(found[0][1])


def parsers() -> tuple[Parser, ...]:
    tickets = tuple(sign_ticket(TICKET, NodeKeys((key,))) for key in NODE_KEYS.keys)
    envelopes = tuple(
        write_envelope(m.Envelope(Incarnation(1), Incarnation(2), message)) for message in CONTROL_MESSAGES
    )
    entry = registry_entry.NodeEntry(NodeId("p"), registry_entry.Role.PREFILL, "h:1", Incarnation(9))
    command = node_pb2.RouterMessage(submit=SUBMIT)
    return (
        Parser("control messages", envelopes, _control_message),
        Parser("parcels", (_sealed_parcel(),), _parcel, refuses_damage=True),
        Parser("the data port's hello", (_CALL,), _data_port),
        Parser("contacts", (_CONTACT,), _contact, refuses_damage=True),
        Parser("tickets", tickets, _ticket, refuses_damage=True),
        Parser("registry entries (Redis)", (registry_entry.encode(entry).encode(),), _registry_entry),
        Parser("registry entries (gRPC)", (ENTRY.SerializeToString(),), _as_proto(types_pb2.NodeEntry, _entry)),
        Parser("router to node", (command.SerializeToString(),), _as_proto(node_pb2.RouterMessage, _submission)),
        Parser(
            "gRPC requests",
            (GENERATE.SerializeToString(),),
            _as_proto(inference_pb2.GenerateRequest, _generate),
        ),
        Parser("completions", _json(COMPLETION), _http_body(CompletionBody)),
        Parser("chat completions", _json(CHAT), _http_body(ChatBody)),
        Parser("tokenize", _json({"prompt": "hello"}), _http_body(TokenizeBody)),
        Parser("detokenize", _json({"tokens": [1, 2]}), _http_body(DetokenizeBody)),
        Parser("key files", (_written_key_file(),), _key_file),
        Parser("API key files", (_written_api_keys(),), _api_key_file),
        Parser(
            "Authorization",
            (b"Bearer the-only-key-that-is-good", b"Basic " + b64encode(b"me:the-only-key-that-is-good")),
            _authorization,
        ),
        Parser("configuration files", (YAML,), _configuration),
        Parser("tool calls", tuple(one.encode() for one in TOOL_CALLS), _tool_calls),
    )
