"""What the compose files say of every service, and that Decant's processes understand what they are told."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_files import COMPOSE_FILES, HOSTS, ONE_MACHINE, ROOT, services
from compose_spec import PyCompose

from decant.processes import ALL_FIELDS
from foundation.config import Options
from foundation.option_sources import ALWAYS_KNOWN_VARIABLES, parse, variable_name
from node.options import DecodeOptions, PrefillOptions
from router.options import RouterOptions

OPTIONS: dict[str, type[Options]] = {"router": RouterOptions, "prefill": PrefillOptions, "decode": DecodeOptions}
STOP_MARGIN_S = 10.0

Service = dict[str, Any]


def named(found: Iterable[tuple[str, Service]]) -> dict[str, Any]:
    """For parametrize: one test a service."""
    pairs = list(found)
    return {"argnames": "service", "argvalues": [one for _, one in pairs], "ids": [name for name, _ in pairs]}


OURS = [
    (f"{path.name}:{name}", service)
    for path in (ONE_MACHINE, *HOSTS)
    for name, service in services(path).items()
    if str(service["image"]).startswith("decant/")
]
SERVING = [(name, service) for name, service in OURS if service.get("command", ["?"])[0] in OPTIONS]
ON_CPUS = [(name, service) for name, service in SERVING if "node-gpu" not in service["image"]]
"""A GPU node takes what its machine has."""


def of_service(service: dict[str, Any]) -> Any:
    """The options that its environment gives to its process. Raises ConfigurationError for what it does not understand."""
    role = service["command"][0]
    environment = {name: str(value) for name, value in service["environment"].items() if name.startswith("DECANT_")}
    return parse(OPTIONS[role], [], environment, program=role, description="", other_fields=ALL_FIELDS).options


@pytest.mark.parametrize(**named(OURS))
def test_nothing_runs_as_root_on_a_writable_root_or_may_gain_privileges(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert service.get("user", "10001") != "root"


@pytest.mark.parametrize(**named(OURS))
def test_a_process_that_dies_is_reaped(service: dict[str, Any]) -> None:
    assert service["init"] is True


def test_every_process_that_serves_is_among_them() -> None:
    commands = [service["command"][0] for _, service in SERVING]
    assert {command: commands.count(command) for command in OPTIONS} == {"router": 3, "prefill": 4, "decode": 4}


@pytest.mark.parametrize(**named(SERVING))
def test_what_a_process_is_told_are_options_that_it_has(service: dict[str, Any]) -> None:
    assert isinstance(of_service(service), Options)


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_no_variable_of_ours_is_misspelt(path: Path) -> None:
    known = {*map(variable_name, ALL_FIELDS), *ALWAYS_KNOWN_VARIABLES}
    given = {name for service in services(path).values() for name in service.get("environment", {})}
    assert {name for name in given if name.startswith("DECANT_")} <= known


@pytest.mark.parametrize(**named(SERVING))
def test_a_process_is_given_longer_to_stop_than_it_takes_to_drain(service: dict[str, Any]) -> None:
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= of_service(service).drain_grace_s + STOP_MARGIN_S


@pytest.mark.parametrize(**named(SERVING))
def test_the_health_check_asks_the_port_that_the_process_listens_on(service: dict[str, Any]) -> None:
    (url,) = [word for part in service["healthcheck"]["test"] for word in str(part).split() if "http://" in word]
    port = of_service(service).http_port
    shown = url.strip('"').replace("$DECANT_HTTP_PORT", str(port)).replace("$((7102", str(port))
    assert f":{port}" in shown


@pytest.mark.parametrize(**named(ON_CPUS))
def test_memory_and_processors_are_limited(service: dict[str, Any]) -> None:
    limits = service["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory"}


@pytest.mark.parametrize(**named(SERVING))
def test_a_node_says_which_lanes_and_which_interface_ucx_takes(service: dict[str, Any]) -> None:
    if service["command"][0] != "router":
        assert service["environment"]["UCX_TLS"]
        assert service["environment"]["UCX_NET_DEVICES"]


@pytest.mark.parametrize(**named(SERVING))
def test_the_model_and_the_keys_are_mounted_read_only_and_decode_nodes_get_no_key(service: dict[str, Any]) -> None:
    mounts = {volume.split(":")[1]: volume.split(":")[2] for volume in service["volumes"]}
    assert set(mounts.values()) == {"ro"}
    has_key = any(target.startswith("/etc/decant/keys") for target in mounts)
    assert has_key == (service["command"][0] != "decode")


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_1_29_reads_the_file_too(path: Path) -> None:
    """It refuses a top-level `name`; Compose 2 calls a `version` obsolete."""
    content = yaml.safe_load(path.read_text())
    assert set(content) - {key for key in content if key.startswith("x-")} <= {"services", "networks", "volumes"}


def test_nothing_is_published_beyond_this_machine_unless_somebody_says_so() -> None:
    published = [port for path in COMPOSE_FILES for one in services(path).values() for port in one.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published), published


def test_images_and_the_environment_hold_the_same_torch() -> None:
    makefile = (ROOT / "Makefile").read_text()
    version = next(line.split()[-1] for line in makefile.splitlines() if line.startswith("TORCH_VERSION :="))
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert dockerfile.count(f"ARG TORCH_VERSION={version}\n") == dockerfile.count("ARG TORCH_VERSION") == 2


def test_what_is_built_into_images_reaches_the_builder() -> None:
    """.dockerignore lists what may; each COPY of the Dockerfile must find its file there."""
    allowed = {line[1:].strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                found = source in (".", "${UCX_ARCHIVE}") or any(Path(source).match(pattern) for pattern in allowed)
                assert found, f"{source} is kept from the builder"


def test_every_room_reaches_the_builder() -> None:
    allowed = {line[1:].strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {room.removesuffix("*") for room in found} <= allowed


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_2_reads_the_file(path: Path) -> None:
    """By the Compose specification; merges and variables are resolved first, as Compose does."""
    content = {"services": services(path)} | {
        key: value for key, value in yaml.safe_load(path.read_text()).items() if key in ("networks", "volumes")
    }
    assert set(PyCompose.from_yaml(yaml.safe_dump(content)).service_names()) == set(content["services"])


def test_the_specification_refuses_what_is_no_key() -> None:
    with pytest.raises(ValueError, match="portz"):
        PyCompose.from_yaml("services: {a: {image: x, portz: [1]}}")
