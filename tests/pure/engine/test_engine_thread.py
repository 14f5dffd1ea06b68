"""The thread around the engine: it wakes, rests, ends and breaks as promised."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest
from engine_world import submit_of
from fake_runner import FakeRunner, FakeStep, next_token

from engine.config import EngineConfig
from engine.executor.runner import StepFailed
from engine.loop import Engine, EngineThread
from engine.port import (
    Cancel,
    EngineEvent,
    KvComputed,
    KvLayersComputed,
    KvReserved,
    Mode,
    PrefillReserved,
    RequestFailed,
    RequestKey,
    ReserveKv,
    TokenSampled,
)
from engine.step import StepPlan, StepResult

CONFIG = EngineConfig(4, 16, 4, 16, 64, overlap=True)
PROMPT = (1, 2, 3, 4, 5)
WAIT_S = 10.0


class GatedRunner(FakeRunner):
    """A fake runner whose steps end only while the gate is open, and which may break."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.broken = False

    def launch(self, plan: StepPlan) -> FakeStep:
        super().launch(plan)
        return GatedStep(self, plan.number)


class GatedStep(FakeStep):
    def result(self) -> StepResult:
        runner = self.runner
        assert isinstance(runner, GatedRunner)
        runner.reached.set()
        assert runner.gate.wait(WAIT_S)
        if runner.broken:
            raise RuntimeError("the device is gone")
        return super().result()


class LayeredRunner(GatedRunner):
    """A gated fake runner that tells of three of its four layer groups while the gate is closed, or breaks before."""

    breaks_after = 4

    def launch(self, plan: StepPlan) -> FakeStep:
        super().launch(plan)
        return LayeredStep(self, plan.number)


class LayeredStep(GatedStep):
    def layers_written(self) -> Iterator[int]:
        runner = self.runner
        assert isinstance(runner, LayeredRunner)
        if not runner.launched[self.number - 1].kv_leaves:
            return
        for group in range(1, 4):
            if group > runner.breaks_after:
                raise StepFailed("the device is gone")
            yield 8 * group


class Harness:
    def __init__(self, command_limit: int = 1024) -> None:
        self.runner = GatedRunner()
        self.events: queue.Queue[EngineEvent] = queue.Queue()
        self.reporters: set[str] = set()
        engine = Engine(CONFIG, self.runner, self.runner.owner_words)
        self.thread = EngineThread(engine, self._report, command_limit=command_limit)

    def _report(self, events: list[EngineEvent]) -> None:
        self.reporters.add(threading.current_thread().name)
        for event in events:
            self.events.put(event)

    def next(self) -> EngineEvent:
        return self.events.get(timeout=WAIT_S)

    def until(self, condition: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not getattr(self.thread.status, condition):
            assert time.monotonic() < deadline_s, f"status never had {condition}"
            time.sleep(0.001)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.runner.gate.set()
    assert made.thread.stop(WAIT_S)


def test_tokens_are_reported_on_the_engines_own_thread(harness: Harness) -> None:
    harness.thread.start()
    assert harness.thread.post(submit_of("r", PROMPT, max_tokens=3, ignore_eos=True))
    tokens = [harness.next() for _ in range(3)]
    assert [event.position for event in tokens if isinstance(event, TokenSampled)] == [5, 6, 7]
    assert isinstance(tokens[0], TokenSampled)
    assert tokens[0].token_id == next_token(PROMPT)
    assert harness.reporters == {"engine"}


def test_commands_posted_before_the_start_are_taken(harness: Harness) -> None:
    harness.thread.post(submit_of("r", PROMPT, max_tokens=1))
    harness.thread.start()
    assert harness.next().key == "r"


def test_who_asks_for_blocks_does_not_wait_for_the_step_in_flight() -> None:
    runner = GatedRunner()
    engine = Engine(CONFIG, runner, runner.owner_words)
    engine.take(submit_of("running", PROMPT, ignore_eos=True))
    engine.step()
    engine.take(submit_of("awaiting", PROMPT, mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(RequestKey("awaiting"), len(PROMPT)))
    runner.gate.clear()
    answers: list[EngineEvent] = []

    def answered(events: list[EngineEvent]) -> None:
        answers.extend(events)
        runner.gate.set()

    later = engine.step(answered)
    assert [type(event) for event in answers] == [KvReserved]
    assert [type(event) for event in later] == [TokenSampled]


def layered() -> tuple[Engine, LayeredRunner]:
    """An engine with a prefill node's request and another one in flight; its next step must wait for theirs."""
    runner = LayeredRunner()
    engine = Engine(CONFIG, runner, runner.owner_words)
    engine.take(submit_of("leaves", PROMPT, mode=Mode.PREFILL_ONLY))
    engine.take(submit_of("stays", PROMPT, max_tokens=1))
    engine.step()
    runner.gate.clear()
    return engine, runner


def test_layers_of_kv_that_leaves_are_told_while_their_step_still_runs() -> None:
    engine, runner = layered()
    told: list[list[EngineEvent]] = []

    def answered(events: list[EngineEvent]) -> None:
        assert not runner.reached.is_set()
        told.append(events)
        if len(told) == 3:
            runner.gate.set()

    later = engine.step(answered)
    leaves = RequestKey("leaves")
    assert told == [[KvLayersComputed(leaves, len(PROMPT), layers)] for layers in (8, 16, 24)]
    assert next(event for event in later if event.key == leaves) == KvComputed(leaves, len(PROMPT))


def test_layers_of_a_request_that_was_cancelled_meanwhile_are_not_told() -> None:
    engine, runner = layered()
    runner.gate.set()
    engine.take(Cancel(RequestKey("leaves")))
    told: list[EngineEvent] = []
    later = engine.step(told.extend)
    assert not told
    assert {event.key for event in later} == {RequestKey("stays")}


def test_layers_of_each_chunk_are_told_with_its_own_end() -> None:
    runner = LayeredRunner()
    engine = Engine(CONFIG, runner, runner.owner_words)
    engine.take(submit_of("leaves", tuple(range(20)), mode=Mode.PREFILL_ONLY))
    told: list[EngineEvent] = []
    while not told or not isinstance(told[-1], TokenSampled):
        told += engine.step(told.extend)
    ends = [event.computed_positions for event in told if isinstance(event, KvLayersComputed | KvComputed)]
    assert ends == [16] * 4 + [20] * 4


def test_a_step_without_kv_that_leaves_tells_of_no_layer() -> None:
    runner = LayeredRunner()
    engine = Engine(CONFIG, runner, runner.owner_words)
    engine.take(submit_of("stays", PROMPT, max_tokens=1))
    engine.step()
    assert not runner.launched[0].kv_leaves
    told: list[EngineEvent] = []
    assert [type(event) for event in engine.step(told.extend)] == [TokenSampled]
    assert not told


def test_a_step_that_fails_between_two_layer_groups_fails_every_request_after_what_was_told() -> None:
    runner, heard = LayeredRunner(), queue.Queue[EngineEvent]()
    runner.breaks_after = 1

    def report(events: list[EngineEvent]) -> None:
        for event in events:
            heard.put(event)

    thread = EngineThread(Engine(CONFIG, runner, runner.owner_words), report)
    thread.post(submit_of("leaves", PROMPT, mode=Mode.PREFILL_ONLY))
    thread.start()
    events = [heard.get(timeout=WAIT_S) for _ in range(3)]
    assert isinstance(events[0], PrefillReserved)
    leaves = RequestKey("leaves")
    assert events[1:] == [KvLayersComputed(leaves, len(PROMPT), 8), RequestFailed(leaves, "engine_error")]
    assert thread.stop(WAIT_S)


def test_an_idle_engine_uses_no_cpu(harness: Harness) -> None:
    harness.thread.start()
    harness.thread.post(submit_of("r", PROMPT, max_tokens=1))
    harness.next()

    def used_in_a_while() -> float:
        begun_s = time.process_time()
        time.sleep(0.3)
        return time.process_time() - begun_s

    used_s = [used_in_a_while()]
    while min(used_s) >= 0.1 and len(used_s) < 4:  # something else in this process was at work
        used_s.append(used_in_a_while())
    assert min(used_s) < 0.1
    assert not harness.thread.status.has_work


def test_f25_a_step_that_hangs_shows_as_work_that_does_not_advance(harness: Harness) -> None:
    harness.runner.gate.clear()
    harness.thread.start()
    harness.thread.post(submit_of("r", PROMPT))
    assert harness.runner.reached.wait(WAIT_S)
    status = harness.thread.status
    assert (status.has_work, status.steps) == (True, 0)


def test_submits_beyond_the_bound_are_refused_and_cancels_are_not() -> None:
    harness = Harness(command_limit=2)
    assert harness.thread.post(submit_of("a", PROMPT))
    assert harness.thread.post(submit_of("b", PROMPT))
    assert not harness.thread.post(submit_of("c", PROMPT))
    assert harness.thread.post(Cancel(RequestKey("a")))
    assert harness.thread.stop(WAIT_S)


def test_a_stopped_engine_takes_nothing_and_has_closed_its_runner(harness: Harness) -> None:
    harness.thread.start()
    harness.thread.post(submit_of("r", PROMPT, max_tokens=50, ignore_eos=True))
    harness.next()
    assert harness.thread.stop(WAIT_S)
    assert harness.runner.closed
    assert not harness.thread.post(submit_of("late", PROMPT))


def test_an_engine_that_was_never_started_closes_its_runner_when_stopped(harness: Harness) -> None:
    assert harness.thread.stop(WAIT_S)
    assert harness.runner.closed


def test_a_broken_engine_fails_every_request_says_why_and_takes_nothing_more(harness: Harness) -> None:
    harness.runner.gate.clear()
    harness.thread.start()
    harness.thread.post(submit_of("running", PROMPT))
    assert harness.runner.reached.wait(WAIT_S)
    harness.thread.post(submit_of("unread", PROMPT))
    harness.runner.broken = True
    harness.runner.gate.set()
    failed = {harness.next(), harness.next()}
    assert failed == {RequestFailed(RequestKey(name), "engine_error") for name in ("running", "unread")}
    harness.until("failed")
    assert harness.thread.status.failed == "RuntimeError: the device is gone"
    assert not harness.thread.post(submit_of("late", PROMPT))


def test_a_command_that_breaks_the_engine_still_fails_its_request(harness: Harness) -> None:
    harness.thread.post(submit_of("r", PROMPT))
    harness.thread.post(submit_of("r", PROMPT))  # a node's bug: the key is alive
    harness.thread.start()
    assert harness.next() == RequestFailed(RequestKey("r"), "engine_error")
    harness.until("failed")
    assert harness.events.empty()
