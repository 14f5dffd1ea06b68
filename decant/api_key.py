"""`decant api-key add|list|remove`: the file of API keys of a router, which holds salted digests and names.

A new key is written to standard output once, alone, so that it can go to where it is kept; a router that serves takes a changed
file at once.

Must not know: who uses the keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundation.api_keys import Scope, add_api_key, read_api_keys, remove_api_key

FILE_VARIABLE = "DECANT_API_KEY_FILE"


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Raises ConfigurationError naming what is wrong."""
    asked = _parser(environment.get(FILE_VARIABLE)).parse_args(arguments)
    path = Path(asked.api_key_file).expanduser()
    match asked.verb:
        case "add":
            sys.stdout.write(add_api_key(path, asked.name, Scope(asked.scope)) + "\n")
            sys.stderr.write(f"decant: this is the only time that the key of {asked.name} is shown\n")
        case "list":
            for key in read_api_keys(path).keys:
                sys.stdout.write(f"{key.name} {key.scope.value}\n")
        case "remove":
            remove_api_key(path, asked.name)
            sys.stderr.write(f"decant: the key of {asked.name} opens nothing any more\n")
        case verb:
            raise AssertionError(f"the parser knows no {verb}")
    return 0


def _parser(default_file: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="decant api-key", description="the API keys that a router lets in")
    verbs = parser.add_subparsers(dest="verb", required=True)
    add = verbs.add_parser("add", help="draw a key and show it once")
    remove = verbs.add_parser("remove", help="let a key in no more")
    verbs_with_file = (add, remove, verbs.add_parser("list", help="names and scopes"))
    for verb in verbs_with_file:
        verb.add_argument(
            "--api-key-file", default=default_file, required=default_file is None, help=f"(default: {FILE_VARIABLE})"
        )
    for verb in (add, remove):
        verb.add_argument("name", metavar="NAME", help="what the key is called in logs")
    add.add_argument(
        "--scope",
        choices=[scope.value for scope in Scope],
        default=Scope.INFERENCE.value,
        help="inference: ask; node: announce a node to an embedded registry; admin: all",
    )
    return parser
