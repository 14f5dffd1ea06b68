"""docs/metrics.md, written from the metrics themselves: `make metrics` rewrites it, and the diff is the review.

It is also the golden file that freezes names, types, labels and their values: what dashboards and alerts stand on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from foundation.metrics import NodeMetrics, RouterMetrics

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
PREFIX = "decant_"

_HEAD = """# Metrics

Every process serves Prometheus' text format under `/metrics` on its HTTP port. This page is written by `make metrics` from the
metrics themselves, and a test compares it: a name, type, label or label value that changes shows up here first.

Every label value exists from the start, so that a rate over what never happened reads 0 and not "no data"; what is not declared
counts as `other`, so labels never grow with what a client or peer sends. `peer` and `lane` are the exception: they name nodes
that this process has paired with, the last {lanes} of them.

Beside these, every process exports `process_*` and `python_info` as Prometheus clients do (memory, CPU, file descriptors, start
time). Alerts: `deploy/prometheus/rules/decant.yml`, explained in [runbook.md](runbook.md). Dashboard:
`deploy/grafana/dashboards/decant.json`.

| name | type | labels | unit | on | meaning |
|---|---|---|---|---|---|
"""

_UNITS = {
    "gigabytes_per_second": "GB/s",
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "ratio": "ratio",
    "blocks": "blocks",
    "slots": "slots",
}


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    labels: tuple[str, ...]
    values: dict[str, tuple[str, ...]]
    """Of each label that has them declared."""
    meaning: str
    on: str

    @property
    def unit(self) -> str:
        stem = self.name.removesuffix("_total")
        return next((unit for ending, unit in _UNITS.items() if stem.endswith(ending)), "1")

    @property
    def samples(self) -> frozenset[str]:
        """Names as queries write them."""
        if self.kind == "histogram":
            return frozenset(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return frozenset({self.name})


def metrics() -> list[Metric]:
    """Of routers and nodes, by name; one that both have stands once."""
    found: dict[str, Metric] = {}
    for on, of in (("router", RouterMetrics()), ("node", NodeMetrics())):
        for collector in _collectors(of):
            metric = _metric(collector, on)
            known = found.get(metric.name)
            assert known is None or (known.kind, known.labels) == (metric.kind, metric.labels), metric.name
            found[metric.name] = metric if known is None else Metric(**(vars(known) | {"on": "all"}))
    return [found[name] for name in sorted(found)]


def _collectors(of: RouterMetrics | NodeMetrics) -> Iterable[MetricWrapperBase]:
    collectors = of.registry._collector_to_names  # the registry has no public list of what was registered
    return [collector for collector in collectors if isinstance(collector, MetricWrapperBase)]


def _metric(collector: MetricWrapperBase, on: str) -> Metric:
    labels = tuple(collector._labelnames)
    values: dict[str, tuple[str, ...]] = {}
    if labels and collector._metrics:
        values = {label: tuple(value[index] for value in collector._metrics) for index, label in enumerate(labels)}
    kind = str(collector._type)
    total = "_total" if kind == "counter" else ""
    return Metric(collector._name + total, kind, labels, values, collector._documentation, on)


def document() -> str:
    from foundation.metrics import LANES_SHOWN

    found = metrics()
    lines = [_HEAD.format(lanes=LANES_SHOWN)]
    for metric in found:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.on} | {metric.meaning} |\n"
        )
    lines.append("\n## Label values\n")
    for metric in found:
        for label, values in metric.values.items():
            said = ", ".join(f"`{value}`" for value in values)
            lines.append(f"\n`{metric.name}`, `{label}`: {said}\n")
    return "".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT}\n")
