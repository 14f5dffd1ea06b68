"""One Docker engine and one set of images for all tests here. They take minutes: `make compose-test` asks for them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from compose_engine import Engine, why_not_possible
from compose_images import Built, build_all
from compose_project import tell
from compose_versions import compose_2, version_of

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


@pytest.fixture(scope="session")
def newer_compose() -> str | None:
    """Compose 2, or None where it cannot be had."""
    try:
        tool = compose_2()
        tell(f"Compose {version_of(tool)}")
        return tool
    except (OSError, subprocess.SubprocessError) as error:
        tell(f"no Compose 2: {error} {getattr(error, 'stderr', None) or ''}")
        return None
