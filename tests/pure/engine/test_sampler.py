"""Batched draws against the slow reference, and what a draw may depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch

from engine.sampling.noise import draw_keys, gumbel_noise
from engine.sampling.reference import Row, draw, kept_tokens, noise
from engine.sampling.sampler import keep_likely, sample
from engine.step import SamplingRows

VOCABULARY = 1200


def sampling_rows(rows: Sequence[Row], logprobs: Sequence[int] | None = None) -> SamplingRows:
    return SamplingRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        min_p=np.array([row.min_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64),
        choice_index=np.array([row.choice_index for row in rows], np.int32),
        position=np.array([row.position for row in rows], np.int64),
        logprobs=np.array(logprobs if logprobs is not None else [-1] * len(rows), np.int32),
        banned=tuple((index, token) for index, row in enumerate(rows) for token in row.banned),
    )


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


# Values that float32 holds exactly, so that both sides read the same parameters.
ROWS = [
    Row(0.0),
    Row(1.0, seed=1, position=5),
    Row(0.5, seed=2**63 + 11, position=77, choice_index=3),
    Row(1.0, seed=3, top_k=1),
    Row(1.5, seed=4, top_k=40, position=9),
    Row(1.0, seed=5, top_p=0.5),
    Row(2.0, seed=6, top_p=0.875, top_k=100),
    Row(1.0, seed=7, min_p=0.125),
    Row(4.0, seed=8, min_p=0.0625, top_p=0.75, top_k=7),
    Row(0.0, banned=(1, 2, 3)),
    Row(1.0, seed=9, top_k=3, banned=tuple(range(600))),
    Row(8.0, seed=10, top_p=0.984375),
]


@pytest.mark.parametrize("case", range(6))
def test_draws_equal_the_slow_reference(case: int) -> None:
    logits = random_logits(len(ROWS), case)
    drawn = sample(logits.clone(), sampling_rows(ROWS)).token_ids
    for index, row in enumerate(ROWS):
        token, margin = draw(logits[index].tolist(), row)
        assert int(drawn[index]) == token or margin < 1e-9, f"{row}: {int(drawn[index])}, not {token} (margin {margin})"


def test_the_noise_of_one_token_equals_the_written_algorithm() -> None:
    keys = draw_keys(np.array([5, 2**64 - 1], np.uint64), np.array([0, 7], np.int32), np.array([0, 10**12], np.int64))
    ours = gumbel_noise(torch.from_numpy(keys.view(np.int64))[:, None], torch.tensor([0, 1, 49151]))
    for row, (seed, choice, position) in enumerate(((5, 0, 0), (2**64 - 1, 7, 10**12))):
        for column, token in enumerate((0, 1, 49151)):
            assert ours[row, column].item() == pytest.approx(noise(seed, choice, position, token), rel=1e-12, abs=1e-12)


def test_permuting_rows_or_drawing_alone_changes_no_draw() -> None:
    logits = random_logits(len(ROWS), 99)
    together = sample(logits.clone(), sampling_rows(ROWS)).token_ids
    order = np.random.default_rng(0).permutation(len(ROWS))
    permuted = sample(logits[order].clone(), sampling_rows([ROWS[i] for i in order])).token_ids
    assert permuted.tolist() == together[order].tolist()
    for index, row in enumerate(ROWS):
        alone = sample(logits[index : index + 1].clone(), sampling_rows([row])).token_ids
        assert alone.tolist() == [int(together[index])]


@pytest.mark.parametrize("field", ["seed", "choice_index", "position"])
def test_each_part_of_the_key_changes_the_noise(field: str) -> None:
    base = {"seed": 3, "choice_index": 0, "position": 11}
    assert field in {f.name for f in fields(Row)}
    assert noise(**base, token_id=4) != noise(**(base | {field: base[field] + 1}), token_id=4)


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 20,000 draws from 8 tokens, each at its own position; 7 degrees of freedom, 0.1 % bound 24.3."""
    draws = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.25])
    rows = sampling_rows([Row(1.0, seed=42, position=position) for position in range(draws)])
    counts = torch.bincount(sample(logits.repeat(draws, 1), rows).token_ids, minlength=8).double()
    expected = logits.double().softmax(0) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


def test_filters_keep_the_tokens_that_the_definition_keeps_ties_included() -> None:
    logits = torch.tensor([[2.0, 2.0, 1.0, 1.0, 1.0, 0.0, -1.0, -5.0]]).double()
    for row in (
        Row(1.0, top_k=1),
        Row(1.0, top_k=3),
        Row(1.0, top_p=0.25),
        Row(1.0, top_p=0.75),
        Row(1.0, min_p=0.25),
        Row(1.0, top_k=6, top_p=0.875, min_p=0.125),
    ):
        parameters = [
            np.array([value], dtype)
            for value, dtype in ((row.min_p, np.float32), (row.top_k, np.int32), (row.top_p, np.float32))
        ]
        kept = (keep_likely(logits.clone(), *parameters)[0] > -math.inf).nonzero()[:, 0].tolist()  # type: ignore[arg-type]
        assert kept == kept_tokens(logits[0].tolist(), row), row


def test_a_flat_distribution_needs_the_whole_sort_and_is_cut_right() -> None:
    logits = torch.linspace(0, 0.001, VOCABULARY).repeat(2, 1).double()
    kept = keep_likely(logits, np.zeros(2, np.float32), np.zeros(2, np.int32), np.array([0.75, 0.25], np.float32))
    counts = (kept > -math.inf).sum(dim=1)
    assert counts.tolist() == [pytest.approx(0.75 * VOCABULARY, abs=2), pytest.approx(0.25 * VOCABULARY, abs=2)]


def test_logprobs_are_of_the_raw_distribution_and_only_where_wanted() -> None:
    logits = random_logits(4, 5)
    raw = logits.double().log_softmax(-1)
    rows = [Row(0.0), Row(0.5, seed=1, top_k=2), Row(1.0, seed=2), Row(0.0, banned=(int(logits[3].argmax()),))]
    sampled = sample(logits.clone(), sampling_rows(rows, logprobs=[-1, 0, 3, 2]))
    assert sampled.logprobs is not None
    assert sampled.top_token_ids is not None
    assert sampled.top_logprobs is not None
    assert sampled.logprobs[0].isnan()
    for row in (1, 2, 3):
        assert float(sampled.logprobs[row]) == pytest.approx(float(raw[row, sampled.token_ids[row]]), abs=1e-5)
    best = raw[2].topk(3)
    assert sampled.top_token_ids[2].tolist() == best.indices.tolist()
    torch.testing.assert_close(sampled.top_logprobs[2].double(), best.values, atol=1e-5, rtol=0)
    assert int(sampled.token_ids[3]) != int(logits[3].argmax())
    assert float(sampled.top_logprobs[3, 0]) == pytest.approx(float(raw[3].max()), abs=1e-5)


def test_a_greedy_batch_returns_the_first_of_equal_logits_and_no_logprobs() -> None:
    logits = torch.zeros(2, 50)
    logits[1, 20:30] = 1
    sampled = sample(logits, sampling_rows([Row(0.0), Row(0.0)]))
    assert sampled.token_ids.tolist() == [0, 20]
    assert sampled.logprobs is None


def test_a_row_with_a_nan_is_recognised() -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = math.nan
    assert sample(logits, sampling_rows([Row(0.0), Row(0.0)])).best_logits.isfinite().tolist() == [True, False]
