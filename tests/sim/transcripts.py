# ruff: noqa: T201 - a verb that prints its figures
"""Transcripts: instructive runs of the protocol as text, replayed by a test and rewritten by this verb.

A transcript (tests/transcripts/*.txt) holds comments (`#`), one `world` line (fields of Plan and Budget), and commands; all
other lines are what the machines said, and are written here:

    > ACTION            do this now: the first possible action whose text begins so
    > until ACTION      let things happen by themselves, first things first, until this is possible; then do it
    > to rest           let things happen by themselves until nothing is left to happen

    python tests/sim/transcripts.py            rewrites all of them; the diff is the review
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from transfer_actions import apply
from transfer_invariants import check
from transfer_world import (
    Action,
    Budget,
    Content,
    Message,
    Moving,
    Plan,
    Receive,
    World,
    actions,
    at_rest,
    is_progress,
    new_world,
    transfer,
)

from foundation.ids import TransferId
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.port import SettledToken
from kv_transfer.protocol.effects import Send
from kv_transfer.protocol.messages import Credit, Hello, SealedParcel, SyncedTransfer

FOLDER = Path(__file__).parent.parent / "transcripts"
STEPS_LIMIT = 300
BORING = {
    "peer",
    "nonce",
    "slot_bytes",
    "control_address",
    "data_address",
    "ticket",
    "sampling",
    "choices",
    "deadline_s",
    "settled",
    "gigabytes_per_second",
    "digest_of_all",
    "from_position",
    "length",
    "parcel_index",
}


def replay(text: str) -> str:
    """The transcript as the machines would write it now."""
    lines: list[str] = []
    world: World | None = None
    for line in text.splitlines():
        if line.startswith("world"):
            world = _parse_world(line)
        elif line.startswith(">"):
            assert world is not None, "a transcript begins with its world"
            if lines and lines[-1]:
                lines.append("")
            lines.append(line)
            world = _command(world, line[1:].strip(), lines)
            continue
        elif not line.startswith("#"):
            continue
        lines.append(line)
    assert world is not None
    lines += ["", f"rest: {'yes' if at_rest(world) else 'no'}"]
    lines += [f"{name}: {outcome}" for name, outcome in world.outcomes.items()]
    return "\n".join(lines) + "\n"


def _parse_world(line: str) -> World:
    given = dict(word.split("=") for word in line.split()[1:])
    names = given.pop("transfers", "r/1/1").split(",")
    transfers = tuple(transfer(r, int(a), int(t)) for r, a, t in (name.split("/") for name in names))
    plan = {key: value if key == "lane" else int(value) for key, value in given.items() if key not in Budget._fields}
    budget = {key: int(value) for key, value in given.items() if key in Budget._fields}
    return new_world(Plan(transfers, **plan), Budget(**budget))  # type: ignore[arg-type]


def _command(world: World, command: str, lines: list[str]) -> World:
    wanted = command.removeprefix("until ")
    for _ in range(STEPS_LIMIT):
        found = actions(world)
        if command != "to rest":
            for action in found:
                if render_action(world, action).startswith(wanted):
                    return _do(world, action, lines)
            assert command.startswith("until "), f"{command!r} is not possible; possible are: " + "; ".join(
                sorted(render_action(world, action) for action in found)
            )
        progress = sorted((action for action in found if is_progress(action)), key=_order)
        if not progress or (command == "to rest" and at_rest(world)):
            assert command == "to rest", f"{wanted!r} never becomes possible"
            return world
        world = _do(world, progress[0], lines)
    raise AssertionError(f"{command!r} does not end")


ORDER = ("to_p", "to_d", "gathered", "match", "landed", "scattered", "reserved", "sent")


def _order(action: Action) -> tuple[int, str]:
    """Messages first, then data, then the nodes: the order in which an idle system does things."""
    return (ORDER.index(action[0]) if action[0] in ORDER else len(ORDER), str(action))


def _do(world: World, action: Action, lines: list[str]) -> World:
    lines.append(f"  {render_action(world, action)}")
    world, log = apply(world, action)
    check(world)
    lines += [f"      {side} {render(what)}" for side, kind, what in log if kind == "effect"]
    return world


def render_action(world: World, action: Action) -> str:
    match action:
        case ("to_p" | "repeat_to_p" as verb,):
            return f"{'P hears' if verb == 'to_p' else 'P hears early'} {render(world.to_p[0].message)}"
        case ("to_d" | "repeat_to_d" as verb,):
            return f"{'D hears' if verb == 'to_d' else 'D hears early'} {render(world.to_d[0].message)}"
        case (verb, *rest):
            return " ".join([str(verb).replace("_", " "), *(render(item) for item in rest)])
        case _:
            raise AssertionError(action)


def render(item: Any) -> str:
    """One short line, without what every line would say."""
    match item:
        case Send():
            return f"says {render(item.envelope.message)}"
        case Hello():
            return f"Hello session={item.session}"
        case TransferId():
            return str(item)
        case ParcelName():
            return f"[{item.first_position}:{item.end_position}]"
        case Credit():
            return f"#{item.number}"
        case SealedParcel():
            return f"{render(item.name)}={item.digest}"
        case SyncedTransfer():
            return f"{item.transfer}:{item.state},credits={item.credits},sealed={item.sealed},token={item.first_token}"
        case Receive():
            return f"credit #{item.credit} in slot {item.slot}"
        case Moving():
            return render(item.receive)
        case Message():
            return f"credit #{item.credit}"
        case SettledToken():
            return str(item.token_id)
        case Content():
            return f"parcel {item.parcel_index}"
        case Enum():
            return item.name
        case tuple():
            return "[" + " ".join(render(part) for part in item) + "]"
        case _ if is_dataclass(item):
            shown = [(field.name, getattr(item, field.name)) for field in fields(item) if field.name not in BORING]
            return " ".join(
                [type(item).__name__, *(_render_field(name, value) for name, value in shown if value != "")]
            )
        case _:
            return str(item)


def _render_field(name: str, value: Any) -> str:
    return render(value) if name in ("transfer", "reason", "ask") else f"{name}={render(value)}"


def main() -> int:
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(replay(path.read_text()))
        print(path.relative_to(FOLDER.parent.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
