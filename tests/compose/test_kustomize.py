"""What kustomize makes of the base and of the overlays is valid by the API's own schemas."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_images import ROOT

pytestmark = pytest.mark.docker

KUBERNETES = ROOT / "deploy" / "kubernetes"
API_VERSION = "1.34"
LANES = {"base": "tcp", "overlays/gpu": "cuda_ipc,cuda_copy,tcp", "overlays/rdma": "rc,cuda_ipc,cuda_copy,tcp"}
NODE_IMAGES = {"base": "decant/node-cpu", "overlays/gpu": "decant/node-gpu", "overlays/rdma": "decant/node-gpu-rdma"}


def rendered(overlay: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here, which renders overlays")
    command = ["kubectl", "kustomize", str(KUBERNETES / overlay)]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return list(yaml.safe_load_all(made.stdout))


@pytest.mark.parametrize("overlay", LANES)
def test_an_overlay_renders_to_valid_resources_with_its_own_image_and_lanes(overlay: str) -> None:
    resources = rendered(overlay)
    for resource in resources:
        kubernetes_validate.validate(resource, API_VERSION, strict=True)
    pods = [one["spec"]["template"]["spec"] for one in resources if one["kind"] == "StatefulSet"]
    assert len(pods) == 2
    for pod in pods:
        (node,) = pod["containers"]
        assert node["image"] == f"{NODE_IMAGES[overlay]}:dev"
        environment = {one["name"]: one.get("value") for one in node["env"]}
        assert environment["UCX_TLS"] == LANES[overlay]
        assert ("nvidia.com/gpu" in node["resources"]["limits"]) == (overlay != "base")
        assert pod.get("hostNetwork", False) == (overlay == "overlays/rdma")
