"""What the engine's loop asks of the runner on a device beyond steps: blocks of forks, odd limits, answers ahead of a step in
flight, and no more steps or rows than there is room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_model import BLOCK_SIZE, BLOCKS, VOCABULARY, build, decodes

from engine.build_device import DeviceEngineParts
from engine.executor.device_runner import DeviceRunner, LaunchedOnDevice
from engine.executor.runner import LAUNCHED_LIMIT
from engine.graphs.select import Choice, Mode, Reason
from engine.loop import Engine
from engine.port import (
    MOST_BANNED_TOKENS,
    EngineEvent,
    KvReserved,
    PrefillReserved,
    RequestKey,
    ReserveKv,
    SamplingParameters,
    Submit,
    TokenSampled,
)
from engine.port import Mode as RequestMode
from engine.step import LaunchedStep, StepPlan
from engine.trial_steps import trial_step_in_one_block

pytestmark = pytest.mark.gpu
STEPS_AT_MOST = 2000
HELD_BACK_CYCLES = 2_000_000_000
"""About a second of an H200: longer than any host needs for what is done meanwhile."""
CHOICES, ANSWER_TOKENS = 5, 20
PROMPT = tuple(int(token) for token in np.random.default_rng(11).integers(0, VOCABULARY - 1, 45))
"""Two whole blocks, and 12 positions of a third that every fork copies."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngineParts]:
    built = build(tmp_path_factory.mktemp("model"))
    yield built
    built.runner.close()


def engine_over(parts: DeviceEngineParts) -> Engine:
    config = replace(parts.config, enable_prefix_caching=False)
    return Engine(config, parts.runner, np.zeros(config.num_blocks, np.uint64))


def run(engine: Engine, requests: Sequence[Submit]) -> dict[RequestKey, list[TokenSampled]]:
    """Every request to its end."""
    drawn: dict[RequestKey, list[TokenSampled]] = {request.key: [] for request in requests}
    for request in requests:
        engine.take(request)
    for _ in range(STEPS_AT_MOST):
        for event in engine.step():
            assert isinstance(event, TokenSampled), event
            drawn[event.key].append(event)
        if not engine.status().has_work:
            return drawn
    raise AssertionError("the loop does not come to an end")


def choice(number: int, name: str, settled: tuple[int, ...] = (), fork_of: RequestKey | None = None) -> Submit:
    """Alone it ends with the first token that is not settled."""
    tokens = ANSWER_TOKENS if fork_of is not None or (not number and not settled) else len(settled) + 1
    sampling = SamplingParameters(seed=5, max_tokens=tokens, temperature=1.0, ignore_eos=True, logprobs=0)
    return Submit(RequestKey(name), PROMPT, sampling, settled=settled, choice_index=number, fork_of=fork_of)


def family(engine: Engine) -> list[list[TokenSampled]]:
    """Answers of choices that share their prompt's KV."""
    leader = choice(0, "0")
    forks = [choice(number, str(number), fork_of=leader.key) for number in range(1, CHOICES)]
    return list(run(engine, [leader, *forks]).values())


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of a family against those that their histories alone determine, computed without a shared block."""

    equal: float
    """Share of tokens."""
    apart: float
    """How far log probabilities of equal tokens differ on average."""


def compare(engine: Engine, answers: Sequence[Sequence[TokenSampled]]) -> Compared:
    """Each token is drawn once more behind exactly those before it, so that one that rounding turns does not turn the rest."""
    alone, expected = [], []
    for number, answer in enumerate(answers):
        tokens = tuple(event.token_id for event in answer)
        for index in range(1, len(tokens)):
            alone.append(choice(number, f"{number} {index}", settled=tokens[:index]))
            expected.append(answer[index])
    again = [drawn[0] for drawn in run(engine, alone).values()]
    assert [event.position for event in again] == [event.position for event in expected]
    pairs = [(one, two) for one, two in zip(expected, again, strict=True) if one.token_id == two.token_id]
    apart = [
        abs(one.logprob - two.logprob) for one, two in pairs if one.logprob is not None and two.logprob is not None
    ]
    assert len(apart) == len(pairs), "a token came without its log probability"
    return Compared(len(pairs) / len(expected), float(np.mean(apart)) if apart else float("inf"))


def test_choices_that_copy_blocks_draw_what_their_histories_alone_determine(
    parts: DeviceEngineParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy_blocks = parts.storage.copy_blocks

    def counted(copies: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        copied.append(len(copies))
        copy_blocks(copies)

    monkeypatch.setattr(parts.storage, "copy_blocks", counted)
    parts.storage.memory.zero_()
    answers = family(engine_over(parts))
    assert sum(copied) == CHOICES - 1
    assert [len(answer) for answer in answers] == [ANSWER_TOKENS] * CHOICES
    assert len({tuple(event.token_id for event in answer) for answer in answers}) == CHOICES
    for fork in answers[1:]:
        assert (fork[0].prompt_cached, fork[0].prompt_computed) == (len(PROMPT) - 1, 1)
    with_copies = compare(engine_over(parts), answers)
    assert with_copies.equal > 0.85, with_copies
    assert with_copies.apart < 0.05, with_copies


def test_the_same_comparison_fails_without_the_copies(
    parts: DeviceEngineParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is the copies that it sees: the forks' last prompt positions are zeros."""
    monkeypatch.setattr(parts.storage, "copy_blocks", lambda copies: None)
    parts.storage.memory.zero_()
    without = compare(engine_over(parts), family(engine_over(parts)))
    assert without.equal < 0.8 or without.apart > 0.1, without


ODD_LIMITS = [
    {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "num_blocks": 2},
    {"max_num_seqs": 1, "max_num_batched_tokens": 65, "max_model_len": 17, "num_blocks": 2},
    {"max_num_seqs": 3, "max_num_batched_tokens": 3, "max_model_len": 100, "num_blocks": 9},
    {"max_num_seqs": 7, "max_num_batched_tokens": 131, "max_model_len": 33, "num_blocks": 3},
    {"max_num_seqs": 25, "max_num_batched_tokens": 70, "max_model_len": 1024, "num_blocks": 5},
]


@pytest.mark.parametrize("limits", ODD_LIMITS, ids=lambda limits: "-".join(str(value) for value in limits.values()))
def test_an_engine_of_odd_limits_warms_up_and_runs_its_largest_steps(limits: dict[str, int], tmp_path: Path) -> None:
    parts = build(tmp_path, **limits)
    runner, rows = parts.runner, limits["max_num_seqs"]
    largest = runner.largest_step()
    assert largest.rows == rows
    assert len(runner.launch_as(largest, Choice(Mode.EAGER, largest.tokens, Reason.NONE)).result().token_ids) == rows
    assert len(runner._decoder._cos) > largest.positions.max(), "a trial step reads beyond the table of angles"
    engine = engine_over(parts)
    length = min(limits["max_model_len"], limits["num_blocks"] * BLOCK_SIZE) - 1
    sampling = SamplingParameters(seed=1, max_tokens=1, temperature=0.0, ignore_eos=True)
    longest = Submit(RequestKey("longest"), PROMPT[:1] * length, sampling)
    shortest = Submit(RequestKey("shortest"), PROMPT[:1], sampling)
    drawn = run(engine, [longest, shortest])
    assert [len(events) for events in drawn.values()] == [1, 1]
    engine.scheduler.check()
    runner.close()


def ended(launched: LaunchedStep) -> bool:
    assert isinstance(launched, LaunchedOnDevice)
    return bool(launched.slot.done.query())  # type: ignore[no-untyped-call]


def held_back(runner: DeviceRunner) -> None:
    """What is launched from here on begins in about a second."""
    with torch.cuda.stream(runner._stream):
        torch.cuda._sleep(HELD_BACK_CYCLES)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("mode", [RequestMode.AWAIT_KV, RequestMode.PREFILL_ONLY])
def test_blocks_are_answered_while_the_step_in_flight_still_runs(parts: DeviceEngineParts, mode: RequestMode) -> None:
    """Who asks for blocks hears of them before the device has finished the step that the loop then waits for."""
    engine = engine_over(parts)
    sampling = SamplingParameters(seed=1, max_tokens=100, temperature=0.0, ignore_eos=True)
    engine.take(Submit(RequestKey("running"), PROMPT, sampling))
    while not any(isinstance(event, TokenSampled) for event in engine.step()):
        assert engine.status().has_work
    held_back(parts.runner)
    engine.step()  # launches a step behind that, and settles the one before it
    key = RequestKey("asking")
    engine.take(Submit(key, PROMPT[::-1], sampling, mode))
    if mode is RequestMode.AWAIT_KV:
        engine.take(ReserveKv(key, len(PROMPT)))
    answers: list[tuple[EngineEvent, bool]] = []

    def answered(events: list[EngineEvent]) -> None:
        finished = ended(engine._in_flight[0].launched)
        answers.extend((event, finished) for event in events)

    later = engine.step(answered)
    wanted = KvReserved if mode is RequestMode.AWAIT_KV else PrefillReserved
    assert [(type(event), finished) for event, finished in answers] == [(wanted, False)]
    assert not any(isinstance(event, wanted) for event in later)
    assert any(isinstance(event, TokenSampled) for event in later)
    engine.fail_all("done")
    torch.cuda.synchronize()


def test_steps_ahead_are_bounded_and_results_asked_for_too_late_are_refused(parts: DeviceEngineParts) -> None:
    runner, rows = parts.runner, 20
    steps = LAUNCHED_LIMIT + 1
    serial = [
        runner.launch(decodes(step, step, rows, fed=step > 0)).result().token_ids.tolist() for step in range(steps)
    ]
    held_back(runner)
    launched: list[LaunchedOnDevice] = []
    first_ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for step in range(steps):
        assert not any(ended(one) for one in launched)
        launched.append(runner.launch(decodes(step, step, rows, fed=step > 0)))
        if step == 0:
            first_ended.record(runner._stream)
    first_has_ended = bool(first_ended.query())  # type: ignore[no-untyped-call]
    assert first_has_ended, "the last launch did not wait for the first step, whose memory it takes"
    assert launched[-1].slot is launched[0].slot
    with pytest.raises(AssertionError, match="too late"):
        launched[0].result()
    assert [one.result().token_ids.tolist() for one in launched[1:]] == serial[1:]


def one_more(runner: DeviceRunner, tokens: int, rows: int) -> StepPlan:
    counts = [1] * (rows - 1) + [tokens - rows + 1]
    return trial_step_in_one_block(0, counts, counts, BLOCKS, BLOCK_SIZE)


def test_a_step_beyond_the_limits_is_refused_and_harms_no_later_one(parts: DeviceEngineParts) -> None:
    runner = parts.runner
    rows, tokens = parts.config.max_num_seqs, parts.config.max_num_batched_tokens
    sound = decodes(0, 0, 20, fed=False)
    before = runner.launch(sound).result().token_ids.tolist()
    for plan in (one_more(runner, tokens + 1, 2), one_more(runner, rows + 1, rows + 1)):
        with pytest.raises(AssertionError, match=f"limit {tokens}|limit {rows}"):
            runner.launch_as(plan, Choice(Mode.EAGER, plan.tokens, Reason.NONE))
        assert runner.launch(sound).result().token_ids.tolist() == before


def test_the_largest_step_may_ban_as_many_tokens_in_each_row_as_a_request_can(parts: DeviceEngineParts) -> None:
    plan = parts.runner.largest_step()
    banned = tuple((row, token) for row in range(plan.rows) for token in range(MOST_BANNED_TOKENS))
    plan = replace(plan, sampling=replace(plan.sampling, banned=banned))
    result = parts.runner.launch_as(plan, Choice(Mode.EAGER, plan.tokens, Reason.NONE)).result()
    assert (result.token_ids >= MOST_BANNED_TOKENS).all()
