"""Options of a prefill and of a decode node; names are vLLM's where it has them.

An instance is checked and frozen (see `foundation.config`). Both roles share `NodeOptions`; each adds what only it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from foundation.config import Options, derived, option
from foundation.errors import ConfigurationError
from foundation.ports import is_only_of_this_machine
from foundation.registry_entry import Role
from foundation.tls import internal_files
from foundation.tracing import require_collector_address

KIB, MIB, GIB = 2**10, 2**20, 2**30
HIGHEST_PORT = 65535
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
WILDCARD_HOSTS = ("0.0.0.0", "::")
FIRST_NODE_PORT = 7100
PORTS_A_NODE = 10

DeviceKind = Literal["cpu", "cuda"]
SLOT_BYTES: Mapping[DeviceKind, int] = {"cpu": 4 * MIB, "cuda": 64 * MIB}
"""On a GPU a message costs as much time as many megabytes of it take to travel."""
SENDING_SLOTS_AT_MOST = 1024
"""Of a prefill node, which looks at all of them whenever it gathers or sends."""


class Staging(NamedTuple):
    """In bytes of payload."""

    staging_bytes: int
    slot_bytes: int


@dataclass(frozen=True)
class NodeOptions(Options):
    role: ClassVar[Role]
    staging_defaults: ClassVar[Mapping[DeviceKind, int]]
    prompts_share_steps: ClassVar[bool] = True
    """Prompts that fit into --max-num-batched-tokens end together, also where a step holds less (engine/scheduler/prefill)."""

    # The model.
    model: str = option(help="Hugging Face model folder, or hub id")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    served_model_name: str | None = option(None, "the id that clients use (default: the folder's name)")
    load_format: str = option("auto", "dummy: random weights from config.json and --seed", choices=("auto", "dummy"))
    dtype: str = option(
        "auto",
        "type of weights and KV; auto: what config.json says",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None, "longest prompt + answer in tokens (default: what config.json says)", minimum=2, sized=True
    )
    seed: int = option(0, "seed of --load-format dummy", minimum=0, maximum=2**63 - 1)

    # The engine.
    device: str = option(
        "auto", "auto, cpu, cuda or cuda:N; auto: a GPU if it can serve; without N: the one of the node index"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory for this node: the KV pool gets what weights, staging and a full step leave of it",
        minimum=0.01,
        maximum=1.0,
    )
    block_size: int = option(16, "tokens in a KV block", minimum=1, maximum=1024)
    max_num_seqs: int = option(64, "most sequences in one step", minimum=1, maximum=4096)
    max_num_batched_tokens: int = option(
        2048,
        "most tokens in one step; warm-up lowers it to what a quarter of the silence limit allows",
        minimum=1,
        sized=True,
    )
    enable_prefix_caching: bool = option(True, "keep KV of finished requests and find it again by its tokens")
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the KV pool (default: 1GiB on a CPU, on a GPU what --gpu-memory-utilization leaves)",
        minimum=MIB,
        sized=True,
    )
    num_gpu_blocks_override: int | None = option(
        None, "exactly so many KV blocks, whatever --kv-cache-memory-bytes says (on a CPU as well)", minimum=2
    )

    batch_invariant: bool = option(
        False,
        "GPU only, slower: a token's logits have the same bits whatever shares its step and however its history was computed; "
        "every node must say it",
    )

    # The pool's layout. Unlike nodes can pair: what travels is cut to fit both.
    kv_head_order: str = option("HND", "order of heads and positions within a block", choices=("HND", "NHD"))
    kv_layer_group: int | None = option(
        None,
        "layers that lie together in a block and leave together (default: all of a pipeline stage, on a GPU about a quarter)",
        minimum=1,
    )
    tensor_parallel_size: int = option(1, "shards of the KV pool by heads", minimum=1, maximum=1024)
    pipeline_parallel_size: int = option(1, "shards of the KV pool by layers", minimum=1, maximum=1024)

    # The transfer.
    staging_bytes: int | None = option(
        None,
        "memory for slots in which KV arrives or leaves (default: prefill 256MiB, decode 512MiB; on a GPU 4GiB)",
        minimum=64 * KIB,
        sized=True,
    )
    slot_bytes: int | None = option(
        None,
        "size of one slot, the most that one parcel holds (default: 4MiB, on a GPU 64MiB)",
        minimum=4 * KIB,
        sized=True,
    )
    silence_limit_s: float = option(
        2.0, "a peer that makes no progress for so long is given up", minimum=0.1, maximum=600
    )
    heartbeat_s: float = option(0.5, "time between two heartbeats", minimum=0.01, maximum=60)
    lease_s: float = option(30.0, "how long a prefill node keeps a computed prefix unasked", minimum=1, maximum=3600)
    drain_grace_s: float = option(60.0, "after SIGTERM: time for work in flight to end", minimum=0, maximum=3600)

    # The service.
    node_index: int = option(0, "counts the nodes of one machine; sets the default ports", minimum=0, maximum=5000)
    node_id: str = derived(
        lambda options: f"{options.role.value}-{options.node_index}",
        "role and node index",
        "this node's name, which survives restarts",
    )
    host: str = option("127.0.0.1", "address to listen on")
    control_port: int = derived(
        lambda options: FIRST_NODE_PORT + PORTS_A_NODE * options.node_index,
        "7100 + 10 x node index",
        "gRPC port",
        minimum=1,
        maximum=HIGHEST_PORT,
    )
    data_port: int = derived(
        lambda options: FIRST_NODE_PORT + PORTS_A_NODE * options.node_index + 1,
        "7101 + 10 x node index",
        "UCX port",
        minimum=1,
        maximum=HIGHEST_PORT,
    )
    http_port: int = derived(
        lambda options: FIRST_NODE_PORT + PORTS_A_NODE * options.node_index + 2,
        "7102 + 10 x node index",
        "port of /live, /health and /metrics",
        minimum=1,
        maximum=HIGHEST_PORT,
    )
    advertise_address: str = derived(
        lambda options: _advertised(options.host),
        "--host",
        "address under which other machines reach this node",
    )
    registry: str = option("127.0.0.1:9000", "redis://... or host:port of a router's gRPC server, which embeds one")
    tls_cert_file: str | None = option(
        None, "this process's certificate among routers and nodes, all of which then ask each other for one"
    )
    tls_key_file: str | None = option(None, "its private key")
    tls_ca_file: str | None = option(None, "the authority that signs routers and nodes")
    tls_server_name: str | None = option(
        None, "name in every node's and router's certificate (default: the address that is dialled)"
    )
    enable_test_faults: bool = option(
        False, "obey DECANT_TEST_FAULTS, which harms transfers on purpose: for tests only"
    )
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector (gRPC) to which traces are sent: http://host:4317 (default: none are made)"
    )
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("auto", "auto: console on a terminal, else json", choices=("auto", "json", "console"))

    def check(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                "--max-num-batched-tokens",
                f"is {self.max_num_batched_tokens}, less than --max-num-seqs ({self.max_num_seqs}): a step could not hold them",
            )
        if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is None:
            raise ConfigurationError("--device", f"{self.device!r} is not one of auto, cpu, cuda, cuda:N")
        if self.device != "auto" or (self.staging_bytes is not None and self.slot_bytes is not None):
            self.staging_on("cpu" if self.device == "cpu" else "cuda")
        if self.heartbeat_s > self.silence_limit_s / 2:
            raise ConfigurationError(
                "--heartbeat-s",
                f"must be at most half of --silence-limit-s ({self.silence_limit_s}), not {self.heartbeat_s}",
            )
        if not self.registry.startswith(REDIS_SCHEMES) and not re.fullmatch(r"[^/]+:\d{1,5}", self.registry):
            raise ConfigurationError(
                "--registry", f"must be redis://host:port or host:port of a router's gRPC server, not {self.registry!r}"
            )
        require_collector_address(self.otlp_traces_endpoint)
        internal_files(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        ports = {"--control-port": self.control_port, "--data-port": self.data_port, "--http-port": self.http_port}
        if len(set(ports.values())) < len(ports):
            raise ConfigurationError(" / ".join(ports), f"must differ, not {tuple(ports.values())}")

    def staging_on(self, kind: DeviceKind) -> Staging:
        """Raises ConfigurationError when staging memory holds fewer than two slots."""
        staging_bytes = self.staging_bytes or self.staging_defaults[kind]
        slot_bytes = self.slot_bytes or min(SLOT_BYTES[kind], staging_bytes // 2)
        if staging_bytes < 2 * slot_bytes:
            raise ConfigurationError(
                "--staging-bytes",
                f"must hold at least two slots of --slot-bytes ({2 * slot_bytes} bytes), not {staging_bytes}",
            )
        return Staging(staging_bytes, slot_bytes)

    def risks(self) -> list[str]:
        """What is unsafe about these options, in sentences; nothing where only this machine is listened to."""
        if self.tls_cert_file is not None or is_only_of_this_machine(self.host):
            return []
        return [
            f"whoever reaches {self.host}, port {self.control_port}, may give this node work and read what passes there: "
            "--tls-cert-file"
        ]

    @property
    def control_address(self) -> str:
        """host:port of the gRPC server as other machines dial it."""
        return f"{self.advertise_address}:{self.control_port}"


def _advertised(host: str) -> str:
    if host in WILDCARD_HOSTS:
        raise ConfigurationError(
            "--advertise-address", f"is required when --host is {host}: others cannot dial a wildcard address"
        )
    return host


@dataclass(frozen=True)
class PrefillOptions(NodeOptions):
    role = Role.PREFILL
    staging_defaults: ClassVar[Mapping[DeviceKind, int]] = {"cpu": 256 * MIB, "cuda": 4 * GIB}
    key_file: str = option(help="file with this node's key, or with the master keys: what tickets are checked with")
    prompts_share_steps = False  # each first token is awaited by a decode node, which no other prompt here slows down

    def staging_on(self, kind: DeviceKind) -> Staging:
        """By itself no more than the sending slots that there may be. Raises ConfigurationError also where more was asked for."""
        staging = super().staging_on(kind)
        most_bytes = SENDING_SLOTS_AT_MOST * staging.slot_bytes
        if self.staging_bytes is not None and self.staging_bytes > most_bytes:
            raise ConfigurationError(
                "--staging-bytes",
                f"must hold at most {SENDING_SLOTS_AT_MOST} slots of --slot-bytes ({most_bytes} bytes), not "
                f"{self.staging_bytes}; larger slots allow more",
            )
        return staging._replace(staging_bytes=min(staging.staging_bytes, most_bytes))


@dataclass(frozen=True)
class DecodeOptions(NodeOptions):
    role = Role.DECODE
    staging_defaults: ClassVar[Mapping[DeviceKind, int]] = {"cpu": 512 * MIB, "cuda": 4 * GIB}

    quarantine_arenas: int = option(
        2, "most arenas of lost peers that wait for proof that nothing can write into them", minimum=1, maximum=64
    )
    min_lane_gigabytes_per_second: float = option(
        0.0,
        "a lane that was measured slower is not used, and with no other this node is not ready; 0: any will do",
        minimum=0,
    )
