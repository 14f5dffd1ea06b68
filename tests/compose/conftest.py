"""One Docker engine and one set of images for all tests here. They take minutes: `make compose-test` asks for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from compose_engine import Engine, why_not_possible
from compose_images import Built, build_all

ASKED = "DECANT_COMPOSE_TESTS"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(ASKED):
        return
    for item in items:
        if item.get_closest_marker("docker") is not None:
            item.add_marker(pytest.mark.skip(reason="make compose-test runs it"))


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if (missing := why_not_possible()) is not None:
        pytest.fail(f"no Docker engine can be started here: {missing}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started ends in order
    with Engine() as started:
        yield started
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def built(engine: Engine) -> Built:
    """Every image that the tests use."""
    return build_all(engine)
