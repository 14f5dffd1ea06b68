"""What waits for its grammar, what does not, and what becomes of a grammar that takes for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from engine.port import Cancel, Command, RequestKey, SamplingParameters, Submit
from node.grammar_reading import MOST_READERS, GrammarReading

ENDLESS = "endless"
LIMIT_S = 10.0


class Desk:
    """`read` takes for ever for what begins with ENDLESS, until the test is over."""

    def __init__(self, read_within_s: float) -> None:
        self.over = threading.Event()
        self.posted: list[Command] = []
        self.refused: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        self.reading = GrammarReading(self._read, loop, self._post, self._refuse, read_within_s)

    def _read(self, grammar: str) -> None:
        if grammar.startswith(ENDLESS):
            self.over.wait()

    def _post(self, command: Command) -> None:
        self.posted.append(command)

    def _refuse(self, key: RequestKey, reason: str) -> None:
        self.refused[key] = reason

    async def is_stuck(self, key: str) -> None:
        assert self.reading.hold(submit(key, ENDLESS + key))
        async with asyncio.timeout(LIMIT_S):
            while not self.reading._waiting[RequestKey(key)].begun:
                await asyncio.sleep(0.001)

    async def time_is_over(self, key: str) -> None:
        self.reading._read_within_s = 0.0
        self.reading._begun(RequestKey(key))
        self.reading._read_within_s = LIMIT_S
        await self.until_refused(key)

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


def submit(key: str, grammar: str = "") -> Submit:
    return Submit(RequestKey(key), (1,), SamplingParameters(seed=1, max_tokens=1, grammar=grammar))


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


async def test_f28_a_grammar_that_takes_for_ever_is_refused_and_others_are_read(desks: list[Desk]) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    await desk.is_stuck("a")
    await desk.time_is_over("a")
    assert desk.reading.hold(submit("b", ENDLESS + "a")), "and not begun to be read once more"
    await desk.until_refused("b")
    assert desk.refused == {"a": "invalid_grammar", "b": "invalid_grammar"}
    assert desk.reading._readers == 1
    fine = submit("c", "short")
    assert desk.reading.hold(fine)
    await desk.until_posted(1)
    assert desk.posted == [fine]


async def test_f28_while_no_reader_is_left_grammars_are_overload_and_all_else_passes(desks: list[Desk]) -> None:
    desk = Desk(LIMIT_S)
    desks.append(desk)
    for number in range(MOST_READERS):
        await desk.is_stuck(f"{number}")
    desk.reading._read_within_s = 0.01
    assert desk.reading.hold(submit("next", "short"))
    assert not desk.reading.hold(submit("free"))
    await desk.until_refused("next")
    assert desk.refused == {"next": "overloaded"}
