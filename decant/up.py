"""`decant up`: one model on one machine, as a router, a prefill node and a decode node with the embedded registry.

Flow: read options, find the model, check ports, draw a master key into a file that only we may read, start the three, wait
until each is ready, say how to ask something, watch, stop.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from decant.local_cluster import LocalCluster, child_environment, find_model, health_url, read_request
from decant.supervisor import ChildPlan, Interrupted, Supervisor
from foundation.api_keys import VARIABLE, api_key_of, draw_api_key
from foundation.config import to_arguments
from foundation.errors import StartError
from foundation.keys import draw_master_keys, write_key_file
from node.options import NodeOptions
from router.options import RouterOptions

START_LIMIT_S = 300.0
"""For loading weights and warming up; downloads and conversion are done before."""


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    request = read_request(
        arguments, environment, "decant up", "Serve a model on this machine: router, prefill node and decode node."
    )
    if request.print_config:
        sys.stdout.write(request.describe(request.cluster(Path("(drawn at start)"))) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="decant-") as private:  # mode 0700
        key_file = Path(private) / "master.key"
        request.cluster(key_file).require_free_ports()  # before a download that may take minutes
        model = find_model(request)
        cluster = request.cluster(key_file, model)
        write_key_file(key_file, draw_master_keys())
        return _serve(cluster, model, environment)


def _serve(cluster: LocalCluster, model: Path, environment: Mapping[str, str]) -> int:
    plans = _plans(cluster, environment)
    supervisor = Supervisor(plans, cluster.router.drain_grace_s)
    try:
        supervisor.start(START_LIMIT_S)
        sys.stdout.write(_ready_message(cluster, model, key_wanted=VARIABLE in plans[0].environment))
        sys.stdout.flush()
        supervisor.watch()
    except Interrupted:
        sys.stderr.write("decant up: stopping when requests in flight have ended; interrupt again to stop at once\n")
        return 0
    except StartError as error:
        sys.stderr.write(f"decant up: {error}\n")
        return error.exit_code
    finally:
        supervisor.stop()


def _plans(cluster: LocalCluster, environment: Mapping[str, str]) -> list[ChildPlan]:
    inherited = child_environment(environment, node_count=2)
    if (api_key := api_key_of(environment)) or cluster.router.api_key_file:
        inherited[VARIABLE] = api_key or draw_api_key()  # nodes show it to the registry

    def plan(
        name: str, options: RouterOptions | NodeOptions, is_ready: Callable[[bytes], bool] = _any_body
    ) -> ChildPlan:
        command = [sys.executable, "-m", "decant", name, *to_arguments(options)]
        return ChildPlan(name, command, inherited, health_url(options), is_ready)

    return [
        plan("router", cluster.router, knows_both_nodes),
        plan("prefill", cluster.prefill),
        plan("decode", cluster.decode),
    ]


def _any_body(_body: bytes) -> bool:
    return True


def knows_both_nodes(health_body: bytes) -> bool:
    """Whether a router's /health says that it would give work to a prefill and to a decode node."""
    nodes = json.loads(health_body)["nodes"]
    return {node["role"] for node in nodes if node["refusal"] is None} == {"prefill", "decode"}


def _ready_message(cluster: LocalCluster, model: Path, *, key_wanted: bool) -> str:
    base_url = health_url(cluster.router).removesuffix("/health")
    name = cluster.router.served_model_name
    if has_chat_template(model):
        path = "/v1/chat/completions"
        body: dict[str, object] = {
            "model": name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
    else:
        path = "/v1/completions"
        body = {"model": name, "prompt": "The capital of France is", "max_tokens": 16}
    key = f'-H "Authorization: Bearer ${VARIABLE}" ' if key_wanted else ""
    return (
        f"\nDecant serves {name} at {base_url}/v1 (gRPC on port {cluster.router.grpc_port}). Ask it something:\n\n"
        f"  curl -s {base_url}{path} -H 'Content-Type: application/json' {key}\\\n    -d '{json.dumps(body)}'\n\n"
        "Ctrl-C stops it.\n\n"
    )


def has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        content = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and bool(content.get("chat_template"))
