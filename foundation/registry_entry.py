"""A node's entry in the registry: that it exists and where to dial it, nothing more. Written by nodes, read by routers.

In Redis an entry is one string under `node_key(node_id)` holding `encode(entry)`, with a lease as its expiry; the registry
embedded in a router holds the same entries (proto/decant_proto/v1/registry.proto). Losing the registry stops nothing:
routers keep the streams they have, and nodes announce themselves again.

Must not know: Redis clients, gRPC.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from foundation.ids import Incarnation, NodeId

KEY_PREFIX = "decant:node:"
LEASE_S = 6.0
"""An entry is gone unless announced again within this time."""
ANNOUNCE_EVERY_S = 2.0
LONGEST_ENTRY_BYTES = 4096


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """`control_address` is host:port of the node's gRPC server as other machines reach it."""

    node_id: NodeId
    role: Role
    control_address: str
    incarnation: Incarnation


def node_key(node_id: NodeId) -> str:
    return KEY_PREFIX + node_id


def encode(entry: NodeEntry) -> str:
    return json.dumps(
        {
            "node_id": entry.node_id,
            "role": entry.role.value,
            "control_address": entry.control_address,
            "incarnation": entry.incarnation,
        }
    )


def decode(text: str | bytes) -> NodeEntry | None:
    """The entry, or None where the bytes are not one: a registry is shared, so anything may stand in it."""
    if len(text) > LONGEST_ENTRY_BYTES:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    node_id, address, incarnation = found.get("node_id"), found.get("control_address"), found.get("incarnation")
    role = next((role for role in Role if role.value == found.get("role")), None)
    if role is None or not (isinstance(node_id, str) and node_id) or not (isinstance(address, str) and ":" in address):
        return None
    if type(incarnation) is not int or not 0 <= incarnation < 1 << 64:
        return None
    return NodeEntry(NodeId(node_id), role, address, Incarnation(incarnation))
