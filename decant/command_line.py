"""`decant COMMAND`: picks the command, and turns what stops a start into one message.

Exit codes: 0 served and stopped in order, 1 something failed, 2 a setting is wrong (the message names it).

Commands are imported when they are called: `decant router` must run where torch is not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from foundation.config import nearest
from foundation.errors import StartError

Command = Callable[[Sequence[str], Mapping[str, str]], int]


def _up(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.up import command

    return command(arguments, environment)


def _prefill(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.processes import prefill

    return prefill(arguments, environment)


def _decode(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.processes import decode

    return decode(arguments, environment)


def _router(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.processes import router

    return router(arguments, environment)


def _doctor(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.doctor import command

    return command(arguments, environment)


def _api_key(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.api_key import command

    return command(arguments, environment)


def _complete(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.talk import complete

    return complete(arguments, environment)


def _chat(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.talk import chat

    return chat(arguments, environment)


def _why(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.talk import why

    return why(arguments, environment)


def _new_key(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.new_key import command

    return command(arguments, environment)


def _bench(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from decant.bench_graphs import command

    return command(arguments, environment)


COMMANDS: dict[str, tuple[Command, str]] = {
    "up": (_up, "serve a model on this machine: router, prefill node and decode node"),
    "prefill": (_prefill, "run a prefill node"),
    "decode": (_decode, "run a decode node"),
    "router": (_router, "run a router: OpenAI and gRPC front door"),
    "new-key": (_new_key, "draw a master key into a file, unless one is there"),
    "api-key": (_api_key, "draw, list and remove the API keys that a router lets in"),
    "doctor": (_doctor, "check libraries, UCX lanes, ports, memory limits, the model, and what is unsafe"),
    "bench": (_bench, "bench graphs: what CUDA graphs give on this GPU for a model, and why"),
    "complete": (_complete, "continue a text"),
    "chat": (_chat, "talk to the model"),
    "why": (_why, "say what a request waits for, on whom, and since when"),
}


def usage() -> str:
    lines = [f"  {name:<10}{help}" for name, (_, help) in COMMANDS.items()]
    return "\n".join(
        ["usage: decant COMMAND [options]", "", *lines, "", "decant COMMAND --help lists the options.", ""]
    )


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of one call of `decant`."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        (sys.stdout if arguments else sys.stderr).write(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        sys.stderr.write(f"decant: unknown command {name!r}{nearest(name, COMMANDS)}\n\n{usage()}")
        return 2
    command, _ = COMMANDS[name]
    try:
        return command(rest, environment)
    except StartError as error:
        sys.stderr.write(f"decant {name}: {error}\n")
        return error.exit_code


def main() -> None:
    sys.exit(run(sys.argv[1:], os.environ))
