"""The border between a node and its transfers. Everything here happens on the node's asyncio thread; nothing waits.

`kv_transfer.driver` provides `DecodeTransfers` and `PrefillTransfers`; the decode and the prefill node implement the two
`...Listener`s. A transfer owns its blocks from `reserved` until `committed`, `ended` or `released` has been called, and by
then no gather or scatter on them is open.

Must not know: models, engines, routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foundation.ids import BlockId, NodeId, TransferId


@dataclass(frozen=True, slots=True)
class BeginTransfer:
    """What D needs to ask one P for the KV of one attempt. `sampling` is a serialized decant.v1.SamplingParameters."""

    transfer: TransferId
    prefill_node: NodeId
    control_address: str
    ticket: bytes
    prompt: tuple[int, ...]
    settled: tuple[int, ...]
    sampling: bytes
    deadline_s: float
    choices: int = 1
    """Answers that share this KV; P draws the first token of one alone."""
    traceparent: str = ""
    """W3C trace context under which P traces; empty: the request is not traced."""


@dataclass(frozen=True, slots=True)
class SettledToken:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TransferAccount:
    """Figures of one ended transfer. `verified_positions` = the unbroken prefix, D's cached one included, that is proven."""

    from_position: int
    verified_positions: int
    payload_bytes: int
    parcels: int
    seconds: float
    lane: str
    bytes_per_second: float = 0.0
    """How fast the lane carried, as far as the landings of this transfer show it; 0: they do not."""


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """A live transfer, for people. `state` is the machine's, in lower case; `parcels` and `bytes` are 0 until the cut is known.

    Done means verified on D, handed to the transport on P.
    """

    transfer: TransferId
    peer: NodeId
    state: str
    parcels_done: int
    parcels: int
    bytes_done: int
    bytes: int
    age_s: float


class DecodeListener(Protocol):
    """What the transfers tell the decode node."""

    def reserve(self, transfer: TransferId, end_position: int) -> None:
        """P has offered: reserve blocks for [0, end_position), then call `reserved` or `unavailable`."""

    def first_token(self, transfer: TransferId, token: SettledToken | None) -> None:
        """P's first token, or None when P declined to sample."""

    def committed(self, transfer: TransferId, account: TransferAccount) -> None:
        """All wanted KV is verified and in its blocks. The transfer no longer owns them."""

    def ended(self, transfer: TransferId, reason: str, account: TransferAccount) -> None:
        """The transfer failed or was ended; nothing will write into its blocks any more. The node decides what is next."""


class DecodeTransfers(Protocol):
    """What the decode node tells the transfers."""

    def begin(self, request: BeginTransfer) -> None: ...

    def reserved(
        self, transfer: TransferId, block_ids: Sequence[BlockId], from_position: int, end_position: int
    ) -> None: ...

    def unavailable(self, transfer: TransferId, reason: str) -> None: ...

    def end(self, transfer: TransferId, reason: str) -> None:
        """The request needs this transfer no more (cancelled, done). `ended` follows, unless it has ended already."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A valid Ask as P's node gets it; the ticket has been checked."""

    transfer: TransferId
    prompt: tuple[int, ...]
    settled: tuple[int, ...]
    sampling: bytes
    choices: int
    deadline_s: float
    traceparent: str = ""


class PrefillListener(Protocol):
    """What the transfers tell the prefill node."""

    def prefill(self, request: PrefillRequest) -> None:
        """Compute this prompt's KV. Answer with `reserved` or `refuse`, then (`layers_computed`*, `computed`)*, `first_token`; or
        `failed`."""

    def released(self, transfer: TransferId, reason: str) -> None:
        """The transfer is over and no gather is open: stop computing for it and give its blocks back."""


class PrefillTransfers(Protocol):
    """What the prefill node tells the transfers."""

    def refuse(self, transfer: TransferId, reason: str, retry_after_s: float) -> None: ...

    def reserved(
        self,
        transfer: TransferId,
        block_ids: Sequence[BlockId],
        owner_words: Sequence[int],
        cached_positions: int,
        expected_positions: int,
    ) -> None: ...

    def layers_computed(self, transfer: TransferId, positions: int, end_layer: int) -> None:
        """Layers [0, end_layer) of positions [0, positions) may be gathered, before `computed` says so of all layers."""

    def computed(self, transfer: TransferId, positions: int) -> None: ...

    def first_token(self, transfer: TransferId, tokens: Sequence[SettledToken] | None) -> None:
        """None: this P cannot apply the request's sampling (FirstToken(declined))."""

    def failed(self, transfer: TransferId, reason: str) -> None: ...
