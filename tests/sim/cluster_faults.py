"""What befalls a simulated cluster: a plan drawn from a seed, and its execution.

At every moment at least two decode nodes are whole and the router reaches them: faults that cost a decode node its attempts
come one at a time, with time for the router to hear of the node again, and at most `MOST_LOSSES` of them, which is one less
than the attempts that a request has. So a client never has cause to see an error. Prefill nodes, and links between prefill
and decode nodes, may all fail at once. Most faults are aimed: they strike the two nodes of a transfer just as one of its
parcels has been gathered, sent, landed or scattered.

Must not know: what the nodes do about it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster_books import Books
from cluster_clock import VirtualLoop
from cluster_effects import KINDS
from cluster_wires import NOBODY, Wires

from kv_transfer.driver import ParcelStage

MOST_LOSSES = 4
RECOVERY_S = 4.0
"""From the end of a fault that cost attempts to the next: dialling anew, and being heard of."""

ROUTER = "router"
AIMED_S = 3.0
AIMED_SHARE = 0.7
GRACE_SHARE = 0.6
"""Of the time until a draining node's process is gone."""
STAGES: tuple[ParcelStage, ...] = ("gathered", "sent", "landed", "scattered")


@dataclass(frozen=True)
class Fault:
    """`where`: one machine, or two. `lasts_s`: until it is healed, restarted or resumed.

    With a `stage` it waits, from `at_s` on, for the `parcels`-th parcel that reaches it, and strikes that transfer's nodes; it
    strikes its own after `AIMED_S` without one.
    """

    kind: str
    at_s: float
    lasts_s: float
    where: tuple[str, ...]
    detail: str = ""
    number: int = 0
    stage: ParcelStage | None = None
    parcels: int = 1

    def __str__(self) -> str:
        more = f" {self.detail} {self.number}" if self.detail else ""
        aim = f" or when {self.parcels} parcels are {self.stage}" if self.stage else ""
        return f"{self.kind} {' '.join(self.where)}{more} at {self.at_s:.3f} s{aim} for {self.lasts_s:.3f} s"


PARCEL_FAULTS = (
    *("flip_byte_of_parcel", "shorten_parcel", "stretch_parcel"),
    *("hold_sends_from", "hold_landed_from"),
)


def draw_faults(rng: random.Random, prefill: Sequence[str], decode: Sequence[str], within_s: float) -> list[Fault]:
    drawer = _Drawer(rng, prefill, decode, within_s)
    faults = [drawer.aimed(drawer.harmless()) for _ in range(rng.randint(0, 7))]
    return sorted(faults + drawer.losses(rng.randint(0, MOST_LOSSES)), key=lambda fault: fault.at_s)


class _Drawer:
    def __init__(self, rng: random.Random, prefill: Sequence[str], decode: Sequence[str], within_s: float) -> None:
        self._rng = rng
        self._prefill = prefill
        self._decode = decode
        self._within_s = within_s

    def harmless(self) -> Fault:
        """One that costs no decode node its attempts."""
        rng = self._rng
        at_s, short_s, long_s = rng.uniform(0, self._within_s), rng.uniform(0.05, 1.2), rng.uniform(0.2, 6.0)
        prefill, decode = rng.choice(self._prefill), rng.choice(self._decode)
        pair = (prefill, decode) if rng.random() < 0.5 else (decode, prefill)
        match rng.randrange(12):
            case 0 | 1:
                return Fault("kill", at_s, rng.uniform(0.05, 3.0), (prefill,))
            case 2:
                return Fault("hang", at_s, long_s, (prefill,))
            case 3:
                return Fault("cut", at_s, rng.choice((short_s, long_s)), pair)
            case 4:
                return Fault("cut both", at_s, rng.choice((short_s, long_s)), pair)
            case 5:
                return Fault("break", at_s, 0.0, pair)
            case 6:
                return Fault("slow", at_s, long_s, pair, "milliseconds", rng.choice((5, 20, 100)))
            case 7:
                node, effect = rng.choice((prefill, decode)), rng.choice(KINDS)
                lasting = rng.choice(("once", "lasting"))
                return Fault(f"effect {lasting}", at_s, long_s, (node,), effect, rng.randrange(8))
            case 8:
                switch = rng.choice(PARCEL_FAULTS)
                node = decode if switch == "hold_landed_from" else prefill
                return Fault("parcel", at_s, long_s, (node,), switch, rng.randrange(6))
            case 9:
                return Fault("drain", at_s, long_s, (prefill,))
            case 10:
                return Fault("engine fails", at_s, rng.uniform(0.01, 0.5), (prefill,))
            case _:
                kind = rng.choice(("cut both", "break", "slow"))
                number = 50 if kind == "slow" else 0
                return Fault(kind, at_s, short_s, (ROUTER, prefill), "milliseconds" if number else "", number)

    def aimed(self, fault: Fault) -> Fault:
        """The same fault, most often at the moment of some parcel."""
        if self._rng.random() >= AIMED_SHARE:
            return fault
        return replace(fault, stage=self._rng.choice(STAGES), parcels=self._rng.choice((1, 2, 3, 5, 8, 13)))

    def losses(self, count: int) -> list[Fault]:
        """Those that do, one after the other."""
        rng, at_s = self._rng, self._rng.uniform(0, 2.0)
        faults = []
        for _ in range(count):
            decode, lasts_s = rng.choice(self._decode), rng.uniform(0.05, 4.0)
            match rng.randrange(8):
                case 0 | 1:
                    fault = Fault("kill", at_s, rng.uniform(0.05, 2.0), (decode,))
                case 2:
                    fault = Fault("hang", at_s, lasts_s, (decode,))
                case 3:
                    fault = Fault("cut both", at_s, lasts_s, (ROUTER, decode))
                case 4:
                    fault = Fault("cut", at_s, lasts_s, (decode, ROUTER) if rng.random() < 0.5 else (ROUTER, decode))
                case 5:
                    fault = Fault("drain", at_s, lasts_s, (decode,))
                case 6:
                    fault = Fault("engine fails", at_s, rng.uniform(0.01, 0.5), (decode,))
                case _:
                    fault = Fault("break", at_s, 0.0, (ROUTER, decode))
            fault = self.aimed(fault)
            faults.append(fault)
            at_s += fault.lasts_s + RECOVERY_S + rng.uniform(0, 2.0) + (AIMED_S if fault.stage else 0)
        return faults


class Harm:
    """Does what a plan says. `lives` holds each machine's present life; `restart(name)` begins the next one."""

    def __init__(
        self, loop: VirtualLoop, wires: Wires, lives: Mapping[str, Any], books: Books, restart: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._wires = wires
        self._lives = lives
        self._books = books
        self._restart = restart
        self.open = 0
        self._aimed: dict[Fault, int] = {}
        """Faults that wait for a parcel, and for how many more."""

    def schedule(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self.open += 1
            self._loop.call_later(fault.at_s, self._aim if fault.stage else self._begin, fault, context=NOBODY)

    def _aim(self, fault: Fault) -> None:
        self._aimed[fault] = fault.parcels
        self._loop.call_later(AIMED_S, self._strike, fault, fault, context=NOBODY)

    def parcel(self, stage: ParcelStage, prefill: str, decode: str) -> None:
        """A parcel between these two has come so far."""
        for fault in [fault for fault in self._aimed if fault.stage == stage]:
            self._aimed[fault] -= 1
            if self._aimed[fault] == 0:
                nodes = {"p": prefill, "d": decode}
                here = replace(fault, where=tuple(nodes.get(name[0], name) for name in fault.where))
                self._loop.call_soon(self._strike, fault, here, context=NOBODY)

    def _strike(self, fault: Fault, here: Fault) -> None:
        if self._aimed.pop(fault, None) is not None:
            self._begin(here)

    def _begin(self, fault: Fault) -> None:
        """A machine that is down or stopped already is left alone."""
        heal = self._do(fault)
        if heal is None:
            self.open -= 1
            return
        self._books.note("fault", str(fault))
        self._books.counts[f"fault {fault.kind}"] += 1
        self._loop.call_later(fault.lasts_s, self._end, fault, heal, context=NOBODY)

    def _end(self, fault: Fault, heal: Callable[[], object]) -> None:
        self._books.note("fault", f"over: {fault}")
        self.open -= 1
        heal()

    def _do(self, fault: Fault) -> Callable[[], object] | None:
        if len(fault.where) == 2:
            return self._harm_link(fault)
        life: Any = self._lives[fault.where[0]]
        if not life.process.alive or life.process.stopped or life.driver is None:
            return None
        return self._harm_life(fault, life)

    def _harm_link(self, fault: Fault) -> Callable[[], None] | None:
        one, other = fault.where
        there, back = self._wires.link(one, other), self._wires.link(other, one)
        match fault.kind:
            case "cut":
                there.cut = True
            case "cut both":
                there.cut = back.cut = True
            case "slow":
                there.slow_s = back.slow_s = fault.number / 1000
            case "break":
                return (lambda: None) if self._wires.break_streams(one, other) else None
            case _:
                raise AssertionError(fault.kind)
        return lambda: self._heal_links(one, other)

    def _heal_links(self, one: str, other: str) -> None:
        for link in (self._wires.link(one, other), self._wires.link(other, one)):
            link.slow_s = 0.0
            link.heal()
        self._wires.healed()

    def _replace(self, life: Any) -> None:
        """The process has come to its end by itself, unless something else ended it before."""
        if life.process.alive:
            life.kill()
            self._restart(life.machine.name)

    def _harm_life(self, fault: Fault, life: Any) -> Callable[[], object]:
        match fault.kind:
            case "kill":
                life.kill()
                return lambda: self._restart(fault.where[0])
            case "hang":
                life.stop()
                return lambda: life.resume()
            case "drain":
                leaving = life.leave(fault.lasts_s * GRACE_SHARE)
                self._loop.create_task(leaving, name="leave", context=life.process.context.copy())
                return lambda: self._replace(life)
            case "engine fails":
                life.process.context.copy().run(life.engine.break_down)
                return lambda: self._replace(life)
            case "effect once" | "effect lasting":
                life.effects.fail(fault.detail, fault.number, fault.kind == "effect lasting")
                return lambda: life.effects.heal()
            case "parcel":
                setattr(life.faults, fault.detail, fault.number)
                return lambda: setattr(life.faults, fault.detail, None)
            case _:
                raise AssertionError(fault.kind)
