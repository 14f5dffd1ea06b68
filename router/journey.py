"""One request's life in the router, from its first placement to its end, as a table. Pure: events in, effects out.

The token log is the truth. A token is appended only if its attempt is the current one *and* its position is the next of the
log; every other one is dropped and counted. So two decode nodes that decode the same request after a cut are harmless, and a
stream that goes on elsewhere loses and repeats nothing: the new attempt gets prompt + log as settled history.

    PLACING --Placed--> RUNNING --last token--> FINISHED
       ^                   |
       +---attempt lost----+        either may end as FAILED or CANCELLED; all three are terminal

`Moved` keeps a request RUNNING: its node is leaving and another one has room, so the next attempt begins there at once.

Must not know: sockets, clocks, texts, protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from foundation.ids import NodeId, RequestId


class State(Enum):
    PLACING = "placing"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ending(Enum):
    """Why a decode node says that a request is over."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AttemptReason(Enum):
    """Why an attempt is made."""

    FIRST = "first"
    NODE_LOST = "node_lost"
    NODE_REFUSED = "node_refused"
    NODE_DRAINING = "node_draining"


class PositionedToken(Protocol):
    """A token as it comes from a node; `position` counts from the first token of the prompt."""

    @property
    def position(self) -> int: ...
    @property
    def token_id(self) -> int: ...


# --- events


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement has chosen a decode node for the next attempt."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NoPlace:
    """No decode node is usable now; the rim comes again when the fleet changes, until `PatienceOver` or `DeadlinePassed`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The node of this attempt is leaving, and placement has found room on another one."""

    attempt: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """The request has been without a node for as long as it may be."""


@dataclass(frozen=True, slots=True)
class Output:
    """A node's message about one attempt."""

    attempt: int
    tokens: Sequence[PositionedToken] = ()
    ending: Ending | None = None
    failure: str = ""
    retryable: bool = False
    retry_after_s: float = 0.0
    """With a refusal: when the node wants to be asked again; 0: it gave no hint."""


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The node of this attempt is gone, hangs, or has forgotten the request."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopStringFound:
    """The text stage found a stop string in what has been delivered."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    pass


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


Event = Placed | NoPlace | Moved | PatienceOver | Output | AttemptLost | StopStringFound | ClientLeft | DeadlinePassed

# --- effects


@dataclass(frozen=True, slots=True)
class Place:
    """After `after_s`, choose a decode node, not one of `avoid` if there is another, and answer with `Placed` or `NoPlace`."""

    avoid: frozenset[NodeId]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Submit this attempt to the node: prompt, and the log as settled tokens."""

    attempt: int
    node: NodeId
    why: AttemptReason


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Tell the node, if it can still be told, that nobody wants this attempt."""

    attempt: int
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens of the log, for the client."""

    tokens: tuple[PositionedToken, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Tokens or endings that changed nothing, to be counted by reason."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Fail:
    """The request cannot be answered. `retryable`: the same request may succeed later or elsewhere."""

    reason: str
    retryable: bool


Effect = Place | Begin | CancelAttempt | Deliver | Dropped | Finish | Fail


@dataclass(slots=True)
class Journey:
    """Feed `handle` with events; carry out the effects it returns in their order.

    `most_lost` bounds how many nodes one request may take down with it; a refusal takes nothing down.
    """

    request: RequestId
    prompt_length: int
    max_tokens: int
    most_lost: int = 5
    state: State = State.PLACING
    attempt: int = 0
    node: NodeId | None = None
    log: list[int] = field(default_factory=list)
    lost: list[tuple[NodeId, str]] = field(default_factory=list)
    """Nodes that lost or refused an attempt, each with the reason, in order; each pair once."""
    nodes_lost: int = 0
    waiting_reason: str = ""
    """Why the request has no node now."""
    next_attempt: AttemptReason = AttemptReason.FIRST

    def begin(self) -> list[Effect]:
        assert self.state is State.PLACING
        assert self.attempt == 0
        return [self._place()]

    def handle(self, event: Event) -> list[Effect]:
        return TRANSITIONS[self.state, type(event)](self, event)

    def extend(self, attempt: int, position: int, token_id: int) -> bool:
        """`handle` for the plain case, the next token of the current attempt, without its events; False: it is not that case."""
        if attempt != self.attempt or position != self.prompt_length + len(self.log) or self.state is not State.RUNNING:
            return False
        self.log.append(token_id)
        return True

    @property
    def next_position(self) -> int:
        return self.prompt_length + len(self.log)

    # --- PLACING

    def _placed(self, event: Placed) -> list[Effect]:
        self.attempt += 1
        self.node = event.node
        self.waiting_reason = ""
        self.state = State.RUNNING
        return [Begin(self.attempt, event.node, self.next_attempt)]

    def _no_place(self, event: NoPlace) -> list[Effect]:
        self.waiting_reason = event.reason
        return []

    def _patience_over(self, event: PatienceOver) -> list[Effect]:
        return self._fail(self.waiting_reason or "no_decode_node", retryable=True)

    # --- RUNNING

    def _output(self, event: Output) -> list[Effect]:
        if event.attempt != self.attempt:
            return _dropped("stale_attempt", event)
        effects: list[Effect] = []
        taken, repeated, next_position = [], 0, self.next_position
        for token in event.tokens:
            if token.position == next_position:
                taken.append(token)
                next_position += 1
            elif token.position < next_position:
                repeated += 1
            else:
                break
        if taken:
            self.log.extend(token.token_id for token in taken)
            effects.append(Deliver(tuple(taken)))
        if repeated:
            effects.append(Dropped("stale_position", repeated))
        missing = len(event.tokens) - len(taken) - repeated
        if missing:
            # What lies between was lost on the way: this attempt can never become whole again.
            effects.append(Dropped("position_gap", missing))
            return effects + self._cancel_attempt("position_gap") + self._attempt_lost("position_gap")
        return effects + self._ended(event)

    def _ended(self, event: Output) -> list[Effect]:
        match event.ending:
            case None:
                return []
            case Ending.STOP | Ending.LENGTH:
                self.state = State.FINISHED
                return [Finish(event.ending)]
            case Ending.CANCELLED:
                # Nobody here asked for it: the node's lease for this router lapsed, or the node is leaving.
                return self._attempt_lost("cancelled_by_node")
            case Ending.FAILED:
                return self._refused_or_failed(event)

    def _refused_or_failed(self, event: Output) -> list[Effect]:
        reason = event.failure or "unnamed_failure"
        if not event.retryable:
            return self._fail(reason, retryable=False)
        if (self.node, reason) not in self.lost:
            return self._attempt_lost(reason, AttemptReason.NODE_REFUSED)
        if self.log and event.retry_after_s > 0:
            # A stream that has begun is not given up for want of room: it asks again until its deadline.
            return self._attempt_lost(reason, AttemptReason.NODE_REFUSED, event.retry_after_s)
        # There was nowhere else to go, and asking the same node once more changes nothing.
        return self._fail(reason, retryable=True)

    def _lost(self, event: AttemptLost) -> list[Effect]:
        if event.attempt != self.attempt:
            return []
        # The node may live on behind a cut, or be only slow: where it can be told, it is.
        return self._cancel_attempt(event.reason) + self._attempt_lost(event.reason)

    def _moved(self, event: Moved) -> list[Effect]:
        if event.attempt != self.attempt:
            return []
        cancelled = self._cancel_attempt("moved")
        self.next_attempt = AttemptReason.NODE_DRAINING
        return cancelled + self._placed(Placed(event.node))

    def _attempt_lost(
        self, reason: str, why: AttemptReason = AttemptReason.NODE_LOST, place_after_s: float = 0.0
    ) -> list[Effect]:
        assert self.node is not None
        self.next_attempt = why
        self.nodes_lost += why is AttemptReason.NODE_LOST
        if (self.node, reason) not in self.lost:
            self.lost.append((self.node, reason))
        self.node = None
        if len(self.log) >= self.max_tokens:
            self.state = State.FINISHED
            return [Finish(Ending.LENGTH)]
        if self.nodes_lost >= self.most_lost:
            return self._fail(reason, retryable=True)
        self.state = State.PLACING
        self.waiting_reason = reason
        return [self._place(place_after_s)]

    def _stop_string(self, event: StopStringFound) -> list[Effect]:
        effects = self._cancel_attempt("stop_string")
        self.state = State.FINISHED
        return [*effects, Finish(Ending.STOP)]

    # --- any live state

    def _client_left(self, event: ClientLeft) -> list[Effect]:
        effects = self._cancel_attempt("client_left")
        self.state = State.CANCELLED
        return effects

    def _deadline(self, event: DeadlinePassed) -> list[Effect]:
        return self._cancel_attempt("deadline") + self._fail("deadline", retryable=True)

    # --- terminal states

    def _late_output(self, event: Output) -> list[Effect]:
        return _dropped("request_over", event)

    def _ignored(self, event: Event) -> list[Effect]:
        return []

    # --- shared pieces

    def _place(self, after_s: float = 0.0) -> Place:
        return Place(frozenset(node for node, _ in self.lost), after_s)

    def _cancel_attempt(self, reason: str) -> list[Effect]:
        return [CancelAttempt(self.attempt, self.node, reason)] if self.node is not None else []

    def _fail(self, reason: str, *, retryable: bool) -> list[Effect]:
        self.state = State.FAILED
        return [Fail(reason, retryable)]


def _dropped(reason: str, event: Output) -> list[Effect]:
    return [Dropped(reason, len(event.tokens))] if event.tokens else []


Handler = Callable[..., list[Effect]]

TRANSITIONS: dict[tuple[State, type[Event]], Handler] = {
    (State.PLACING, Placed): Journey._placed,
    (State.PLACING, NoPlace): Journey._no_place,
    (State.PLACING, PatienceOver): Journey._patience_over,
    (State.PLACING, Output): lambda journey, event: _dropped("stale_attempt", event),
    (State.PLACING, AttemptLost): Journey._ignored,
    (State.PLACING, StopStringFound): Journey._stop_string,
    (State.PLACING, ClientLeft): Journey._client_left,
    (State.PLACING, DeadlinePassed): Journey._deadline,
    (State.RUNNING, Moved): Journey._moved,
    (State.RUNNING, PatienceOver): Journey._ignored,
    (State.RUNNING, Output): Journey._output,
    (State.RUNNING, AttemptLost): Journey._lost,
    (State.RUNNING, StopStringFound): Journey._stop_string,
    (State.RUNNING, ClientLeft): Journey._client_left,
    (State.RUNNING, DeadlinePassed): Journey._deadline,
}
"""An absent pair is a bug of the rim: `Placed` and `NoPlace` answer a `Place`, which only a request without a node asks, and only
one with a node can move."""

for _state in (State.FINISHED, State.FAILED, State.CANCELLED):
    TRANSITIONS[_state, Output] = Journey._late_output
    for _event in (PatienceOver, AttemptLost, StopStringFound, ClientLeft, DeadlinePassed):
        TRANSITIONS[_state, _event] = Journey._ignored
