"""The Kubernetes manifests: valid by the API's own schemas, and saying what our processes understand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_files import ROOT
from test_compose_files import OPTIONS

from decant.processes import ALL_FIELDS
from foundation.option_sources import parse

KUBERNETES = ROOT / "deploy" / "kubernetes"
API_VERSION = "1.34"


def resources() -> Iterator[dict[str, Any]]:
    for path in sorted((KUBERNETES / "base").glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def named(found: list[dict[str, Any]]) -> dict[str, Any]:
    """For parametrize: one test a resource."""
    return {
        "argnames": "resource",
        "argvalues": found,
        "ids": [f"{one['kind']}-{one['metadata']['name']}" for one in found],
    }


BASE = list(resources())
WORKLOADS = [one for one in BASE if one["kind"] in ("Deployment", "StatefulSet", "Job")]
NAMES = {"decant-router": "router", "decant-prefill": "prefill", "decant-decode": "decode"}
SERVING = [one for one in WORKLOADS if one["metadata"]["name"] in NAMES]


def pod_of(resource: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = resource["spec"]["template"]["spec"]
    return spec


def main_container(resource: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(resource)["containers"]
    return dict(container)


def common_environment() -> dict[str, str]:
    kustomization = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generated["literals"])


def options_of(resource: dict[str, Any]) -> Any:
    role = NAMES[resource["metadata"]["name"]]
    own = {one["name"]: one.get("value", "10.0.0.7") for one in main_container(resource)["env"]}
    environment = {name: value for name, value in (common_environment() | own).items() if name.startswith("DECANT_")}
    return parse(OPTIONS[role], [], environment, program=role, description="", other_fields=ALL_FIELDS).options


@pytest.mark.parametrize(**named(BASE))
def test_a_resource_is_valid_by_the_schema_of_its_kind(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, API_VERSION, strict=True)


def test_the_schemas_refuse_what_is_no_field() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"portz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, API_VERSION, strict=True)


@pytest.mark.parametrize(**named(SERVING))
def test_what_a_process_is_told_are_options_that_it_has(resource: dict[str, Any]) -> None:
    assert options_of(resource).drain_grace_s == 60.0


@pytest.mark.parametrize(**named(WORKLOADS))
def test_service_links_are_off_because_they_would_be_unknown_options(resource: dict[str, Any]) -> None:
    """A Service `decant-redis` would give every pod DECANT_REDIS_SERVICE_HOST."""
    assert pod_of(resource)["enableServiceLinks"] is False


@pytest.mark.parametrize(**named(WORKLOADS))
def test_a_pod_runs_as_nobody_special_on_a_read_only_root(resource: dict[str, Any]) -> None:
    pod = pod_of(resource)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize(**named(SERVING))
def test_liveness_is_asked_for_apart_from_readiness(resource: dict[str, Any]) -> None:
    container, options = main_container(resource), options_of(resource)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/health")):
        asked = container[probe]["httpGet"]
        assert (asked["path"], ports[asked["port"]]) == (path, options.http_port)


@pytest.mark.parametrize(**named(SERVING))
def test_a_pod_is_given_longer_to_end_than_it_takes_to_drain(resource: dict[str, Any]) -> None:
    before = container["exec"]["command"] if (container := pre_stop(resource)) else ["sleep", "0"]
    assert pod_of(resource)["terminationGracePeriodSeconds"] >= options_of(resource).drain_grace_s + 10 + int(before[1])


def pre_stop(resource: dict[str, Any]) -> dict[str, Any] | None:
    hooks: dict[str, Any] = main_container(resource).get("lifecycle", {})
    return hooks.get("preStop")


@pytest.mark.parametrize(**named(SERVING))
def test_only_one_of_a_kind_may_be_taken_away_at_once(resource: dict[str, Any]) -> None:
    labels = resource["spec"]["template"]["metadata"]["labels"]
    budgets = [one for one in resources() if one["kind"] == "PodDisruptionBudget"]
    covering = [one for one in budgets if one["spec"]["selector"]["matchLabels"].items() <= labels.items()]
    assert [one["spec"]["maxUnavailable"] for one in covering] == [1]


@pytest.mark.parametrize(**named(SERVING))
def test_decode_nodes_get_no_key(resource: dict[str, Any]) -> None:
    has_key = any("secret" in volume for volume in pod_of(resource)["volumes"])
    assert has_key == (resource["metadata"]["name"] != "decant-decode")
