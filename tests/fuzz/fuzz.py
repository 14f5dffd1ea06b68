# ruff: noqa: T201 - a verb that prints its figures
"""Damaged bytes for every parser of foreign bytes (`parsers`): `python tests/fuzz/fuzz.py [--seconds N] [--seed N]`.

Valid messages are flipped, cut, spliced, repeated and filled with numbers and signs that parsers like to trip over. Each
input depends on the seed, the parser and its number alone, so that a finding can be had again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from parsers import Parser, parsers

STRANGE = (
    b"",
    b"\x00",
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\x80\x80\x80\x80\x10",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"NaN",
    b"null",
    b"[" * 200,
    b'{"a":' * 200,
    b"\xed\xa0\x80",
    b"\\ud800",
    b"&a [*a]",
    b"!!python/object:os.system",
    b"2001-99-99",
    b"\n",
)


@dataclass(frozen=True)
class Finding:
    parser: str
    raw: bytes
    error: str


def damaged(seeds: Sequence[bytes], draw: random.Random) -> bytes:
    raw = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        at, end = sorted((draw.randint(0, len(raw)), draw.randint(0, len(raw))))
        match draw.randrange(7):
            case 0 if raw:
                raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
            case 1 if raw:
                raw[draw.randrange(len(raw))] = draw.randrange(256)
            case 2:
                del raw[at:end]
            case 3:
                raw[at:at] = raw[at:end]
            case 4:
                raw[at : at + draw.randint(0, 4)] = draw.choice(STRANGE)
            case 5:
                other = draw.choice(seeds)
                raw[at:] = other[draw.randint(0, len(other)) :]
            case _:
                raw[at:at] = draw.randbytes(draw.randint(1, 8))
    return bytes(raw)


def try_one(parser: Parser, raw: bytes) -> str:
    """What is wrong with the parser, or ""."""
    try:
        accepted = parser.read(raw)
        assert not (accepted and parser.refuses_damage) or raw in parser.seeds, "damaged bytes were accepted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fuzz(parser: Parser, seed: int, inputs: int | None, until_s: float) -> tuple[int, list[Finding]]:
    """How many inputs were tried, and one finding of each kind."""
    findings: dict[str, Finding] = {}
    number = 0
    while (inputs is None or number < inputs) and time.monotonic() < until_s:
        raw = damaged(parser.seeds, random.Random(f"{seed} {parser.name} {number}"))
        if error := try_one(parser, raw):
            findings.setdefault(error.partition(":")[0], Finding(parser.name, raw, error))
        number += 1
    return number, list(findings.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="in all, shared evenly among the parsers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tried, findings, targets = 0, list[Finding](), parsers()
    for target in targets:
        until_s = time.monotonic() + arguments.seconds / len(targets)
        inputs, found = fuzz(target, arguments.seed, None, until_s)
        print(f"{target.name}: {inputs} inputs, {len(found)} findings", flush=True)
        for finding in found:
            print(f"  {finding.error[:300]}\n    {finding.raw!r}", flush=True)
        tried, findings = tried + inputs, findings + found
    print(f"fuzzed {len(targets)} parsers with {tried} inputs (seed {arguments.seed}): {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
