"""docker-compose.yml with its CPU profiles: two routers, two prefill nodes, two decode nodes, and Prometheus beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import grpc.aio
from chaos_models import ServedModel
from compose_certificates import Certificates
from compose_engine import Engine
from compose_project import SILENCE_LIMIT_S, WHOLE_LIMIT_S, Project, body_of, condition, usable
from compose_prometheus import IMAGE as PROMETHEUS
from compose_prometheus import Prometheus
from compose_versions import COMPOSE_1

from bench.ports import free_ports

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
ROUTERS = ("router", "router-1")
NODES = {*PREFILL, *DECODE}
SEEN = {f"{router}:8000" for router in ROUTERS} | {f"{node}:7102" for node in NODES}
"""What Prometheus scrapes, as it names them."""
FILES = ("docker-compose.yml", "tests/compose/small.yml")
TLS = "deploy/compose/tls.yml"


class Deployed(Project):
    """The project with its two routers as clients see them. `tls`: under deploy/compose/tls.yml, with these certificates."""

    def __init__(
        self, engine: Engine, model: ServedModel, tls: Certificates | None = None, tool: str = COMPOSE_1
    ) -> None:
        self.tls = tls
        http, grpc_port, http_1, grpc_1, prometheus = free_ports(5)
        scheme = "http" if tls is None else "https"
        self.http = {"router": f"{scheme}://127.0.0.1:{http}", "router-1": f"{scheme}://127.0.0.1:{http_1}"}
        self.grpc = {"router": f"127.0.0.1:{grpc_port}", "router-1": f"127.0.0.1:{grpc_1}"}
        ports = {"HTTP_PORT": http, "GRPC_PORT": grpc_port, "HTTP_PORT_1": http_1, "GRPC_PORT_1": grpc_1}
        environment = {name: str(port) for name, port in ports.items()}
        environment |= {"COMPOSE_PROFILES": "cpu,two-routers", "DTYPE": "float32", "KV_CACHE_MEMORY": "192MiB"}
        environment |= {"SILENCE_LIMIT": str(SILENCE_LIMIT_S)}
        environment |= {"PROMETHEUS_IMAGE": PROMETHEUS, "PROMETHEUS_PORT": str(prometheus)}
        self.prometheus = Prometheus(prometheus)
        if model.kind != "real":  # which the service `model` makes
            folder = model.folder
            folder.parent.chmod(0o755)  # so that the containers' user may look into it
            environment |= {
                "MODELS": str(folder.parent),
                "MODEL": f"/var/lib/decant/{folder.name}",
                "LOAD_FORMAT": "dummy",
            }
            environment["SLOT_BYTES"] = str(model.slot_bytes)
        if tls is not None:
            environment["TLS_FOLDER"] = str(tls.folder)
        super().__init__(engine, "decant", FILES if tls is None else (*FILES, TLS), environment, tool)

    async def get(self, service: str, path: str) -> str:
        """A router is asked where clients ask it."""
        if service not in self.http:
            return await super().get(service, path)
        trust = None if self.tls is None else self.tls.trust()
        return await asyncio.to_thread(body_of, f"{self.http[service]}{path}", trust)

    async def usable(self, router: str = "router") -> set[str]:
        return usable(await self.get(router, "/health"))

    async def whole(self, nodes: Collection[str] = NODES, routers: Collection[str] = ROUTERS) -> float:
        """Seconds until these routers give work to these nodes and to no others."""

        async def all_usable() -> bool:
            return all([await self.usable(router) == set(nodes) for router in routers])

        def story() -> str:
            tails = (f"--- {one}\n{self.logs(one, 15)}" for one in (*routers, *sorted(nodes)))
            return f"{routers} give work to {nodes}\n" + "\n".join(tails)

        return await condition(all_usable, WHOLE_LIMIT_S, story)

    def channel(self, router: str) -> grpc.aio.Channel:
        if self.tls is not None:
            return self.tls.channel(self.grpc[router])
        return grpc.aio.insecure_channel(self.grpc[router], options=(("grpc.enable_http_proxy", 0),))
