"""docker-compose.yml with its CPU profiles: two routers, two prefill nodes, two decode nodes, and Prometheus beside them."""

from __future__ import annotations

import asyncio

import grpc.aio
from chaos_models import ServedModel
from compose_engine import Engine
from compose_project import SILENCE_LIMIT_S, WHOLE_LIMIT_S, Project, body_of, condition, usable
from compose_prometheus import IMAGE as PROMETHEUS
from compose_prometheus import Prometheus

from bench.ports import free_ports

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
NODES = {*PREFILL, *DECODE}
SEEN = {f"router{number}:8000" for number in ("", "-1")} | {f"{node}:7102" for node in NODES}
"""What Prometheus scrapes, as it names them."""


class Deployed(Project):
    """The project with its two routers as clients see them."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        http, grpc_port, http_1, grpc_1, prometheus = free_ports(5)
        self.http = {"router": f"http://127.0.0.1:{http}", "router-1": f"http://127.0.0.1:{http_1}"}
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
        super().__init__(engine, "decant", ("docker-compose.yml", "tests/compose/small.yml"), environment)

    async def usable(self, router: str = "router") -> set[str]:
        return usable(await asyncio.to_thread(body_of, f"{self.http[router]}/health"))

    async def whole(self, limit_s: float = WHOLE_LIMIT_S) -> float:
        """Seconds until both routers give work to every node."""

        async def all_usable() -> bool:
            return await self.usable() == NODES and await self.usable("router-1") == NODES

        return await condition(all_usable, limit_s, self.story)

    def story(self) -> str:
        tails = (f"--- {one}\n{self.logs(one, 15)}" for one in ("router", *sorted(NODES)))
        return "both routers give work to every node\n" + "\n".join(tails)

    def channel(self, router: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.grpc[router], options=(("grpc.enable_http_proxy", 0),))
