"""Compose files as Compose itself would read them: YAML merges resolved, `${NAME:-default}` replaced. Nothing is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
ONE_MACHINE = ROOT / "docker-compose.yml"
HOSTS = tuple(ROOT / "deploy" / "compose" / f"host-{role}.yml" for role in ("router", "prefill", "decode"))
COMPOSE_FILES = (ONE_MACHINE, *sorted((ROOT / "deploy" / "compose").glob("*.yml")))
GIVEN = {
    "ADDRESS": "192.0.2.1",
    "INTERFACE": "eth0",
    "REGISTRY": "redis://192.0.2.1:6379",
    "KEY_FILE": "/etc/decant/decant.key",
    "NODE_TARGET": "node-cpu",
    "TLS_FOLDER": "/etc/decant/tls",
}
"""What an operator must say for machines of their own."""

_VARIABLE = re.compile(r"\$(\$)|\$\{(?P<name>\w+)(?P<how>:-|:\?)?(?P<text>[^}]*)\}")


def interpolated(text: str, given: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1]:
            return "$"
        name, how = found["name"], found["how"]
        if given.get(name):
            return given[name]
        assert how != ":?", f"{name} is required"
        return found["text"] if how == ":-" else ""

    return _VARIABLE.sub(value, text)


def services(path: Path) -> dict[str, dict[str, Any]]:
    """The services of one file by name, with the values that `GIVEN` and the defaults lead to."""
    found: dict[str, dict[str, Any]] = _replaced(yaml.safe_load(path.read_text()))["services"]
    return found


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return interpolated(value, GIVEN)
    if isinstance(value, dict):
        return {key: _replaced(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    return value
