"""Options of a router; names are vLLM's where it has them. An instance is checked and frozen (see `foundation.config`)."""

from __future__ import annotations

from dataclasses import dataclass

from foundation.config import Options, derived, option
from foundation.errors import ConfigurationError
from foundation.ports import is_only_of_this_machine
from foundation.tls import TlsFiles, front_files, internal_files
from foundation.tracing import require_collector_address

KIB, MIB = 2**10, 2**20
HIGHEST_PORT = 65535
EMBEDDED = "embedded"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True)
class RouterOptions(Options):
    # The model.
    model: str = option(help="Hugging Face folder, or hub id, whose tokenizer and chat template are used")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    served_model_name: str | None = option(None, "the id that clients use (default: the folder's name)")
    chat_template: str | None = option(None, "file with a chat template to be used instead of the model's own")
    tool_call_parser: str = option(
        "hermes", "how the model writes tool calls, by vLLM's names", choices=("hermes", "llama3_json", "mistral")
    )
    max_model_len: int | None = option(
        None, "longest prompt + answer in tokens (default: what config.json says)", minimum=2, sized=True
    )

    # The service.
    host: str = option("127.0.0.1", "address to listen on")
    http_port: int = option(
        8000, "port of the OpenAI API, /live, /health and /metrics", minimum=1, maximum=HIGHEST_PORT
    )
    grpc_port: int = option(9000, "port of the gRPC API and of the embedded registry", minimum=1, maximum=HIGHEST_PORT)
    registry: str = option(EMBEDDED, "embedded, or redis://...")
    key_file: str = option(help="file with the master keys that sign tickets")
    registry_port: int = derived(
        lambda options: options.grpc_port + (1 if options.tls_cert_file or options.ssl_certfile else 0),
        "--grpc-port, and one more with --tls-cert-file or --ssl-certfile",
        "port of the embedded registry",
        minimum=1,
        maximum=HIGHEST_PORT,
    )

    # Who may ask, and how much.
    api_key_file: str | None = option(
        None, "file of API keys that are let in (decant api-key makes it; default: none, everybody is)"
    )
    ssl_certfile: str | None = option(None, "certificate of the OpenAI API and the gRPC API (default: no TLS)")
    ssl_keyfile: str | None = option(None, "its private key (default: in --ssl-certfile)")
    ssl_ca_certs: str | None = option(
        None, "authority of clients' certificates, without which nobody is then let in (default: none are asked for)"
    )
    tls_cert_file: str | None = option(
        None, "this process's certificate among routers and nodes, all of which then ask each other for one"
    )
    tls_key_file: str | None = option(None, "its private key")
    tls_ca_file: str | None = option(None, "the authority that signs routers and nodes")
    tls_server_name: str | None = option(
        None, "name in every node's and router's certificate (default: the address that is dialled)"
    )
    max_body_bytes: int = option(4 * MIB, "largest request body", minimum=1024, sized=True)
    max_header_bytes: int = option(16 * KIB, "longest line of a request's head", minimum=1024, sized=True)
    max_connections: int = option(
        8192, "HTTP connections, and gRPC calls, at once; more are refused with 503", minimum=1, maximum=1_000_000
    )
    timeout_keep_alive_s: float = option(
        75.0, "a connection without a whole head of a request for so long is closed", minimum=1, maximum=86400
    )
    request_read_timeout_s: float = option(30.0, "time for a request's body to arrive", minimum=0.1, maximum=3600)
    max_waiting_requests: int = option(
        1024, "requests that may wait for a node; more are refused with 503", minimum=1, maximum=1_000_000
    )
    max_waiting_tokens: int = option(
        16 * MIB, "prompt tokens that may wait for their first token; more are refused with 503", minimum=1, sized=True
    )
    disaggregate: str = option(
        "always",
        "where prompts are computed: on prefill nodes, on decode nodes, or where it is predicted to be faster",
        choices=("auto", "always", "never"),
    )
    request_timeout_s: float = option(600.0, "time a request may take in all", minimum=0.1, maximum=86400)
    silence_limit_s: float = option(2.0, "a node that says nothing for so long is given up", minimum=0.1, maximum=600)
    heartbeat_s: float = option(0.5, "time between two heartbeats", minimum=0.01, maximum=60)
    drain_grace_s: float = option(60.0, "after SIGTERM: time for requests in flight to end", minimum=0, maximum=3600)
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector (gRPC) to which traces are sent: http://host:4317 (default: none are made)"
    )
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("auto", "auto: console on a terminal, else json", choices=("auto", "json", "console"))

    def check(self) -> None:
        require_collector_address(self.otlp_traces_endpoint)
        if self.http_port == self.grpc_port:
            raise ConfigurationError("--grpc-port", f"must differ from --http-port ({self.http_port})")
        if self.registry == EMBEDDED and self.registry_port == self.http_port:
            raise ConfigurationError("--registry-port", f"must differ from --http-port ({self.http_port})")
        protected = self.tls_cert_file or self.ssl_certfile
        if self.registry == EMBEDDED and protected and self.registry_port == self.grpc_port:
            raise ConfigurationError(
                "--registry-port",
                f"must differ from --grpc-port ({self.grpc_port}): under TLS clients and nodes are let in by other certificates",
            )
        self.front_files()
        internal_files(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        if self.registry != EMBEDDED and not self.registry.startswith(REDIS_SCHEMES):
            raise ConfigurationError("--registry", f"must be embedded or redis://host:port, not {self.registry!r}")
        if self.heartbeat_s > self.silence_limit_s / 2:
            raise ConfigurationError(
                "--heartbeat-s",
                f"must be at most half of --silence-limit-s ({self.silence_limit_s}), not {self.heartbeat_s}",
            )

    def risks(self, *, api_keys_required: bool) -> list[str]:
        """What is unsafe about these options, in sentences; nothing where only this machine is listened to."""
        if is_only_of_this_machine(self.host):
            return []
        front = f"{self.host} (ports {self.http_port} and {self.grpc_port})"
        found = []
        if self.ssl_certfile is None:
            found.append(
                f"what clients ask, are told, and show as API keys can be read on its way to {front}: --ssl-certfile"
            )
        if not api_keys_required and self.ssl_ca_certs is None:
            found.append(f"whoever reaches {front} may ask, look at requests and withhold nodes: --api-key-file")
        if self.tls_cert_file is None:
            if self.registry == EMBEDDED and not api_keys_required:
                found.append(
                    f"whoever reaches port {self.registry_port} may announce a node, which is then given prompts: "
                    "--tls-cert-file"
                )
            found.append("prompts and answers can be read on their way to nodes: --tls-cert-file")
        return found

    def front_files(self) -> TlsFiles | None:
        return front_files(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @property
    def has_own_registry_port(self) -> bool:
        return self.registry == EMBEDDED and self.registry_port != self.grpc_port
