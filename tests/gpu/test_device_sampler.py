"""Draws on the device equal the reference sampler's, and depend on nothing but their row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_sampler import ROWS, sampling_rows

from engine.kernels.draw import draw, filter_thresholds
from engine.sampling.noise import draw_keys
from engine.sampling.reference import Row
from engine.sampling.reference import draw as reference_draw
from engine.step import SamplingRows

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def draw_all(logits: torch.Tensor, rows: SamplingRows) -> tuple[list[int], torch.Tensor]:
    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(DEVICE)

    temperature = column(rows.temperature)
    thresholds = filter_thresholds(logits, temperature, column(rows.top_k), column(rows.top_p), column(rows.min_p))
    keys = column(draw_keys(rows.seed, rows.choice_index, rows.position).view(np.int64))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=DEVICE)
    best = torch.empty(len(logits), device=DEVICE)
    draw(logits, temperature, keys, thresholds, tokens, best)
    return tokens.tolist(), best


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1200, 49_152])
def test_draws_on_the_device_equal_the_slow_reference(dtype: torch.dtype, vocabulary: int) -> None:
    logits = (3 * torch.randn(len(ROWS), vocabulary, device=DEVICE)).to(dtype)
    for index, row in enumerate(ROWS):
        logits[index, list(row.banned)] = -math.inf
    drawn, best = draw_all(logits, sampling_rows(ROWS))
    assert torch.equal(best, logits.float().amax(1))
    for index, row in enumerate(ROWS):
        token, margin = reference_draw(logits[index].tolist(), row)
        assert drawn[index] == token or margin < 1e-6, f"{row}: {drawn[index]}, not {token} (margin {margin})"


def test_permuting_rows_or_drawing_alone_changes_no_draw_on_the_device() -> None:
    rng = np.random.default_rng(5)
    rows = [
        Row(
            temperature=float(rng.choice([0.0, 0.5, 1.0])),
            seed=int(rng.integers(1 << 62)),
            position=int(rng.integers(1 << 20)),
            top_k=int(rng.choice([0, 50])),
            top_p=float(rng.choice([1.0, 0.875])),
        )
        for _ in range(48)
    ]
    logits = (2 * torch.randn(len(rows), 128_256, device=DEVICE)).bfloat16()
    together, _ = draw_all(logits, sampling_rows(rows))
    order = rng.permutation(len(rows))
    permuted, _ = draw_all(logits[torch.from_numpy(order).to(DEVICE)], sampling_rows([rows[i] for i in order]))
    assert permuted == [together[i] for i in order]
    for index in range(0, len(rows), 7):
        alone, _ = draw_all(logits[index : index + 1], sampling_rows([rows[index]]))
        assert alone == [together[index]]


def test_a_batch_that_is_greedy_throughout_gets_the_first_of_the_greatest_logits() -> None:
    logits = torch.randint(-20, 20, (37, 128_256), device=DEVICE).bfloat16()
    tokens = torch.empty(37, dtype=torch.int64, device=DEVICE)
    best = torch.empty(37, device=DEVICE)
    zeros = torch.zeros(37, device=DEVICE)
    draw(logits, zeros, torch.zeros(37, dtype=torch.int64, device=DEVICE), None, tokens, best, drawn=False)
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert tokens.tolist() == first.tolist()
    assert torch.equal(best, logits.float().amax(1))


def test_an_unsound_row_is_recognised_on_the_device_and_its_neighbours_are_not() -> None:
    logits = torch.randn(4, 5000, device=DEVICE)
    logits[1, 4321], logits[2, 77] = math.nan, math.inf
    drawn, best = draw_all(logits, sampling_rows([Row(0.0)] * 4))
    assert best.isfinite().tolist() == [True, False, False, True]
    assert drawn[0] == int(logits[0].argmax())
