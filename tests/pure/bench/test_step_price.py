"""The price of landing is what a step takes beyond what its own batch asks for."""

from __future__ import annotations

import pytest

from bench.serving.step_price import Phase, Step, prices

STREAMS, LANDED = 10, 1000
A_TOKEN_S = 1e-6


def steps(running: list[int], slower: list[float]) -> list[Step]:
    """Every stream gets a token each step; the others hold LANDED each. `slower`: factors."""
    return [
        Step(float(index), (0.01 + A_TOKEN_S * (STREAMS * index + LANDED * (now - STREAMS))) * factor, now)
        for index, (now, factor) in enumerate(zip(running, slower, strict=True))
    ]


def test_a_larger_batch_and_longer_contexts_are_no_price() -> None:
    ran = steps([STREAMS] * 100 + [STREAMS + 3] * 100 + [STREAMS] * 100, [1.0] * 300)
    found = prices(ran, [Phase(0, 99), Phase(200, 299)], {"landing": Phase(100, 199)}, STREAMS, LANDED)
    assert found["landing"] == pytest.approx({"p50": 0.0, "p99": 0.0}, abs=1e-9)


def test_what_every_step_takes_more_and_what_few_take_more_are_told_apart() -> None:
    slower = [1.05] * 96 + [1.5] * 4
    ran = steps([STREAMS] * 100 + [STREAMS + 1] * 100 + [STREAMS] * 100, [1.0] * 100 + slower + [1.0] * 100)
    found = prices(ran, [Phase(0, 99), Phase(200, 299)], {"landing": Phase(100, 199)}, STREAMS, LANDED)
    assert found["landing"] == pytest.approx({"p50": 0.05, "p99": 0.5}, abs=1e-3)
