"""What a genuine ticket is good for on one prefill node: this pair, this epoch, these tokens, each transfer once.

`foundation.ticket` says whether bytes are a ticket at all. Memory of used transfers is bounded by the epochs: what is older
than the previous epoch is refused as expired, so its transfers need not be remembered.

Must not know: gRPC, the protocol's states. Time is an argument.
"""

from __future__ import annotations

from foundation.fingerprint import Fingerprint
from foundation.ids import Incarnation, TransferId
from foundation.keys import NodeKeys
from foundation.ticket import EPOCH_S, Ticket, TicketRefusal, digest_of_fingerprint, digest_of_tokens, read_ticket

USED_LIMIT = 200_000
"""Transfers remembered in each of two epochs; beyond that, new ones are refused until the epoch turns."""


class TicketGate:
    """P's check of every `Ask`. `epoch(now_s)` is what P tells its routers."""

    def __init__(
        self,
        incarnation: Incarnation,
        keys: NodeKeys,
        fingerprint: Fingerprint,
        started_s: float,
        used_limit: int = USED_LIMIT,
    ) -> None:
        self._incarnation = incarnation
        self._keys = keys
        self._fingerprint = digest_of_fingerprint(fingerprint)
        self._started_s = started_s
        self._used_limit = used_limit
        self._used: dict[int, set[TransferId]] = {}

    def epoch(self, now_s: float) -> int:
        return int((now_s - self._started_s) // EPOCH_S)

    def check(
        self,
        raw: bytes,
        transfer: TransferId,
        decode_incarnation: Incarnation,
        prompt: tuple[int, ...],
        settled: tuple[int, ...],
        now_s: float,
    ) -> TicketRefusal | None:
        """None when the transfer may start, which uses the ticket up for it."""
        ticket = read_ticket(raw, self._keys)
        if isinstance(ticket, TicketRefusal):
            return ticket
        epoch = self.epoch(now_s)
        refusal = self._misfit(ticket, transfer, decode_incarnation, epoch)
        if refusal is None and ticket.tokens != digest_of_tokens(prompt, settled):
            refusal = TicketRefusal.OTHER_TOKENS
        return refusal or self._use(ticket.epoch, transfer, epoch)

    def _misfit(
        self, ticket: Ticket, transfer: TransferId, decode_incarnation: Incarnation, epoch: int
    ) -> TicketRefusal | None:
        if ticket.attempt != transfer.attempt_id or not 1 <= transfer.try_number <= ticket.max_tries:
            return TicketRefusal.OTHER_TRANSFER
        if ticket.decode_incarnation != decode_incarnation:
            return TicketRefusal.OTHER_DECODE_INCARNATION
        if ticket.prefill_incarnation != self._incarnation:
            return TicketRefusal.OTHER_PREFILL_INCARNATION
        if ticket.epoch < epoch - 1:
            return TicketRefusal.EXPIRED
        if ticket.epoch > epoch:
            return TicketRefusal.NOT_YET
        if ticket.fingerprint != self._fingerprint:
            return TicketRefusal.OTHER_FINGERPRINT
        return None

    def _use(self, ticket_epoch: int, transfer: TransferId, epoch: int) -> TicketRefusal | None:
        self._used = {kept: used for kept, used in self._used.items() if kept >= epoch - 1}
        if any(transfer in used for used in self._used.values()):
            return TicketRefusal.USED
        used = self._used.setdefault(ticket_epoch, set())
        if len(used) >= self._used_limit:
            return TicketRefusal.TOO_MANY
        used.add(transfer)
        return None
