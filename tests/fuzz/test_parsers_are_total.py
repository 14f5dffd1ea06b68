"""A few thousand damaged inputs for every parser of foreign bytes; `make fuzz` tries as many as one has time for."""

from __future__ import annotations

import time

import pytest
from fuzz import fuzz
from parsers import Parser, parsers

INPUTS = 300
LIMIT_S = 3.0


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.name)
def test_f17_damaged_bytes_are_refused_by_name_or_read_as_something_else(parser: Parser) -> None:
    tried, findings = fuzz(parser, seed=1, inputs=INPUTS, until_s=time.monotonic() + LIMIT_S)
    assert tried
    assert not findings


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.name)
def test_the_bytes_that_are_damaged_are_good_ones(parser: Parser) -> None:
    assert all(parser.read(seed) for seed in parser.seeds)
