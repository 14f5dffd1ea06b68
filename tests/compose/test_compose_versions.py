"""Compose 1.29 and Compose 2 both read all that docs/deployment.md tells an operator to start, and understand the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from compose_files import GIVEN
from compose_images import ROOT
from compose_project import tell
from compose_versions import COMPOSE_1, version_of

pytestmark = pytest.mark.docker

ONE = "docker-compose.yml"
ROUTER, PREFILL, DECODE, GPU, RDMA, ROUTER_TLS, NODE_TLS = (
    f"deploy/compose/host-{name}.yml"
    for name in ("router", "prefill", "decode", "gpu", "rdma", "router-tls", "node-tls")
)
TLS, CLIENTS, OBSERVABILITY = (f"deploy/compose/{name}.yml" for name in ("tls", "tls-clients", "observability"))
SETUPS = {
    "cpu": ("cpu,two-routers", (ONE,)),
    "gpu": ("gpu", (ONE,)),
    "observability": ("cpu", (ONE, OBSERVABILITY)),
    "tls": ("cpu,two-routers", (ONE, TLS)),
    "tls-clients": ("cpu,two-routers", (ONE, TLS, CLIENTS)),
    "tls-gpu": ("gpu", (ONE, TLS)),
    "tests": ("cpu,two-routers", (ONE, *(f"tests/compose/{name}.yml" for name in ("small", "faults", "clocks")))),
    "host-router": ("", (ROUTER,)),
    "host-prefill": ("", (PREFILL,)),
    "host-decode": ("", (DECODE,)),
    "host-prefill-gpu": ("", (PREFILL, GPU)),
    "host-router-tls": ("", (ROUTER, ROUTER_TLS)),
    "host-prefill-tls": ("", (PREFILL, NODE_TLS)),
    "host-decode-tls": ("", (DECODE, NODE_TLS)),
    "host-decode-rdma": ("", (DECODE, GPU, RDMA)),
}
"""Profiles and files."""


@pytest.fixture(scope="session")
def compose_1() -> str:
    if shutil.which(COMPOSE_1) is None or not (version := version_of(COMPOSE_1)).startswith("1.29."):
        pytest.skip("docker-compose 1.29 is not installed here")
    tell(f"Compose {version}")
    return COMPOSE_1


@pytest.fixture(scope="session")
def compose_2(newer_compose: str | None) -> str:
    if newer_compose is None:
        pytest.skip("Debian's package of Compose 2 cannot be had here")
    return newer_compose


def config(tool: str, setup: str, given: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    profiles, files = SETUPS[setup]
    command = [tool, "-p", "decant", *(part for file in files for part in ("-f", str(ROOT / file))), "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | given
    environment |= {"COMPOSE_PROFILES": profiles} if profiles else {}
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("setup", SETUPS)
def test_both_versions_accept_the_files_without_a_warning_and_start_the_same(
    setup: str, compose_1: str, compose_2: str
) -> None:
    understood = []
    for tool in (compose_1, compose_2):
        done = config(tool, setup, GIVEN | {"CLOCKS": "/srv/clocks"})
        assert (done.returncode, done.stderr) == (0, ""), f"{tool}: {done.stderr}"
        understood.append({name: essence(one) for name, one in yaml.safe_load(done.stdout)["services"].items()})
    by_1, by_2 = understood
    assert by_2
    assert {name: by_1.get(name) for name in by_2} == by_2, (
        "1.29 also shows services of other profiles, and else the same"
    )


def essence(service: dict[str, Any]) -> dict[str, Any]:
    """What is started, where two versions write it down in two ways."""
    return {
        "image": service["image"],
        "command": service.get("command"),
        "environment": {name: str(value) for name, value in service.get("environment", {}).items()},
        "mounts": dict(mount(volume) for volume in service.get("volumes", [])),
        "healthy when": service.get("healthcheck", {}).get("test"),
    }


def mount(volume: str | dict[str, Any]) -> tuple[str, bool]:
    """Where, and whether read-only."""
    if isinstance(volume, dict):
        return volume["target"], volume.get("read_only", False)
    _, target, *mode = volume.split(":")
    return target, mode == ["ro"]


def test_both_versions_say_which_variable_is_missing(compose_1: str, compose_2: str) -> None:
    given = {name: value for name, value in GIVEN.items() if name != "TLS_FOLDER"}
    for tool in (compose_1, compose_2):
        done = config(tool, "tls", given, "--quiet")
        assert done.returncode != 0
        assert "TLS_FOLDER" in done.stderr
