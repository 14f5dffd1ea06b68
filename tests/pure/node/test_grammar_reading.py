"""What waits for its grammar, what does not, and what becomes of a grammar that cannot be read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from engine.port import Cancel, Command, RequestKey, SamplingParameters, Submit
from node.grammar_reading import MOST_READERS, GrammarReading

ENDLESS, SLOW, UNTRIED = "endless", "slow", "untried"
LIMIT_S = 10.0


class Desk:
    """ENDLESS cannot be read; SLOW is read when the test is over; UNTRIED cannot be tried."""

    def __init__(self, begun_within_s: float) -> None:
        self.over = threading.Event()
        self.slow = threading.Semaphore(0)
        self.tried: list[str] = []
        self.untried: Exception = RuntimeError("no process")
        self.posted: list[Command] = []
        self.refused: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        self.reading = GrammarReading(self._read, loop, self._post, self._refuse, begun_within_s)

    def _read(self, grammar: str) -> bool:
        self.tried.append(grammar)
        if grammar == SLOW:
            self.slow.release()
            self.over.wait()
        if grammar == UNTRIED:
            raise self.untried
        return grammar != ENDLESS

    def _post(self, command: Command) -> None:
        self.posted.append(command)

    def _refuse(self, key: RequestKey, reason: str) -> None:
        self.refused[key] = reason

    async def until_posted(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.posted) < count:
                await asyncio.sleep(0.001)

    async def until_refused(self, *keys: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not self.refused.keys() >= set(keys):
                await asyncio.sleep(0.001)


@pytest.fixture
def desks() -> Iterator[list[Desk]]:
    made: list[Desk] = []
    yield made
    for desk in made:
        desk.over.set()


def submit(key: str, grammar: str = "", fork_of: str | None = None) -> Submit:
    source = None if fork_of is None else RequestKey(fork_of)
    return Submit(RequestKey(key), (1,), SamplingParameters(seed=1, max_tokens=1, grammar=grammar), fork_of=source)


async def test_a_request_waits_for_its_grammar_and_its_commands_stay_in_order(desks: list[Desk]) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    commands: list[Command] = [submit("a", "short"), Cancel(RequestKey("a"))]
    assert [desk.reading.hold(command) for command in commands] == [True, True]
    assert not desk.reading.hold(submit("b")), "without a grammar nothing waits"
    assert not desk.reading.hold(Cancel(RequestKey("b")))
    await desk.until_posted(2)
    assert desk.posted == commands
    assert not desk.reading.hold(Cancel(RequestKey("a"))), "it waits no more"


async def test_f28_a_grammar_that_takes_for_ever_is_refused_once_for_all_and_others_are_read(desks: list[Desk]) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    assert desk.reading.hold(submit("a", ENDLESS))
    await desk.until_refused("a")
    assert desk.reading.hold(submit("b", ENDLESS))
    await desk.until_refused("b")
    assert desk.refused == {"a": "invalid_grammar", "b": "invalid_grammar"}
    assert desk.tried == [ENDLESS]
    fine = submit("c", "short")
    assert desk.reading.hold(fine)
    await desk.until_posted(1)
    assert desk.posted == [fine]


async def test_f28_while_no_reader_is_free_grammars_are_overload_and_all_else_passes(desks: list[Desk]) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    for number in range(MOST_READERS):
        assert desk.reading.hold(submit(f"{number}", SLOW))
        assert await asyncio.to_thread(desk.slow.acquire, timeout=LIMIT_S)
    desk.reading._begun_within_s = 0.01
    assert desk.reading.hold(submit("next", "short"))
    assert not desk.reading.hold(submit("free"))
    await desk.until_refused("next")
    assert desk.refused == {"next": "overloaded"}
    desk.over.set()
    await desk.until_posted(MOST_READERS)
    assert "short" not in desk.tried, "nobody waits for it any more"


@pytest.mark.parametrize("why", [RuntimeError("no process"), ValueError("a bug")], ids=repr)
async def test_a_grammar_that_cannot_be_tried_is_overload_and_may_be_asked_again(
    desks: list[Desk], why: Exception
) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    desk.untried = why
    for key in ("a", "b"):
        assert desk.reading.hold(submit(key, UNTRIED))
        await desk.until_refused(key)
    assert desk.refused == {"a": "overloaded", "b": "overloaded"}
    assert desk.tried == [UNTRIED, UNTRIED]


async def test_a_fork_whose_grammar_is_read_first_is_posted_behind_the_request_whose_kv_it_shares(
    desks: list[Desk],
) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    commands: list[Command] = [submit("a", SLOW), submit("b", "short", fork_of="a"), Cancel(RequestKey("b"))]
    assert [desk.reading.hold(command) for command in commands[:2]] == [True, True]
    async with asyncio.timeout(LIMIT_S):
        while not desk.reading._waiting[RequestKey("b")].is_read:
            await asyncio.sleep(0.001)
    assert desk.posted == []
    assert desk.reading.hold(commands[2])
    desk.over.set()
    await desk.until_posted(3)
    assert desk.posted == commands


async def test_a_fork_is_posted_where_the_request_whose_kv_it_would_share_is_refused(desks: list[Desk]) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    fork = submit("b", "short", fork_of="a")
    assert desk.reading.hold(submit("a", UNTRIED))
    assert desk.reading.hold(fork)
    await desk.until_refused("a")
    await desk.until_posted(1)
    assert desk.posted == [fork]
