"""Prometheus itself reads the configuration and the alert rules, and alerts on what has been and is no more."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from compose_images import ROOT
from compose_prometheus import program

pytestmark = pytest.mark.docker

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules" / "decant.yml"


@pytest.fixture
def promtool() -> str:
    return shutil.which("promtool") or str(program("promtool"))


@pytest.mark.parametrize(("what", "file"), [("config", "prometheus.yml"), ("rules", "rules/decant.yml")])
def test_promtool_finds_nothing_wrong(promtool: str, what: str, file: str) -> None:
    done = subprocess.run([promtool, "check", what, str(PROMETHEUS / file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@pytest.mark.parametrize(
    ("processes", "missing_at"),
    [
        pytest.param({"a": "1x90", "b": "1x90"}, {}, id="two all the time"),
        pytest.param({"a": "1x90", "b": "1x60 stale"}, {61: False, 63: True, 80: True}, id="one gone for good"),
        pytest.param({"a": "1x60 stale", "b": "1x60 stale"}, {61: False, 63: True, 80: True}, id="all gone"),
        pytest.param({"a": "1x90", "b": "1x60 0x30"}, {61: False, 63: True, 80: True}, id="one silent"),
        pytest.param({"a": "1x90", "b": "1x90", "c": "_x50 1x10 stale"}, {62: False, 65: False}, id="a surge"),
        pytest.param({"a": "1x180", "b": "1x60 stale"}, {80: True, 95: False}, id="one taken away for good"),
    ],
)
def test_fewer_processes_than_most_of_the_last_hour_are_missed_and_a_surge_is_none(
    promtool: str, tmp_path: Path, processes: dict[str, str], missing_at: dict[int, bool]
) -> None:
    alert = "DecantProcessesMissing"
    (expected,) = (
        rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == alert
    )
    labels = expected["labels"] | {"job": "decant-prefill"}
    annotations = expected["annotations"] | {
        "summary": "Fewer processes of decant-prefill answer than the 2 that did most of the last hour"
    }
    told = [{"exp_labels": labels, "exp_annotations": annotations}]
    series = [
        {"series": f'up{{job="decant-prefill",instance="{name}"}}', "values": values}
        for name, values in processes.items()
    ]
    times = missing_at or {30: False, 90: False}
    asked = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": told if missing else []}
        for minute, missing in times.items()
    ]
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": asked}]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
