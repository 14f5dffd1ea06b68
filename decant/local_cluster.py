"""What `decant up` runs: options of a router, a prefill node and a decode node on one machine.

`decant up` takes every option of the three that makes sense for all of them together, decides the rest (addresses, names, the
registry, the keys), and checks everything here, before any process is started.

Must not know: processes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decant.default_model import default_model_folder, ensure_default_model, is_converted
from decant.gpus import count_visible
from decant.processes import ALL_FIELDS, require_node_ports, require_router_ports
from foundation.config import Options, Setting, build, describe, option, origins
from foundation.errors import ConfigurationError
from foundation.model_folder import resolve_model_folder, served_model_name
from foundation.option_sources import gather
from node.options import DecodeOptions, NodeOptions, PrefillOptions
from router.options import EMBEDDED, RouterOptions

LOOPBACK = "127.0.0.1"
TOY_MODEL = "toy"
DECIDED_HERE = frozenset({"registry", "key_file", "node_id", "advertise_address", "control_port", "data_port"})
DECIDED_HERE |= {"registry_port", "tls_cert_file", "tls_key_file", "tls_ca_file", "tls_server_name"}
NOT_FOR_NODES = frozenset({"host", "http_port"})
"""With `decant up` these are the router's; nodes listen on loopback, on the ports of their index."""


@dataclass(frozen=True)
class LocalOptions(Options):
    """What means something else for a whole cluster than for one process."""

    model: str | None = option(None, "Hugging Face model folder, hub id, or toy (default: SmolLM2-135M-Instruct)")
    node_index: int = option(0, "index of the prefill node; the decode node has the next one", minimum=0, maximum=4999)


@dataclass(frozen=True, slots=True)
class LocalCluster:
    router: RouterOptions
    prefill: PrefillOptions
    decode: DecodeOptions

    def require_free_ports(self) -> None:
        self._require_distinct_ports()
        require_router_ports(self.router)
        require_node_ports(self.prefill)
        require_node_ports(self.decode)

    def _require_distinct_ports(self) -> None:
        router = {"--http-port": self.router.http_port, "--grpc-port": self.router.grpc_port}
        router["--registry-port"] = self.router.registry_port
        nodes = {
            port for node in (self.prefill, self.decode) for port in (node.control_port, node.data_port, node.http_port)
        }
        for setting, port in router.items():
            if port in nodes:
                raise ConfigurationError(
                    setting, f"{port} is a port of the nodes ({sorted(nodes)}); --node-index moves those"
                )


@dataclass(frozen=True, slots=True)
class Request:
    """One command line of `decant up` or `decant doctor`, read but not yet given a model folder and keys."""

    settings: Mapping[str, Setting]
    print_config: bool

    @property
    def model(self) -> str | None:
        return build(LocalOptions, self.settings).model

    @property
    def revision(self) -> str | None:
        setting = self.settings.get("revision")
        return None if setting is None else str(setting.value)

    def cluster(self, key_file: Path, found: Path | None = None) -> LocalCluster:
        """Checked options of all three, serving the folder `found`, or what was asked for as long as it is not found yet."""
        asked = self.model or str(default_model_folder())
        first = build(LocalOptions, self.settings).node_index
        served_as = self.settings.get("served_model_name")
        shared: dict[str, Any] = {
            "model": str(found or asked),
            "served_model_name": served_model_name(asked, None if served_as is None else str(served_as.value)),
        }
        if found is not None:
            shared["revision"] = None
        router = build(RouterOptions, self.settings, registry=EMBEDDED, key_file=str(key_file), **shared)
        if router.ssl_ca_certs is not None:
            raise ConfigurationError(
                "--ssl-ca-certs",
                "keeps out decant up itself, which asks its router how it is: start the processes one by one",
            )
        of_nodes = {name: setting for name, setting in self.settings.items() if name not in NOT_FOR_NODES}
        shared |= {"host": LOOPBACK, "registry": f"{LOOPBACK}:{router.registry_port}"}
        shared |= _share_of_gpu(build(DecodeOptions, of_nodes, **shared), count_visible(os.environ))
        prefill = build(PrefillOptions, of_nodes, node_index=first, key_file=str(key_file), **shared)
        decode = build(DecodeOptions, of_nodes, node_index=first + 1, **shared)
        return LocalCluster(router, prefill, decode)

    def describe(self, cluster: LocalCluster) -> str:
        parts = []
        for name, options in (("router", cluster.router), ("prefill", cluster.prefill), ("decode", cluster.decode)):
            settings = self.settings if isinstance(options, RouterOptions) else _without_routers(self.settings)
            found = origins(type(options), settings)
            decided_here = DECIDED_HERE if isinstance(options, RouterOptions) else DECIDED_HERE | {"host", "node_index"}
            decided = dict.fromkeys(decided_here & found.keys(), "decant up")
            parts.append(f"[{name}]\n{describe(options, found | decided)}")
        return "\n\n".join(parts)


def read_request(arguments: Sequence[str], environment: Mapping[str, str], program: str, description: str) -> Request:
    fields = {
        field.name: field
        for options_type in (DecodeOptions, RouterOptions, LocalOptions)
        for field in dataclasses.fields(options_type)
        if field.name not in DECIDED_HERE
    }
    settings, print_config = gather(fields, arguments, environment, program, description, ALL_FIELDS)
    return Request(settings, print_config)


def _share_of_gpu(node: NodeOptions, gpus: int) -> dict[str, Any]:
    """Both nodes get half of a GPU that they share; with several, each has its own (`node.devices`)."""
    shared = gpus == 1 or (gpus > 1 and ":" in node.device)
    return {"gpu_memory_utilization": node.gpu_memory_utilization / 2} if shared and node.device != "cpu" else {}


def find_model(request: Request) -> Path:
    """The folder to serve: the one asked for, or the default model, converted now if the cache lacks it.

    The model `toy` has no weights: its next token is a hash of all KV of its context, so that one wrong byte changes the text.
    """
    if request.model == TOY_MODEL:
        return _toy_folder()
    if request.model is not None:
        return resolve_model_folder(request.model, request.revision)
    if not is_converted(default_model_folder()):
        sys.stderr.write("decant: preparing the default model, once\n")
    return ensure_default_model()


def _toy_folder() -> Path:
    from engine.model.toy import write_toy_folder  # imports torch

    models = default_model_folder().parent
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".toy-") as scratch:
        made, folder = write_toy_folder(Path(scratch) / TOY_MODEL), models / TOY_MODEL
        if not folder.exists():
            made.rename(folder)
    return folder


def child_environment(environment: Mapping[str, str], node_count: int) -> dict[str, str]:
    """The environment without options, which children get on their command lines; nodes share the cores evenly."""
    kept = {
        name: value for name, value in environment.items() if not name.startswith("DECANT_") or name == "DECANT_CACHE"
    }
    cores_a_node = max(1, len(os.sched_getaffinity(0)) // node_count)
    return {"OMP_NUM_THREADS": str(cores_a_node), **kept}


def health_url(options: NodeOptions | RouterOptions) -> str:
    host = LOOPBACK if options.host in ("0.0.0.0", "::") else options.host
    tls = isinstance(options, RouterOptions) and options.ssl_certfile is not None
    return f"{'https' if tls else 'http'}://{host}:{options.http_port}/health"


def _without_routers(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in settings.items() if name not in NOT_FOR_NODES}
