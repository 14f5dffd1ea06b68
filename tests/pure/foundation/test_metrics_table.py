"""Metrics as others build on them: the table in the docs, alert rules, the dashboard, the runbook."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_table import DOCUMENT, PREFIX, Metric, document, metrics

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules" / "decant.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RUNBOOK = ROOT / "docs" / "runbook.md"
ROOMS = ("foundation", "net", "engine", "kv_transfer", "node", "prefill_node", "decode_node", "router", "decant")
OF_EVERY_PROCESS = {"process_start_time_seconds", "process_resident_memory_bytes"}
BOUNDED = {"peer", "lane"}
"""Labels without declared values, which `LaneSpeeds` keeps few."""


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every alert and every panel."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield f"{file.name}: {panel['title']}", target["expr"]


QUERIES = list(queries())
BY_SAMPLE: dict[str, Metric] = {sample: metric for metric in metrics() for sample in metric.samples}


def test_the_table_in_the_docs_is_what_the_processes_export() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "make metrics"


def test_every_label_has_its_values_declared_from_the_start() -> None:
    unbounded = {
        (metric.name, label)
        for metric in metrics()
        for label in metric.labels
        if label not in metric.values and label not in BOUNDED
    }
    assert unbounded == set()


def test_every_metric_is_named_as_prometheus_users_expect() -> None:
    for metric in metrics():
        assert re.fullmatch(PREFIX + r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert len(metric.meaning) > 10, f"{metric.name} says nothing of itself"


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_alerts_and_panels_ask_for_metrics_labels_and_values_that_exist(where: str, query: str) -> None:
    names = set(re.findall(r"\b(?:decant|process)_[a-z0-9_]+", re.sub(r'"[^"]*"', '""', query)))
    assert names or "up{" in query
    assert names - BY_SAMPLE.keys() - OF_EVERY_PROCESS == set()
    for name, matchers in re.findall(r"(decant_[a-z0-9_]+)\{([^}]*)\}", query):
        for label, value in re.findall(r'(\w+)[=!]~?"([^"]*)"', matchers):
            if label in ("job", "instance"):
                continue
            known = BY_SAMPLE[name].values[label]
            assert set(value.split("|")) <= set(known), f"{name} has no {label}={value}"
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


def anchors() -> set[str]:
    """As Markdown renderers make them of headings."""
    headings = re.findall(r"^#+ (.+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_alert_is_explained_in_the_runbook_and_nothing_else_is() -> None:
    found = alerts()
    assert len({rule["alert"] for rule in found}) == len(found) > 10
    for rule in found:
        document_name, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert ROOT / document_name == RUNBOOK
        assert anchor in anchors(), f"{rule['alert']} has no heading"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    explained = {anchor for anchor in anchors() if anchor.startswith("decant")}
    assert explained == {rule["alert"].lower() for rule in found}


def log_events() -> set[str]:
    """What the code logs as a warning or worse."""
    found = set()
    for file in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"\blog(ger)?\.(warning|error|critical|exception)\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("warning", "error", "critical", "exception")
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("log", "logger")
            ):
                event = node.args[0]
                assert isinstance(event, ast.Constant), f"{file}:{node.lineno}: an event is a constant text"
                assert isinstance(event.value, str)
                found.add(event.value)
    return found


def test_every_warning_and_error_that_is_logged_stands_in_the_runbook() -> None:
    table = RUNBOOK.read_text(encoding="utf-8").partition("## What the logs say")[2]
    explained = set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))
    events = log_events()
    assert len(events) > 10
    assert explained - events == set(), "these are logged no more"
    assert events - explained == set()
