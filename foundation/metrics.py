"""Every metric that Decant exports, prefix `decant_`, one object for each process.

`main` makes one `RouterMetrics` or `NodeMetrics`, hands it down, and serves `exposition()` under /metrics. Every label value
exists from the start, so that a rate over a failure that never happened reads 0 and not "no data". A reason that is not
declared here is counted as `other`: labels never grow with what a peer or a client sends.

Must not know: who counts, and when.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from foundation.ticket import TicketRefusal
from foundation.tls import TLS_FAILURES

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double every counter's lines and nothing reads them

OTHER = "other"

FINISH_REASONS = ("stop", "length", "cancelled", "failed")
NOT_READY_REASONS = (
    *("loading_model", "engine_stalled", "data_plane", "quarantine_full", "draining"),
    *("no_decode_node", "no_usable_decode_node"),
)
CERTIFICATE_PLANES = ("front", "internal")
KV_BLOCK_STATES = ("free", "cached", "in_use")
KV_TRANSFER_STATES = ("asked", "queued", "reserved", "landing", "sending", "sealed", "committed", "ending")
STAGING_SLOT_STATES = ("free", "posted", "landed", "scattering", "sending", "quarantined")
GRAPH_MODES = ("full", "piecewise", "eager")
GRAPH_FALLBACK_REASONS = ("prompt_chunks", "silent_rows", "no_bucket", "dearer")
SCHEDULER_SKIP_REASONS = ("no_free_blocks", "token_budget", "max_num_seqs", "blocks_settling")
LOCAL_PREFILL_REASONS = (
    *("no_prefill_node", "prefill_not_ready", "prefill_incompatible", "disaggregation_off", "decode_is_faster"),
    "prompt_logprobs",
    *(
        "lane_broken",
        "refused",
        "dial_refused",
        "silent",
        "prefill_stalled",
        "transfer_stalled",
        "peer_closed",
        "deadline",
    ),
    "transfer_failed",
)
SESSION_END_REASONS = (
    *("silent", "dial_refused", "unresponsive", "idle", "closed_by_peer", "peer_closed", "peer_restarted", "replaced"),
    *("endpoint_closed", "endpoint_failed", "session_closed", "gone_with_credits", "control_queue_full"),
)
LANE_FAILURE_REASONS = (
    *("unreachable", "dial_timeout", "not_expected", "garbage", "bad_address", "address_in_use", "ucx_unavailable"),
    *("lane_cannot_fence", "self_test_failed", "self_test_timeout", "staging_exhausted", "quarantine_full"),
    "credit_numbers_exhausted",
)
TRANSFER_FAILURE_REASONS = (
    *("bad_digest", "bad_length", "message_truncated", "bad_manifest", "bad_offer", "bad_credits", "bad_first_token"),
    *("sealed_before_first_token", "owner_changed", "credits_unused", "superseded", "lease", "gone", "refused"),
    *("prefill_stalled", "transfer_stalled", "deadline", "unavailable", "cancelled", "engine_error", "prefill_failed"),
    "too_many_parcels",
    *SESSION_END_REASONS,
    *LANE_FAILURE_REASONS,
)
_MESSAGES = (
    *(
        "ask",
        "accepted",
        "refused",
        "offer",
        "credits",
        "firsttoken",
        "sealed",
        "committed",
        "released",
        "abort",
        "failed",
    ),
    *(
        "drained",
        "gone",
        "sync",
        "hello",
        "hellorefused",
        "lanereport",
        "heartbeat",
        "sessionclosed",
        "wrongincarnation",
    ),
)
DROPPED_REASONS = (
    *("stale_attempt", "stale_position", "position_gap", "request_over", "unknown_transfer", "duplicate"),
    *("wrong_incarnation", "late_wrong_incarnation", "repeated_hello", "unexpected_refusal", "no_session"),
    *("stream_lost", "resolved_already", "late_parcel", "late_session_closed", "failed_after_sealed"),
    *(f"{how}_{message}" for how in ("late", "unknown", "unexpected") for message in _MESSAGES),
    *(refusal.value for refusal in TicketRefusal),
)

PLACEMENT_REASONS = (
    *("prefill_is_faster", "decode_is_faster", "unmeasured", "always"),
    *("no_prefill_node", "prefill_not_ready", "prefill_incompatible", "disaggregation_off", "lane_broken", "fork"),
    "prompt_logprobs",
)
LANES_SHOWN = 64
"""Nodes come and go under new names: only the lanes that were measured last are exported."""
PREDICTION_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)

LATENCY_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class CounterByReason:
    """A counter with one label whose values are all known from the start."""

    def __init__(
        self, name: str, help: str, reasons: Iterable[str], registry: CollectorRegistry, label: str = "reason"
    ) -> None:
        counter = Counter(name, help, [label], registry=registry)
        self._children = {reason: counter.labels(reason) for reason in (*reasons, OTHER)}

    def count(self, reason: str, amount: float = 1) -> None:
        self._children.get(reason, self._children[OTHER]).inc(amount)


class GaugeByState:
    """A gauge with one label whose values are all known from the start."""

    def __init__(
        self, name: str, help: str, states: Iterable[str], registry: CollectorRegistry, label: str = "state"
    ) -> None:
        gauge = Gauge(name, help, [label], registry=registry)
        self._children = {state: gauge.labels(state) for state in states}

    def follow(self, state: str, read: Callable[[], float]) -> None:
        """From now on `read` is asked whenever the metrics are. Raises KeyError for a state that was not declared."""
        self._children[state].set_function(read)

    def set(self, **amounts: float) -> None:
        """Raises KeyError for a state that was not declared."""
        for state, amount in amounts.items():
            self._children[state].set(amount)

    def set_all(self, amounts: Mapping[str, float]) -> None:
        """Those that are not named are 0; what was not declared counts as `other`, if that is a state."""
        undeclared = max((amount for name, amount in amounts.items() if name not in self._children), default=0)
        for state, child in self._children.items():
            child.set(undeclared if state == OTHER else amounts.get(state, 0))


class LaneSpeeds:
    """The speed of each lane that was measured of late; at most LANES_SHOWN, the oldest measure goes first."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(name, help, ["peer", "lane"], registry=registry)
        self._shown: OrderedDict[tuple[str, str], None] = OrderedDict()

    def set(self, peer: str, lane: str, gigabytes_per_second: float) -> None:
        self._shown[peer, lane] = None
        self._shown.move_to_end((peer, lane))
        self._gauge.labels(peer, lane).set(gigabytes_per_second)
        while len(self._shown) > LANES_SHOWN:
            (oldest, _) = self._shown.popitem(last=False)
            self._gauge.remove(*oldest)


class ServingMetrics:
    """What router and nodes both measure, each from where it stands."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="", registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival here to its first token", LATENCY_BUCKETS_S
        )
        self.inter_token_latency_seconds = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one answer", LATENCY_BUCKETS_S
        )
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival here to its end", LATENCY_BUCKETS_S
        )
        self.request_success_total = self._by_reason(
            "request_success_total", "Requests that ended, by finish reason", FINISH_REASONS
        )
        self.requests_running = self._gauge("requests_running", "Requests being computed or streamed")
        self.requests_waiting = self._gauge("requests_waiting", "Requests waiting for their turn")
        self.prompt_tokens_total = self._counter("prompt_tokens_total", "Prompt tokens of requests taken in")
        self.generation_tokens_total = self._counter("generation_tokens_total", "Tokens generated")
        self.dropped_total = self._by_reason(
            "dropped_total", "Late, repeated or foreign messages that changed nothing", DROPPED_REASONS
        )
        self.tls_failures_total = self._by_reason(
            "tls_failures_total",
            "TLS handshakes that failed: dialled from here, and of HTTPS clients; gRPC servers cannot tell",
            TLS_FAILURES,
        )
        self.tls_certificate_not_after_seconds = GaugeByState(
            "decant_tls_certificate_not_after_seconds",
            "When this process's certificate expires, in seconds since 1970; 0: it has none",
            CERTIFICATE_PLANES,
            self.registry,
            label="plane",
        )
        self.ready = self._gauge("ready", "1 while /health says ready, else 0")
        self.not_ready_seconds = GaugeByState(
            "decant_not_ready_seconds",
            "For how long something has kept this process from being ready; 0: it does not",
            (*NOT_READY_REASONS, OTHER),
            self.registry,
            label="reason",
        )
        self.registry_up = self._gauge("registry_up", "1 while the registry answers, else 0; losing it stops nothing")

    def show_problems(self, ages_s: Mapping[str, float]) -> None:
        """What keeps this process from being ready, each with its age in seconds; nothing: it is ready."""
        self.ready.set(not ages_s)
        self.not_ready_seconds.set_all({reason: max(age_s, 1e-3) for reason, age_s in ages_s.items()})

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"decant_{name}", help, buckets=tuple(buckets), registry=self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"decant_{name}", help, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"decant_{name}", help, registry=self.registry)

    def _by_reason(self, name: str, help: str, reasons: Iterable[str]) -> CounterByReason:
        return CounterByReason(f"decant_{name}", help, reasons, self.registry)

    def _by_state(self, name: str, help: str, states: Iterable[str]) -> GaugeByState:
        return GaugeByState(f"decant_{name}", help, states, self.registry)

    def _by_role(self, name: str, help: str) -> GaugeByState:
        return GaugeByState(f"decant_{name}", help, ("prefill", "decode"), self.registry, label="role")


class RouterMetrics(ServingMetrics):
    """A router's metrics: requests as clients see them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests_refused_total = self._by_reason(
            "requests_refused_total",
            "Requests refused before they started",
            (
                *("invalid", "overloaded", "no_node", "draining", "deadline_unmeetable"),
                *("missing_api_key", "invalid_api_key", "insufficient_scope"),
                *("too_many_connections", "body_too_slow", "malformed_http"),
            ),
        )
        self.request_attempts_total = self._by_reason(
            "request_attempts_total",
            "Assignments to decode nodes, by why",
            ("first", "node_lost", "node_refused", "node_draining"),
        )
        self.placements_total = self._by_reason(
            "placements_total", "Where prompts were sent to be computed, by why", PLACEMENT_REASONS
        )
        self.predicted_time_to_first_token_seconds = self._histogram(
            "predicted_time_to_first_token_seconds", "The cost model's prediction of the way taken", LATENCY_BUCKETS_S
        )
        self.prediction_ratio = self._histogram(
            "prediction_ratio", "Time to first token as it was, over its prediction", PREDICTION_RATIO_BUCKETS
        )
        self.nodes = self._by_role("nodes", "Nodes that this router is attached to")
        self.nodes_usable = self._by_role("nodes_usable", "Nodes to which this router gives work now")


class NodeMetrics(ServingMetrics):
    """A node's metrics: engine, KV blocks and transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.step_tokens = self._histogram("step_tokens", "Tokens computed in one engine step", STEP_TOKEN_BUCKETS)
        self.scheduler_skips_total = self._by_reason(
            "scheduler_skips_total", "Times that a request was passed over in a step", SCHEDULER_SKIP_REASONS
        )
        self.graph_steps_total = CounterByReason(
            "decant_graph_steps_total",
            "Steps on a GPU, by the way they ran",
            GRAPH_MODES,
            self.registry,
            label="mode",
        )
        self.graph_fallbacks_total = self._by_reason(
            "graph_fallbacks_total", "Steps on a GPU that were not one captured graph, and why", GRAPH_FALLBACK_REASONS
        )
        self.graph_padding_tokens_total = self._counter(
            "graph_padding_tokens_total", "Tokens computed on a GPU only because a graph has one size"
        )
        self.prefix_cached_tokens_total = self._counter(
            "prefix_cached_tokens_total", "Prompt tokens whose KV was found in this node's prefix cache"
        )
        self.kv_transfer_bytes_total = self._counter(
            "kv_transfer_bytes_total", "KV payload bytes that crossed the data plane, at this end"
        )
        self.kv_early_parcels_total = self._counter(
            "kv_early_parcels_total",
            "Parcels that left this node while the step that computes their positions still ran",
        )
        self.kv_transfer_seconds = self._histogram(
            "kv_transfer_seconds", "From a transfer's first Ask to its end", TRANSFER_BUCKETS_S
        )
        self.kv_transfer_failures_total = self._by_reason(
            "kv_transfer_failures_total", "Transfers that ended without all their KV", TRANSFER_FAILURE_REASONS
        )
        self.data_port_refusals = self._gauge(
            "data_port_refusals", "Callers on the data port, since the start, that named no expected session"
        )
        self.kv_recomputed_tokens_total = self._counter(
            "kv_recomputed_tokens_total", "Prompt tokens computed here because a transfer did not bring their KV"
        )
        self.local_prefill_total = self._by_reason(
            "local_prefill_total",
            "Prompts computed on the decode node instead of a prefill node",
            LOCAL_PREFILL_REASONS,
        )
        self.kv_blocks = self._by_state("kv_blocks", "KV blocks, by what they hold", KV_BLOCK_STATES)
        self.staging_slots = self._by_state("staging_slots", "Slots of staging memory", STAGING_SLOT_STATES)
        self.kv_lane_gigabytes_per_second = LaneSpeeds(
            "decant_kv_lane_gigabytes_per_second",
            f"Speed of the lane to a peer, measured when it was paired (the last {LANES_SHOWN})",
            self.registry,
        )
        self.kv_transfers = self._by_state("kv_transfers", "KV transfers in flight at this end", KV_TRANSFER_STATES)
        self.quarantined_arenas = self._gauge(
            "quarantined_arenas", "Arenas of lost peers that wait for proof that nothing can write into them"
        )
        self.broken_lanes = self._gauge("broken_lanes", "Prefill nodes from which no KV comes to this decode node now")
        self.preemptions_total = self._counter(
            "preemptions_total", "Running requests that gave their KV blocks up to others, to be computed again"
        )
