"""Names of things, one type each, so that a block is never mistaken for a slot.

The words are those of docs/protocol.md.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""What a client asked for; minted by the router."""

NodeId = NewType("NodeId", str)
"""A node's configured name; survives restarts, unlike its incarnation."""

Incarnation = NewType("Incarnation", int)
"""Random 64-bit number drawn when a node starts; covers all its ranks."""

SessionNonce = NewType("SessionNonce", int)
"""Random 40-bit number drawn by D for one session; upper part of every UCX tag of that session."""

BlockId = NewType("BlockId", int)
"""Index of one block in a node's KV pool."""

SlotIndex = NewType("SlotIndex", int)
"""Index of one slot in an arena."""

CreditNumber = NewType("CreditNumber", int)
"""Counts a session's credits from 0; never reused in its session."""


class AttemptId(NamedTuple):
    """One assignment of a request to a decode node; the router numbers attempts from 1."""

    request: RequestId
    attempt: int


class TransferId(NamedTuple):
    """One use of one prefill node for one attempt; the decode node numbers tries from 1."""

    request: RequestId
    attempt: int
    try_number: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request, self.attempt)

    def __str__(self) -> str:
        return f"{self.request}/{self.attempt}/{self.try_number}"
