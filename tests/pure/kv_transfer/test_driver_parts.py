"""What the drivers are built from: the pump's order and its end, the clockwork, the switches for test faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from foundation.errors import ConfigurationError
from foundation.ids import NodeId
from kv_transfer.driver import Clockwork, EngineProgress, TransferLimits
from kv_transfer.faults import VARIABLE, Faults, faults_of_process
from kv_transfer.protocol.deadlines import Limits, Wait
from kv_transfer.protocol.events import Beat, Silent
from kv_transfer.pump import Pump

P0 = NodeId("p0")


class Turns:
    """A pump over a fake core: event n has the effects (n, "a"), (n, "b")."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str]] = []
        self.ticks = 0
        self.busy = False
        self.pump: Pump[int, tuple[int, str]] = Pump(
            lambda event: [(event, "a"), (event, "b")], self.execute, lambda: self.busy, self.tick, 0.001
        )

    def execute(self, effect: tuple[int, str]) -> None:
        self.done.append(effect)
        if effect == (1, "a"):
            self.pump.emit(2)
        if effect[0] == 13:
            raise KeyError("unlucky")

    def tick(self, now_s: float) -> Iterable[int]:
        self.ticks += 1
        if self.ticks == 3:
            self.busy = False
        return [100 + self.ticks]


async def test_an_event_that_an_effect_brings_about_waits_for_the_effects_before_it() -> None:
    turns = Turns()
    turns.pump.emit(1)
    assert turns.done == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


async def test_a_bug_stops_the_pump_for_good_and_is_told() -> None:
    turns = Turns()
    with pytest.raises(KeyError):
        turns.pump.emit(13)
    with pytest.raises(KeyError):
        await turns.pump.failure
    turns.pump.emit(1)
    assert turns.done == [(13, "a")]


async def test_time_passes_only_while_there_is_something_to_wait_for() -> None:
    turns = Turns()
    turns.pump.emit(5)
    assert turns.pump._timer is None
    turns.busy = True
    turns.pump.emit(5)
    async with asyncio.timeout(5):
        while turns.busy or turns.pump._timer is not None:
            await asyncio.sleep(0.001)
    assert [effect[0] for effect in turns.done[4::2]][:3] == [101, 102, 103]


def clockwork() -> Clockwork[str]:
    def waits(marker: str, limits: Limits) -> Iterator[Wait]:
        yield Wait(Silent(P0), marker, limits.silence_s)

    limits = TransferLimits(1 << 20, 1 << 10, silence_limit_s=2.0, heartbeat_s=0.5, lease_renewal_s=5.0)
    return Clockwork(limits, lambda: EngineProgress(7, True), waits)


def run(works: Clockwork[str], first_s: float, last_s: float, marker: str) -> list[tuple[float, object]]:
    ticks = [first_s + 0.25 * number for number in range(int((last_s - first_s) / 0.25) + 1)]
    return [(now_s, event) for now_s in ticks for event in works.tick(marker, now_s)]


def test_heartbeats_come_every_half_second_and_renew_leases_every_five() -> None:
    beats = [(now_s, event) for now_s, event in run(clockwork(), 100.0, 110.0, "m") if isinstance(event, Beat)]
    assert [now_s for now_s, _ in beats[:3]] == [100.0, 100.5, 101.0]
    assert [now_s for now_s, beat in beats if beat.renew] == [100.0, 105.0, 110.0]
    assert {(beat.engine_steps, beat.has_work) for _, beat in beats} == {(7, True)}


def test_no_progress_for_the_limit_is_told_once_for_each_limit() -> None:
    told = [now_s for now_s, event in run(clockwork(), 100.0, 104.5, "m") if isinstance(event, Silent)]
    assert told == [102.0, 104.0]


def test_a_node_that_was_stopped_itself_does_not_call_its_peers_silent() -> None:
    works = clockwork()
    run(works, 100.0, 101.0, "m")
    assert not any(isinstance(event, Silent) for event in works.tick("m", 150.0))
    told = [now_s for now_s, event in run(works, 150.25, 153.0, "m") if isinstance(event, Silent)]
    assert told == [151.0, 153.0], "one second before, and one after"


def test_after_a_stop_a_peer_is_called_silent_no_sooner_than_a_heartbeat_later() -> None:
    works = clockwork()
    run(works, 100.0, 101.75, "m")
    told = [now_s for now_s, event in run(works, 150.0, 151.0, "m") if isinstance(event, Silent)]
    assert told == [150.5]


def test_f02_a_node_that_is_stopped_again_and_again_gives_a_silent_peer_up_all_the_same() -> None:
    """Each stop gave the peer its whole limit once more, so a node that stuttered waited for ever."""
    works = clockwork()
    told = [run(works, 100.0 + 3 * turn, 101.0 + 3 * turn, "m") for turn in range(4)]
    assert [any(isinstance(event, Silent) for _, event in turn) for turn in told] == [False, True, False, True]


def test_faults_must_be_enabled_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert faults_of_process(enabled=False) == Faults()
    monkeypatch.setenv(VARIABLE, "hold_sends_from=3,flip_byte_of_parcel=1")
    assert faults_of_process(enabled=True) == Faults(hold_sends_from=3, flip_byte_of_parcel=1)
    with pytest.raises(ConfigurationError, match="--enable-test-faults"):
        faults_of_process(enabled=False)
    monkeypatch.setenv(VARIABLE, "hold_sends=3")
    with pytest.raises(ConfigurationError, match="hold_sends_from"):
        faults_of_process(enabled=True)


def test_no_fault_changes_nothing() -> None:
    message = np.arange(32, dtype=np.uint8)
    assert Faults().before_send("a", 0, message) is message
    assert (message == np.arange(32)).all()
    assert Faults().after_landed(0, 1)


@pytest.mark.parametrize(
    "leaving", [("a0 b0 a1 b1 a2 b2 a3 b3"), ("a0 a1 b0 a2 a3 b1 b2 b3"), ("a0 a1 a2 a3 b0 b1 b2 b3")]
)
def test_one_parcel_after_another_is_flipped_and_at_most_one_of_a_transfer(leaving: str) -> None:
    faults = Faults(flip_next_parcel_from=1)
    flipped = []
    for name in leaving.split():
        message = np.zeros(32, np.uint8)
        faults.before_send(name[0], int(name[1]), message)
        if message.any():
            flipped.append(name)
    assert [int(name[1]) for name in flipped] == list(range(1, 1 + len(flipped)))
    assert 1 <= len(flipped) == len({name[0] for name in flipped})
