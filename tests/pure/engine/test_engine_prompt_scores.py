"""Log probabilities of prompts: equal to what the whole history says, in any chunks, beside any others, after any preemption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from test_model_families import write_folder

from engine.build import BuildOptions, EngineParts, build_engine
from engine.loop import Engine
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from engine.model.toy_kv import toy_logits
from engine.port import (
    Cancel,
    EngineEvent,
    PromptScored,
    RequestFailed,
    RequestKey,
    SamplingParameters,
    Submit,
    TokenSampled,
)
from engine.sampling import prompt_scores
from engine.sampling.prompt_scores import score

Row = tuple[float, int, tuple[tuple[int, float], ...]]
"""Log probability, rank, and the best tokens with theirs."""


class Scoring:
    """An engine, and what it has said of each request."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.engine = Engine(parts.config, parts.runner, parts.storage.owner_words)
        self.rows: dict[str, list[Row]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def submit(
        self, name: str, prompt: tuple[int, ...], best: int | None, fork_of: str | None = None, max_tokens: int = 6
    ) -> None:
        sampling = SamplingParameters(
            seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=best
        )
        source = RequestKey(fork_of) if fork_of is not None else None
        self.engine.take(Submit(RequestKey(name), prompt, sampling, fork_of=source))
        self.rows[name], self.tokens[name] = [], []

    def step(self) -> list[EngineEvent]:
        events = self.engine.step()
        self.engine.scheduler.check()
        for event in events:
            match event:
                case PromptScored():
                    self._scored(event)
                case TokenSampled():
                    self.tokens[event.key].append(event.token_id)
                    if event.prompt_cached is not None:
                        self.cached[event.key] = event.prompt_cached
        return events

    def rest(self) -> None:
        while self.step() or self.engine.status().has_work:
            pass

    def _scored(self, event: PromptScored) -> None:
        rows = self.rows[event.key]
        assert event.position == len(rows) + 1, "a position was left out or repeated"
        assert not self.tokens[event.key], "a token came before its prompt's scores"
        best = len(event.top_token_ids) // len(event.logprobs)
        tops = zip(event.top_token_ids, event.top_logprobs, strict=True)
        for logprob, rank in zip(event.logprobs, event.ranks, strict=True):
            rows.append((logprob, rank, tuple(next(tops) for _ in range(best))))


@contextmanager
def scoring(folder: Path, **changes: object) -> Iterator[Scoring]:
    options = {"model": folder, "num_blocks": 60, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    made = Scoring(build_engine(BuildOptions(**(options | changes))))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.engine.close()


def rows_of(logits: torch.Tensor, prompt: tuple[int, ...], best: int) -> list[Row]:
    """`logits` [len(prompt), vocabulary] of every position."""
    rows: list[Row] = []
    for position, token in enumerate(prompt[1:]):
        raw = torch.log_softmax(logits[position].float(), dim=-1)
        values, ids = raw.sort(descending=True, stable=True)
        tops = tuple(zip(ids[:best].tolist(), values[:best].tolist(), strict=True))
        rows.append((float(raw[token]), int((raw >= raw[token]).sum()), tops))
    return rows


def agree(got: list[Row], wanted: list[Row], tolerance: float) -> None:
    assert len(got) == len(wanted)
    for (logprob, rank, best), (wanted_logprob, wanted_rank, wanted_best) in zip(got, wanted, strict=True):
        assert logprob == pytest.approx(wanted_logprob, abs=tolerance)
        assert rank == wanted_rank
        assert [value for _, value in best] == pytest.approx([value for _, value in wanted_best], abs=tolerance)
        values = [value for _, value in wanted_best]
        if len({round(value / tolerance) for value in values}) == len(values):  # no two are as good as equal
            assert [token for token, _ in best] == [token for token, _ in wanted_best]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_folder(tmp_path / "toy")


def prompt(length: int, salt: int = 1) -> tuple[int, ...]:
    return tuple((salt * 31 + i * i) % 256 for i in range(length))


def oracle(parts: EngineParts, ids: tuple[int, ...], best: int) -> list[Row]:
    logits = [toy_logits(list(ids[: end + 1]), parts.layout, TOY_VOCABULARY_SIZE) for end in range(len(ids))]
    return rows_of(torch.from_numpy(np.stack(logits)), ids, best)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [6, 7, 24, 64])
def test_a_prompts_scores_are_those_of_its_whole_text_in_any_chunks_and_beside_any_others(
    folder: Path, budget: int, overlap: bool
) -> None:
    wanted = {"a": (41, 3), "b": (1, 2), "c": (2, 0), "d": (17, 20), "e": (9, None), "f": (33, 1)}
    with scoring(folder, max_num_batched_tokens=budget, overlap=overlap) as engine:
        for salt, (name, (length, best)) in enumerate(wanted.items()):
            engine.submit(name, prompt(length, salt), best)
        engine.rest()
        for salt, (name, (length, best)) in enumerate(wanted.items()):
            expected = [] if best is None else oracle(engine.parts, prompt(length, salt), best)
            agree(engine.rows[name], expected, 1e-5)
            assert len(engine.tokens[name]) == 6


def test_a_cached_prompt_is_computed_again_and_serves_the_next_from_the_cache(folder: Path) -> None:
    with scoring(folder) as engine:
        for name, best in (("before", None), ("scored", 2), ("after", None)):
            engine.submit(name, prompt(40), best)
            engine.rest()
        agree(engine.rows["scored"], oracle(engine.parts, prompt(40), 2), 1e-5)
        assert engine.tokens["scored"] == engine.tokens["before"] == engine.tokens["after"]
        assert (engine.cached["scored"], engine.cached["after"]) == (0, 36)


def test_a_choice_that_scores_its_prompt_shares_nobodys_kv(folder: Path) -> None:
    with scoring(folder) as engine:
        engine.submit("first", prompt(30), None)
        engine.submit("second", prompt(30), 1, fork_of="first")
        engine.rest()
        agree(engine.rows["second"], oracle(engine.parts, prompt(30), 1), 1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_preemption_computes_again_is_reported_once(folder: Path, overlap: bool) -> None:
    """Two streams grow into the blocks of a third request, which is in the middle of its prompt."""
    with scoring(folder, num_blocks=22, overlap=overlap, max_num_batched_tokens=8) as engine:
        for salt, name in enumerate(("s", "t")):
            engine.submit(name, prompt(3, salt), 1, max_tokens=40)
        while not engine.tokens["t"]:
            engine.step()
        engine.submit("late", prompt(61, 7), 2)
        while not engine.engine.status().preemptions:
            assert not engine.tokens["late"], "nobody had to give way"
            engine.step()
        assert 0 < len(engine.rows["late"]) < 60
        engine.rest()
        agree(engine.rows["late"], oracle(engine.parts, prompt(61, 7), 2), 1e-5)
        assert [len(engine.tokens[name]) for name in ("s", "t", "late")] == [40, 40, 6]


def test_a_request_that_is_cancelled_in_mid_prompt_says_nothing_more(folder: Path) -> None:
    with scoring(folder, overlap=True, max_num_batched_tokens=8) as engine:
        engine.submit("gone", prompt(60), 1)
        engine.submit("stays", prompt(20, 5), 1)
        while not engine.rows["gone"]:
            engine.step()
        told = len(engine.rows["gone"])
        engine.engine.take(Cancel(RequestKey("gone")))
        engine.rest()
        assert len(engine.rows["gone"]) == told < 59
        agree(engine.rows["stays"], oracle(engine.parts, prompt(20, 5), 1), 1e-5)


@pytest.mark.parametrize("budget", [16, 40, 200])
def test_scores_equal_those_of_transformers(tmp_path: Path, budget: int) -> None:
    reference, folder = write_folder(tmp_path / "model", "llama")
    ids = torch.randint(0, 331, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        wanted = rows_of(reference(torch.tensor([ids])).logits[0], tuple(ids), 5)
    with scoring(folder, max_num_batched_tokens=budget, num_blocks=128) as engine:
        engine.submit("scored", tuple(ids), 5)
        engine.submit("other", tuple(ids[3:80]), None)
        engine.rest()
        agree(engine.rows["scored"], wanted, 5e-4)


def test_an_engine_that_cannot_score_prompts_says_so(folder: Path) -> None:
    parts = build_engine(
        BuildOptions(model=folder, num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    )
    object.__setattr__(parts.config, "scores_prompts", False)
    engine = Engine(parts.config, parts.runner, parts.storage.owner_words)
    try:
        sampling = SamplingParameters(seed=0, max_tokens=2, prompt_logprobs=0)
        engine.take(Submit(RequestKey("r"), (1, 2, 3), sampling))
        assert engine.step() == [RequestFailed(RequestKey("r"), "prompt_logprobs_not_offered")]
    finally:
        engine.close()


def test_the_logits_of_a_long_chunk_are_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_ELEMENTS", 70)
    logits = torch.randn((25, 11), generator=torch.Generator().manual_seed(0))
    ids = torch.arange(25) % 11
    sizes = []

    def part(begin: int, end: int) -> torch.Tensor:
        sizes.append(end - begin)
        return logits[begin:end]

    scores = score(part, ids, 11, 4)
    assert sizes == [6, 6, 6, 6, 1]
    whole = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(scores.logprobs, whole[torch.arange(25), ids])
    torch.testing.assert_close(scores.top_logprobs, whole.topk(4).values)
    assert scores.sound
    logits[7, 3] = float("nan")
    assert not score(part, ids, 11, 4).sound
