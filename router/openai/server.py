"""The HTTP server: routes, and every failure as an OpenAI error body.

Must not know: how answers are made.
"""

from __future__ import annotations

import socket
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from time import time

from aiohttp import web

from foundation.health import Health
from foundation.log import get_logger
from foundation.metrics import RouterMetrics
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.generation import Refusal, RefusalKind, RequestRefused
from router.intake import Intake
from router.live_page.endpoints import LivePage
from router.openai.edge import Handler, HttpEdge
from router.openai.endpoints import Endpoints, correlation_id
from router.openai.errors import error_response, plain_error_response
from router.wording import INTERNAL_ERROR

log = get_logger()

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class HttpServer:
    """`start` once, `close` once."""

    def __init__(
        self,
        intake: Intake,
        dispatcher: Dispatcher,
        fleet: Fleet,
        metrics: RouterMetrics,
        health: Health,
        live_page: LivePage,
        edge: HttpEdge,
    ) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._metrics = metrics
        self._readiness = health
        self._edge = edge
        self._started_at = int(time())
        application = web.Application(client_max_size=edge.limits.body_bytes, middlewares=[self._refusals, edge.admit])
        endpoints = Endpoints(intake, dispatcher)
        application.on_response_prepare.append(_name)
        application.add_routes(
            [
                web.post("/v1/completions", endpoints.completions),
                web.post("/v1/chat/completions", endpoints.chat),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/tokenize", endpoints.tokenize),
                web.post("/detokenize", endpoints.detokenize),
                web.get("/version", self._version),
                web.get("/live", self._live),
                web.get("/health", self._health),
                web.get("/metrics", self._exposition),
                web.get("/waiting", self._waiting),
                *live_page.routes(),
            ]
        )
        self._runner = edge.runner(application)

    async def start(self, listener: socket.socket) -> None:
        """Serves on a socket that is already listening."""
        await self._runner.setup()
        await self._edge.site(self._runner, listener).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    # --- every failure has one form

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestRefused as refused:
            if refused.refusal.kind is not RefusalKind.OVERLOADED and refused.refusal.code != "draining":
                self._metrics.requests_refused_total.count("invalid")
            return error_response(refused.refusal)
        except web.HTTPRequestEntityTooLarge:
            return self._too_large()
        except web.RequestPayloadError:
            return self._unreadable()
        except web.HTTPException as error:
            if error.status < 400:
                raise
            code = _CODES.get(error.status, "bad_request")
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return plain_error_response(error.status, f"{request.method} {request.path}: {error.reason}", code, headers)
        except (ConnectionError, TimeoutError) as error:
            # The client left while it was written to, or did not read what was written.
            log.info("client lost", reason=type(error).__name__)
            raise ConnectionResetError from None
        except Exception:
            log.exception("request failed inside the router", path=request.path)
            return error_response(INTERNAL_ERROR)

    def _too_large(self) -> web.Response:
        self._metrics.requests_refused_total.count("invalid")
        message = f"the body may have at most {self._edge.limits.body_bytes} bytes"
        return error_response(Refusal(RefusalKind.TOO_LARGE, message, code="body_too_large"))

    def _unreadable(self) -> web.Response:
        self._metrics.requests_refused_total.count("malformed_http")
        message = "the body is not what its Content-Encoding or Transfer-Encoding says"
        response = plain_error_response(400, message, "malformed_body")
        response.force_close()
        return response

    # --- what operators ask

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _health(self, request: web.Request) -> web.Response:
        problems = self._readiness.problems()
        body = {
            "status": "not_ready" if problems else "ready",
            "reasons": [problem.for_people() for problem in problems],
            "nodes": self._fleet.describe(),
            "registry": self._fleet.describe_registry(),
        }
        return web.json_response(body, status=503 if problems else 200)

    async def _exposition(self, request: web.Request) -> web.Response:
        self._metrics.nodes.set(**self._fleet.connected_by_role())
        self._metrics.nodes_usable.set(**self._fleet.usable_by_role())
        self._metrics.registry_up.set(self._fleet.registry_down_since_s is None)
        self._metrics.show_problems({problem.name: problem.since_s for problem in self._readiness.problems()})
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _waiting(self, request: web.Request) -> web.Response:
        """Which requests have no token yet, on whom they wait, for what, and since when."""
        return web.json_response({"waiting": [asdict(account) for account in self._dispatcher.accounts(waiting=True)]})

    # --- small endpoints of the API

    def _card(self) -> dict[str, object]:
        name = self._intake.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "decant",
            "root": name,
            "max_model_len": self._intake.context_limit(),
        }

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._intake.check_model(request.match_info["model"])
        return web.json_response(self._card())

    async def _version(self, request: web.Request) -> web.Response:
        try:
            return web.json_response({"version": version("decant")})
        except PackageNotFoundError:
            return web.json_response({"version": "unknown"})


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer, refusals too, bears the name that its client gave it."""
    if given := correlation_id(request):
        response.headers["X-Request-Id"] = given
