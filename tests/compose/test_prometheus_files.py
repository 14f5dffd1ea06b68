"""Prometheus itself reads the configuration and the alert rules."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from compose_images import CACHE, ROOT

pytestmark = pytest.mark.docker

PROMETHEUS = ROOT / "deploy" / "prometheus"


@pytest.fixture
def promtool() -> str:
    """Of the machine, or taken out of Debian's package, which is not installed: it would start a server."""
    if (found := shutil.which("promtool")) is not None:
        return found
    tool = CACHE / "prometheus" / "usr" / "bin" / "promtool"
    if not tool.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=CACHE, check=True, timeout=300)
        (package,) = CACHE.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(CACHE / "prometheus")], check=True, timeout=120)
        package.unlink()
    return str(tool)


@pytest.mark.parametrize(("what", "file"), [("config", "prometheus.yml"), ("rules", "rules/decant.yml")])
def test_promtool_finds_nothing_wrong(promtool: str, what: str, file: str) -> None:
    done = subprocess.run([promtool, "check", what, str(PROMETHEUS / file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
