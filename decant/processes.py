"""The three long-lived processes: parse their options, see that their ports are free, hand over to the service.

Must not know: what a service does once it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from foundation.config import field_names
from foundation.option_sources import Parsed, parse
from foundation.ports import require_dialable, require_free_port
from node.options import DecodeOptions, NodeOptions, PrefillOptions
from router.options import RouterOptions

ALL_FIELDS = frozenset({*field_names(PrefillOptions), *field_names(DecodeOptions), *field_names(RouterOptions)})
"""One environment may serve several processes: what is another's option is no typo."""


def prefill(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parse(
        PrefillOptions,
        arguments,
        environment,
        program="decant prefill",
        description="A prefill node: computes the KV of prompts and sends it to decode nodes.",
        other_fields=ALL_FIELDS,
    )
    if _printed(parsed):
        return 0
    require_node_ports(parsed.options)
    from prefill_node.main import run

    return run(parsed.options)


def decode(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parse(
        DecodeOptions,
        arguments,
        environment,
        program="decant decode",
        description="A decode node: owns requests, takes KV from prefill nodes, streams tokens.",
        other_fields=ALL_FIELDS,
    )
    if _printed(parsed):
        return 0
    require_node_ports(parsed.options, data_port_may_linger=True)
    from decode_node.main import run

    return run(parsed.options)


def router(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parse(
        RouterOptions,
        arguments,
        environment,
        program="decant router",
        description="A router: the OpenAI API and gRPC in front of prefill and decode nodes.",
        other_fields=ALL_FIELDS,
    )
    if _printed(parsed):
        return 0
    require_router_ports(parsed.options)
    from router.main import run

    return run(parsed.options)


def require_node_ports(options: NodeOptions, *, data_port_may_linger: bool = False) -> None:
    require_dialable("--advertise-address", options.advertise_address, options.registry)
    require_free_port("--control-port", options.host, options.control_port)
    require_free_port("--data-port", options.host, options.data_port, may_linger=data_port_may_linger)
    require_free_port("--http-port", options.host, options.http_port)


def require_router_ports(options: RouterOptions) -> None:
    require_free_port("--http-port", options.host, options.http_port)
    require_free_port("--grpc-port", options.host, options.grpc_port)
    if options.has_own_registry_port:
        require_free_port("--registry-port", options.host, options.registry_port)


def _printed(parsed: Parsed[PrefillOptions] | Parsed[DecodeOptions] | Parsed[RouterOptions]) -> bool:
    if parsed.print_config:
        sys.stdout.write(parsed.describe() + "\n")
    return parsed.print_config
