"""Linears: all forms are the same product, and the choice follows the measurements within its budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.model.layers import (
    COLUMNS,
    LEFT,
    MEASURED_ROWS,
    PACKED,
    ROWS,
    Linear,
    available_forms,
    best_forms,
    choose_forms,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_every_form_gives_the_same_product_at_every_batch_size(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 33, generator=generator)
    bias = torch.randn(48, generator=generator) if biased else None
    for form in available_forms(torch.float32, CPU):
        linear = Linear(weight, bias)
        linear.use([form] * len(MEASURED_ROWS))
        for rows in (1, 2, 3, 5, 16, 64, 200):
            x = torch.randn(rows, 33, generator=generator)
            got = linear(x)
            assert got.is_contiguous()
            torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_each_batch_size_uses_the_form_of_the_next_measured_size() -> None:
    linear = Linear(torch.eye(4))
    used: list[int] = []

    def recorded(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            used.append(size)
            return x

        return product

    linear._products = [recorded(size) for size in MEASURED_ROWS]
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 5000):
        linear(torch.zeros(rows, 4))
    assert used == [1, 2, 4, 4, 8, 8, 16, 16, 32, 64, 64, 64, 64]


def test_a_second_store_is_taken_only_if_allowed_and_if_it_gains() -> None:
    seconds = {ROWS: [3.0, 3.0], LEFT: [9.0, 9.0], COLUMNS: [1.0, 4.0], PACKED: [2.0, 1.0]}
    assert best_forms(seconds, stores_limit=2) == [COLUMNS, PACKED]
    assert best_forms(seconds, stores_limit=1) == [PACKED, PACKED]
    nearly_alike = {ROWS: [1.01, 1.01], LEFT: [9.0, 9.0], COLUMNS: [1.0, 4.0], PACKED: [1.0, 1.01]}
    assert best_forms(nearly_alike, stores_limit=2) == [PACKED, PACKED]


@torch.inference_mode()
def test_choosing_keeps_within_the_copy_budget_and_changes_no_product() -> None:
    weights = [torch.randn(64, 32) for _ in range(3)] + [torch.randn(32, 64)]
    for budget in (0, 1 << 20):
        linears = [Linear(weight) for weight in weights]
        report = choose_forms(linears, budget, torch.float32, CPU)
        assert len(report) == 2
        if budget == 0:
            stores = {"oneDNN packed": 0, "x (W^T)": 1, "x W^T": 2, "(W x^T)^T": 2}
            for line in report:
                assert len({store for name, store in stores.items() if f": {name}" in line}) == 1
        for linear, weight in zip(linears, weights, strict=True):
            for rows in (1, 3, 70):
                x = torch.randn(rows, weight.shape[1])
                torch.testing.assert_close(linear(x), x @ weight.t(), rtol=1e-4, atol=1e-4)
