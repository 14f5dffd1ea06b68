"""Drives an engine as a node would: requests of all three modes, transfers that write and read KV, cancels, one step a turn.

After every step the engine's books are proven; at the end every token is compared with what the history alone determines.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from fake_runner import FakeRunner, kv_of, next_token

from engine.config import EngineConfig
from engine.loop import Engine
from engine.port import (
    Cancel,
    Command,
    EngineEvent,
    FinishReason,
    KvComputed,
    KvLayersComputed,
    KvReserved,
    KvUnavailable,
    Mode,
    PrefillReserved,
    ReleaseKv,
    RequestFailed,
    RequestKey,
    ReserveKv,
    SamplingParameters,
    StartFromKv,
    Submit,
    TokenSampled,
)
from engine.request import finish_rules


@dataclass
class Wish:
    """One request and what its node will do with it."""

    submit: Submit
    at_turn: int = 0
    cancel_at: int | None = None
    hold_turns: int = 0
    """Turns that a transfer takes: before ReserveKv, before StartFromKv, before ReleaseKv."""
    received_share: float = 1.0
    """How much of the missing KV arrives."""
    first_token: bool = True
    """Whether the prefill node's token arrives."""


@dataclass
class Record:
    tokens: dict[int, int] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    """By position: the turn in which its token was drawn here."""
    finish: FinishReason | None = None
    failure: str | None = None
    account: tuple[int, int, int] | None = None
    blocks: tuple[int, ...] = ()
    owner_words: tuple[int, ...] = ()
    computed: int = 0
    declined: bool = False
    """A prefill node's, which had the whole history cached and drew nothing."""
    over: bool = False
    cancelled_at: int | None = None


def expected(config: EngineConfig, submit: Submit) -> tuple[list[int], FinishReason | None]:
    """Tokens after prompt and settled ones, and why they end (a prefill node draws only the first)."""
    rules = finish_rules(len(submit.prompt), submit.sampling, config)
    history, drawn = [*submit.prompt, *submit.settled], []
    while True:
        short = len(history) - len(submit.prompt) < submit.sampling.min_tokens
        token = next_token(history, rules.stop_token_ids if short else frozenset())
        reason = rules.reason(len(history), token)
        history.append(token)
        drawn.append(token)
        if reason is not None or submit.mode is Mode.PREFILL_ONLY:
            return drawn, reason


class World:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runner = FakeRunner(config)
        self.engine = Engine(config, self.runner, self.runner.owner_words)
        self.wishes: dict[RequestKey, Wish] = {}
        self.records: dict[RequestKey, Record] = {}
        self.due: dict[int, list[Command]] = defaultdict(list)
        self.turn = 0

    def add(self, wish: Wish) -> None:
        key = wish.submit.key
        self.wishes[key], self.records[key] = wish, Record()
        self.due[wish.at_turn].append(wish.submit)
        if wish.submit.mode is Mode.AWAIT_KV:
            end = len(wish.submit.prompt) + len(wish.submit.settled) - (0 if wish.first_token else 1)
            reserve: Command = ReserveKv(key, end) if end else StartFromKv(key, 0)
            self.due[wish.at_turn + wish.hold_turns].append(reserve)
        if wish.cancel_at is not None:
            self.due[wish.cancel_at].append(Cancel(key))

    def run(self, turn_limit: int = 20_000) -> None:
        while self._advance():
            assert self.turn < turn_limit, "no end in sight"
        stuck = [key for key, record in self.records.items() if not record.over]
        assert not stuck, f"nothing can move any more, and these wait: {stuck}"
        status = self.engine.status()
        assert status.blocks_in_use == 0
        assert status.blocks_free + status.blocks_cached == status.blocks_total
        assert (status.running, status.waiting) == (0, 0)

    def _advance(self) -> bool:
        for command in self.due.pop(self.turn, []):
            self._deliver(command)
        for event in self.engine.step():
            self._hear(event)
        self.engine.scheduler.check()
        self.turn += 1
        return self.engine.status().has_work or bool(self.due)

    def _deliver(self, command: Command) -> None:
        record = self.records[command.key]
        if record.over and not isinstance(command, Submit):
            return
        if isinstance(command, Cancel):
            record.over, record.finish, record.cancelled_at = True, FinishReason.CANCELLED, self.turn
        if isinstance(command, ReleaseKv):
            self._gather(command.key)
            record.over = True
        self.engine.take(command)

    def _after(self, key: RequestKey, command: Command) -> None:
        self.due[self.turn + 1 + self.wishes[key].hold_turns].append(command)

    def _hear(self, event: EngineEvent) -> None:
        record, wish = self.records[event.key], self.wishes[event.key]
        if record.over:
            # An answer to a command that came with the cancel in one turn; the cancelled request itself is silent.
            assert record.cancelled_at == self.turn, f"{event} after the end"
            assert not isinstance(event, KvComputed | KvReserved | PrefillReserved)
            return
        match event:
            case PrefillReserved():
                record.blocks, record.owner_words = event.block_ids, event.owner_words
                self._expect_kv(event.key, 0, event.cached_positions)
                record.declined = event.cached_positions == len(wish.submit.prompt) + len(wish.submit.settled)
                if record.declined:
                    self._after(event.key, ReleaseKv(event.key))
            case KvLayersComputed():
                raise AssertionError("a runner without layers told of some")
            case KvComputed():
                assert event.computed_positions > record.computed
                record.computed = event.computed_positions
                self._expect_kv(event.key, 0, event.computed_positions)
            case KvReserved():
                record.blocks = event.block_ids
                self._scatter(event.key, event.from_position, event.end_position)
            case KvUnavailable():
                self._after(event.key, StartFromKv(event.key, 0))
            case TokenSampled():
                self._token(event, record, wish)
            case RequestFailed():
                record.failure, record.over = event.reason, True

    def _token(self, event: TokenSampled, record: Record, wish: Wish) -> None:
        assert event.position not in record.tokens or event.finish_reason is not None, f"{event} twice"
        record.tokens[event.position] = event.token_id
        record.turns[event.position] = self.turn
        record.finish = event.finish_reason
        if event.prompt_cached is not None:
            assert record.account is None, "two prompt accounts"
            assert event.prompt_transferred is not None
            assert event.prompt_computed is not None
            record.account = (event.prompt_cached, event.prompt_transferred, event.prompt_computed)
        if wish.submit.mode is Mode.PREFILL_ONLY:
            self._after(event.key, ReleaseKv(event.key))
        elif event.finish_reason is not None:
            record.over = True

    def _history(self, key: RequestKey, end: int) -> np.ndarray:
        submit = self.wishes[key].submit
        return np.array((*submit.prompt, *submit.settled)[:end], np.int64)

    def _expect_kv(self, key: RequestKey, start: int, end: int) -> None:
        slots = self.runner.slots(self.records[key].blocks, start, end)
        wanted = kv_of(self._history(key, end), np.arange(end))[start:]
        assert np.array_equal(self.runner.kv[slots], wanted), f"{key}: KV of {start}..{end} is somebody else's"

    def _gather(self, key: RequestKey) -> None:
        """What a prefill node sends when the last parcel leaves."""
        record = self.records[key]
        assert self.runner.owner_words[list(record.blocks)].tolist() == list(record.owner_words)
        self._expect_kv(key, 0, len(self._history(key, 1 << 40)))

    def _scatter(self, key: RequestKey, start: int, end: int) -> None:
        """What a decode node receives, written at once: a launched step that still touched these blocks would spoil it."""
        wish, record = self.wishes[key], self.records[key]
        self._expect_kv(key, 0, start)
        received = start + int((end - start) * wish.received_share)
        slots = self.runner.slots(record.blocks, start, received)
        self.runner.kv[slots] = kv_of(self._history(key, received), np.arange(received))[start:]
        first_token = None
        if wish.first_token:
            first_token = expected(self.config, wish.submit)[0][0]
            record.tokens[len(wish.submit.prompt) + len(wish.submit.settled)] = first_token
        self._after(key, StartFromKv(key, received, first_token))

    def compare(self) -> None:
        """Every token of every request is the one that its history determines."""
        for key, record in self.records.items():
            submit = self.wishes[key].submit
            if record.failure is not None:
                continue
            tokens, reason = expected(self.config, submit)
            start = len(submit.prompt) + len(submit.settled)
            assert sorted(record.tokens) == list(range(start, start + len(record.tokens))), f"{key}: a hole"
            drawn = [record.tokens[position] for position in sorted(record.tokens)]
            if record.declined:
                assert not drawn, key
            elif record.finish is FinishReason.CANCELLED:
                assert drawn == tokens[: len(drawn)], key
            else:
                assert (drawn, record.finish) == (tokens, reason), key
            if record.account is not None:
                assert sum(record.account) == start


def submit_of(
    name: str,
    prompt: tuple[int, ...],
    *,
    mode: Mode = Mode.GENERATE,
    max_tokens: int = 8,
    min_tokens: int = 0,
    settled: tuple[int, ...] = (),
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> Submit:
    sampling = SamplingParameters(
        seed=1,
        max_tokens=max_tokens,
        temperature=0.0,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
    )
    return Submit(RequestKey(name), prompt, sampling, mode, settled)
