"""Bias and penalties: against a slow reference, in overlapped steps, after a hand-over, in answers that go on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.build import BuildOptions, build_engine
from engine.loop import Engine
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from engine.model.toy_kv import toy_logits
from engine.port import Mode, RequestKey, SamplingParameters, StartFromKv, Submit, TokenSampled
from engine.sampling.adjust import adjust
from engine.sampling.reference import Row, adjusted, draw
from engine.step import Adjustments
from foundation.kv_layout import KvLayout

VOCABULARY = 50
BLOCKED = -1e4
ROWS = [
    Row(0.0),
    Row(0.0, bias=((3, 2.5), (7, -100.0))),
    Row(0.0, repetition=1.5, prompt=(1, 2, 2, 9), answer=(9, 4)),
    Row(0.0, presence=0.75, frequency=0.5, prompt=(1, 5), answer=(6, 6, 6, 8)),
    Row(0.0, repetition=0.5, presence=-1.0, frequency=-0.25, bias=((6, 1.0),), prompt=(6,), answer=(6, 0, 49)),
    Row(0.0, repetition=2.0, prompt=(11, 12)),
]


def adjustments_of(rows: Sequence[Row], fed: Sequence[int]) -> Adjustments:
    """`fed`: rows whose last token of the answer the host does not know; it stands at the row's index in the last samples."""
    penalized = [index for index, row in enumerate(rows) if row.prompt or row.answer]
    known = [(*row.prompt, *(row.answer[:-1] if index in fed else row.answer)) for index, row in enumerate(rows)]
    return Adjustments(
        bias_rows=np.array([index for index, row in enumerate(rows) for _ in row.bias], np.int64),
        bias_tokens=np.array([token for row in rows for token, _ in row.bias], np.int64),
        bias_values=np.array([value for row in rows for _, value in row.bias], np.float32),
        rows=np.array(penalized, np.int64),
        repetition=np.array([rows[index].repetition for index in penalized], np.float32),
        presence=np.array([rows[index].presence for index in penalized], np.float32),
        frequency=np.array([rows[index].frequency for index in penalized], np.float32),
        feedback=np.array([index if index in fed else -1 for index in penalized], np.int32),
        history=np.array([token for index in penalized for token in known[index]], np.int64),
        history_of=np.repeat(np.arange(len(penalized)), [len(known[index]) for index in penalized]),
        generated=np.array(
            [place >= len(rows[index].prompt) for index in penalized for place in range(len(known[index]))], np.bool_
        ),
    )


@pytest.mark.parametrize("fed", [(), (2, 3), (2, 3, 4)])
def test_logits_change_as_the_definitions_say(fed: tuple[int, ...]) -> None:
    logits = 3 * torch.randn(len(ROWS), VOCABULARY, generator=torch.Generator().manual_seed(1))
    changed = logits.clone()
    samples = torch.tensor([row.answer[-1] if row.answer else 0 for row in ROWS])
    adjust(changed, adjustments_of(ROWS, fed), samples)
    for index, row in enumerate(ROWS):
        torch.testing.assert_close(changed[index], torch.tensor(adjusted(logits[index].tolist(), row)))


def test_a_banned_token_stays_banned_whatever_is_added_to_it() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 4] = float("-inf")
    adjust(logits, adjustments_of([Row(0.0, bias=((4, 100.0),), repetition=2.0, prompt=(4,), answer=(4,))], ()), None)
    assert logits[0, 4] == float("-inf")


PENALTIES = {
    "repetition": SamplingParameters(seed=1, max_tokens=24, temperature=0.0, repetition_penalty=1.25),
    "counts": SamplingParameters(seed=1, max_tokens=24, temperature=0.0, presence_penalty=0.5, frequency_penalty=1.5),
    "bias": SamplingParameters(seed=1, max_tokens=24, temperature=0.0, logit_bias=((7, 50.0), (9, BLOCKED))),
    "all": SamplingParameters(
        seed=2**40 + 1,
        max_tokens=24,
        temperature=0.75,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.75,
        logit_bias=((7, 3.0), (30, 3.0)),
    ),
}


def oracle(prompt: tuple[int, ...], sampling: SamplingParameters, layout: KvLayout) -> list[int]:
    """The slow reference over the toy model's own logits."""
    answer: list[int] = []
    for _ in range(sampling.max_tokens):
        row = Row(
            sampling.temperature,
            sampling.seed,
            position=len(prompt) + len(answer),
            bias=sampling.logit_bias,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            prompt=prompt,
            answer=tuple(answer),
        )
        token, margin = draw(toy_logits((*prompt, *answer), layout, TOY_VOCABULARY_SIZE).tolist(), row)
        assert margin > 1e-5, "a near-tie proves nothing"
        answer.append(token)
    return answer


class Toy:
    def __init__(self, folder: Path, *, overlap: bool) -> None:
        options = BuildOptions(
            model=write_toy_folder(folder / "toy"),
            num_blocks=64,
            block_size=4,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            overlap=overlap,
        )
        self.parts = build_engine(options)
        self.engine = Engine(self.parts.config, self.parts.runner, self.parts.storage.owner_words)
        self.tokens: dict[str, list[int]] = {}

    def rest(self) -> None:
        while True:
            for event in self.engine.step():
                if isinstance(event, TokenSampled):
                    self.tokens.setdefault(event.key, []).append(event.token_id)
            if not self.engine.status().has_work:
                return


def prompt_of(name: str) -> tuple[int, ...]:
    return tuple((17 * index + len(name)) % 200 for index in range(11))


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_with_penalties_beside_others_equal_the_slow_reference(tmp_path: Path, overlap: bool) -> None:
    toy = Toy(tmp_path, overlap=overlap)
    plain = SamplingParameters(seed=0, max_tokens=20, temperature=0.0, ignore_eos=True)
    wanted = {**PENALTIES, "plain": plain}
    for name, sampling in wanted.items():
        toy.engine.take(Submit(RequestKey(name), prompt_of(name), replace(sampling, ignore_eos=True)))
    toy.rest()
    for name, sampling in wanted.items():
        assert toy.tokens[name] == oracle(prompt_of(name), sampling, toy.parts.layout), name
    assert len({tuple(tokens) for tokens in toy.tokens.values()}) == len(wanted)


@pytest.mark.parametrize("settled", [1, 9, 23])
def test_an_answer_that_goes_on_elsewhere_counts_what_was_said_before(tmp_path: Path, settled: int) -> None:
    toy = Toy(tmp_path, overlap=True)
    for name, sampling in PENALTIES.items():
        answer = oracle(prompt_of(name), sampling, toy.parts.layout)
        key = RequestKey(name)
        asked = replace(sampling, ignore_eos=True)
        toy.engine.take(Submit(key, prompt_of(name), asked, settled=tuple(answer[:settled])))
        toy.rest()
        assert toy.tokens[name] == answer[settled:], name


def test_a_first_token_that_a_prefill_node_drew_is_counted(tmp_path: Path) -> None:
    toy = Toy(tmp_path, overlap=True)
    for name, sampling in PENALTIES.items():
        answer = oracle(prompt_of(name), sampling, toy.parts.layout)
        asked = replace(sampling, ignore_eos=True)
        toy.engine.take(Submit(RequestKey(f"p {name}"), prompt_of(name), asked, Mode.PREFILL_ONLY))
        toy.engine.take(Submit(RequestKey(f"d {name}"), prompt_of(name), asked, Mode.AWAIT_KV))
        toy.rest()
        assert toy.tokens[f"p {name}"] == answer[:1], name
        toy.engine.take(StartFromKv(RequestKey(f"d {name}"), 0, first_token=answer[0]))
        toy.rest()
        assert toy.tokens[f"d {name}"] == answer[1:], name
