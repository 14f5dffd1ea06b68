"""`decant chat`, `decant complete` and `decant why`: a router spoken to from a terminal, through `decant.client`.

Must not know: anything but the client and its key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence

from decant_proto.v1 import admin_pb2

from decant.client import ApiError, Client, Piece, Sampling, Tls
from foundation.api_keys import VARIABLE, api_key_of
from foundation.errors import ConfigurationError

DEFAULT_ADDRESS = "127.0.0.1:9000"


def complete(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = _parser("complete", "continue a text; it is read from standard input when none is given", environment)
    _add_sampling(parser)
    parser.add_argument("text", nargs="*")
    asked = parser.parse_args(arguments)
    text = " ".join(asked.text) or sys.stdin.read()
    with _client(asked, environment) as client:
        return _show(client.generate(text, stop=asked.stop, **_sampling(asked)))


def chat(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = _parser("chat", "talk to the model; an empty line or end of input ends it", environment)
    _add_sampling(parser)
    parser.add_argument("--system", help="the system message")
    asked = parser.parse_args(arguments)
    history = [("system", asked.system)] if asked.system else []
    with _client(asked, environment) as client:
        while line := _next_line():
            history.append(("user", line))
            said: list[str] = []
            code = _show(_kept(client.generate(history, stop=asked.stop, **_sampling(asked)), said))
            if code:
                return code
            history.append(("assistant", "".join(said)))
    return 0


def why(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = _parser("why", "what a request waits for, on whom, and since when", environment)
    parser.add_argument(
        "request_id", nargs="?", default="", help="as in a response, or your x-request-id (default: all)"
    )
    asked = parser.parse_args(arguments)
    try:
        with _client(asked, environment) as client:
            found = client.requests(asked.request_id)
    except ApiError as error:
        return _failed(error)
    if not found:
        what = f"no request {asked.request_id} is" if asked.request_id else "no requests are"
        sys.stdout.write(f"{what} in flight at {asked.router}\n")
        return 1 if asked.request_id else 0
    for view in found:
        sys.stdout.write(explain(view) + "\n")
    return 0


def explain(view: admin_pb2.RequestView) -> str:
    """One request's state as sentences."""
    waits = f"waits on {view.waits_on} for its {view.waits_for.replace('_', ' ')}"
    if not view.waits_on:
        waits = f"has no decode node: {view.waits_for}"
    lines = [f"{view.request_id} {waits}, {view.since_s:.1f} s since it came"]
    if view.waits_on:
        by = "there" if view.computed_on == view.waits_on else f"by {view.computed_on}, whose KV is transferred"
        lines.append(f"  prompt: {view.prompt_tokens} tokens, computed {by} ({view.placed_because})")
    if view.HasField("expected_s"):
        lines.append(f"  first token predicted after {view.expected_s:.3f} s")
    lines.append(f"  answer: {view.answer_tokens} tokens so far, attempt {view.attempt}")
    lines += [f"  lost before: {lost}" for lost in view.lost]
    return "\n".join(lines)


def _parser(name: str, help: str, environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"decant {name}", description=help)
    address = environment.get("DECANT_ROUTER", DEFAULT_ADDRESS)
    parser.add_argument("--router", default=address, metavar="HOST:PORT", help=f"its --grpc-port (default {address})")
    parser.add_argument("--tls", action="store_true", help="the router has a certificate of a public authority")
    parser.add_argument("--ca-file", metavar="FILE", help="the router has a certificate of this authority")
    parser.add_argument("--cert-file", metavar="FILE", help="our own certificate, where the router asks for one")
    parser.add_argument("--cert-key-file", metavar="FILE", help="its private key")
    parser.epilog = (
        f"An API key is taken from {VARIABLE}: on a command line every process of this machine could read it."
    )
    return parser


def _client(asked: argparse.Namespace, environment: Mapping[str, str]) -> Client:
    tls = None
    if asked.tls or asked.ca_file or asked.cert_file:
        tls = Tls(asked.ca_file, asked.cert_file, asked.cert_key_file)
    try:
        return Client(asked.router, api_key=api_key_of(environment), tls=tls)
    except OSError as error:
        raise ConfigurationError(
            "--ca-file, --cert-file, --cert-key-file", f"{error.filename}: {error.strerror}"
        ) from None


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT")


def _sampling(asked: argparse.Namespace) -> Sampling:
    sampling = Sampling()
    if asked.max_tokens is not None:
        sampling["max_tokens"] = asked.max_tokens
    if asked.temperature is not None:
        sampling["temperature"] = asked.temperature
    if asked.top_p is not None:
        sampling["top_p"] = asked.top_p
    if asked.seed is not None:
        sampling["seed"] = asked.seed
    return sampling


def _next_line() -> str:
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    return sys.stdin.readline().strip()


def _kept(pieces: Iterable[Piece], said: list[str]) -> Iterable[Piece]:
    for piece in pieces:
        said.append(piece.text)
        yield piece


def _show(pieces: Iterable[Piece]) -> int:
    try:
        for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except ApiError as error:
        return _failed(error)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    sys.stdout.write("\n")
    return 0


def _failed(error: ApiError) -> int:
    hint = " (may succeed later)" if error.retryable else ""
    sys.stderr.write(f"decant: {error}{hint}\n")
    return 1
