"""Grafana's dashboard and the OTLP collector's configuration, by themselves and beside deploy/compose/observability.yml."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from compose_files import ROOT, services
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from metrics_table import metrics

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/decant.json").read_text())
COLLECTOR: dict[str, Any] = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())
PROVISIONING = ROOT / "deploy/grafana/provisioning"
SERVICES = services(ROOT / "deploy/compose/observability.yml")
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
WIDTH = 24
GRPC_PORT = 4317


def as_grafana_reads_it(dashboard: dict[str, Any]) -> Any:
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def unknown(written: Any, read: Any, where: str = "") -> list[str]:
    """Where something was written that was not read."""
    match written:
        case dict():
            return [
                found
                for key, value in written.items()
                for found in (
                    unknown(value, read[key], f"{where}/{key}")
                    if isinstance(read, dict) and key in read
                    else [f"{where}/{key}"]
                )
            ]
        case list():
            if not isinstance(read, list) or len(read) != len(written):
                return [where]
            return [
                found
                for index, (one, other) in enumerate(zip(written, read, strict=True))
                for found in unknown(one, other, f"{where}/{index}")
            ]
        case _:
            return [] if written == read else [where]


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert unknown(DASHBOARD, as_grafana_reads_it(DASHBOARD)) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    misspelt = json.loads(json.dumps(DASHBOARD))
    panel = misspelt["panels"].index(next(one for one in misspelt["panels"] if one["type"] == "timeseries"))
    misspelt["panels"][panel]["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 2
    found = unknown(misspelt, as_grafana_reads_it(misspelt))
    assert found == [f"/panels/{panel}/fieldConfig/defaults/custom/lineWidht"]


def test_panels_have_ids_of_their_own_lie_beside_each_other_and_ask_a_source_that_is_provisioned() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= WIDTH for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
    sources = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    provisioned = [{"type": source["type"], "uid": source["uid"]} for source in sources]
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters), panel["title"]
        assert all(asks["datasource"] in provisioned for asks in (panel, *panel["targets"])), panel["title"]


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title} {target['refId']}" for title, target in TARGETS])
def test_a_legend_names_only_labels_that_its_query_keeps(title: str, target: dict[str, Any]) -> None:
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    if grouped := re.search(r"(?:sum|max|avg)(?: by \(([^)]*)\))? ?\(", target["expr"]):
        kept = set((grouped[1] or "").replace(" ", "").split(","))
    else:
        name = re.sub(r"_(sum|count|bucket)$", "", re.findall(r"\b(?:decant|process)_\w+", target["expr"])[0])
        own = {metric.name: set(metric.labels) for metric in metrics()}
        kept = {"instance", "job"} | own.get(name, set())
    assert wanted <= kept


def test_grafana_and_jaeger_are_asked_where_they_are() -> None:
    sources = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    hosts = {urlsplit(source["url"]).hostname for source in sources}
    for host in hosts:
        assert set(SERVICES[str(host)]["networks"]) & set(SERVICES["grafana"]["networks"])
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/decant.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/decant.json"


def test_the_collector_uses_all_that_it_declares_and_declares_all_that_it_uses() -> None:
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in COLLECTOR["service"]["pipelines"].values() for name in pipeline[kind]}
        assert used == set(COLLECTOR[kind])


def test_spans_are_sent_to_where_the_collector_listens_and_from_it_to_jaeger() -> None:
    listens = urlsplit(f"//{COLLECTOR['receivers']['otlp']['protocols']['grpc']['endpoint']}")
    assert (listens.hostname, listens.port) == ("0.0.0.0", GRPC_PORT)
    traced = {
        service["environment"].get("DECANT_OTLP_TRACES_ENDPOINT")
        for service in SERVICES.values()
        if "image" not in service
    }
    assert traced == {f"http://otel-collector:{GRPC_PORT}"}
    (exporter,) = COLLECTOR["exporters"].values()
    host, _, port = exporter["endpoint"].partition(":")
    assert int(port) == GRPC_PORT
    assert set(SERVICES[host]["networks"]) & set(SERVICES["otel-collector"]["networks"])
    (mounted,) = (volume.split(":")[1] for volume in SERVICES["otel-collector"]["volumes"])
    assert SERVICES["otel-collector"]["command"] == [f"--config={mounted}/collector.yaml"]
