"""One deployment of the real model for all service tests that need it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

from deployment import Deployment


@pytest.fixture(scope="session")
def deployment(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployed = Deployment(tmp_path_factory.mktemp("deployment"), default_model)
    try:
        yield deployed
    finally:
        deployed.end()
