"""What a chaos run does to a cluster: each kind of fault harms, proves that it took effect, and heals.

One node is down at a time. A fault that cannot prove itself raises `NoEffect`: such a run has shown nothing.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos_cluster import (
    DECODE,
    MEMBERS,
    NODES,
    PREFILL,
    ROUTER,
    SILENCE_LIMIT_S,
    START_LIMIT_S,
    Cluster,
    Member,
    condition,
)
from chaos_network import Direction, Network

PATIENCE_S = 30.0
"""How long a throttled link may be without enough traffic to hold any of it back."""
BLINK_S = (0.2, 1.0)
OUTAGE_S = (SILENCE_LIMIT_S + 1.0, SILENCE_LIMIT_S + 2.0)
ONE_WAY_S = 10.0
THROTTLE_S = (2.0, 4.0)
MEGABITS_PER_SECOND = (5, 10, 20)


class NoEffect(Exception):
    """A fault was injected and nothing shows it."""


@dataclass(frozen=True)
class Injected:
    """Times by time.time(). `broken`: pairs (observer, subject) of which the observer cannot hear the subject any more."""

    kind: str
    detail: str
    proof: str
    begun: float
    healed: float
    broken: frozenset[tuple[str, str]]


Fault = Callable[[Cluster, random.Random], Awaitable[list[Injected]]]
"""Draws its victim, harms it, heals it; what was done, in order."""


async def kill(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """SIGKILL, then the next life under the same address; every second one is itself aimed at a parcel."""
    victim = cluster[chance.choice(NODES)]
    offline_s = chance.uniform(0.0, 1.0)
    aim = _aim(victim.name, chance) if chance.random() < 0.5 else None
    begun = time.time()
    victim.send(signal.SIGKILL)
    killed = await _killed(victim, "SIGKILL", victim.name, begun, offline_s)
    if aim is None:
        victim.start()
        return [killed]
    victim.start(aim.hook)
    try:
        return [killed, await aim.hits(victim, chance)]
    except NoEffect:
        victim.send(signal.SIGKILL)
        await _gone(victim)
        victim.start()
        raise


@dataclass(frozen=True)
class _Aim:
    """A life that harms itself when a chosen parcel of some transfer comes by."""

    hook: str
    stops: bool

    async def hits(self, victim: Member, chance: random.Random) -> Injected:
        async def hit() -> bool:
            return victim.state() == ("T" if self.stops else "Z")

        try:
            await condition(hit, START_LIMIT_S, f"{self.hook} hits {victim.name}")
        except AssertionError as missed:
            raise NoEffect(str(missed)) from None
        begun = time.time()
        if not self.stops:
            killed = await _killed(victim, "aimed SIGKILL", f"{victim.name} {self.hook}", begun, 0.0)
            victim.start()
            return killed
        return await _stopped(victim, "aimed SIGSTOP", f"{victim.name} {self.hook}", begun, chance.uniform(*OUTAGE_S))


def _aim(victim: str, chance: random.Random) -> _Aim:
    parcel = chance.randint(1, 3)
    if victim in DECODE:
        return _Aim(f"kill_after_landed={parcel}", stops=False)
    return (
        _Aim(f"stop_before_send={parcel}", True) if chance.random() < 0.5 else _Aim(f"kill_before_send={parcel}", False)
    )


async def _killed(victim: Member, kind: str, detail: str, begun: float, offline_s: float) -> Injected:
    await _gone(victim)
    if victim.returncode() != -signal.SIGKILL:
        raise NoEffect(f"{victim.name} ended with {victim.returncode()}, not by SIGKILL")
    pid = victim.pid
    await asyncio.sleep(offline_s)  # the outage itself
    return Injected(kind, detail, f"pid {pid} gone", begun, time.time(), _all_lose(victim.name))


async def _gone(victim: Member) -> None:
    async def gone() -> bool:
        return victim.returncode() is not None

    await condition(gone, 20.0, f"{victim.name} is gone")


async def stop(cluster: Cluster, chance: random.Random) -> list[Injected]:
    victim = cluster[chance.choice(NODES)]
    begun = time.time()
    victim.send(signal.SIGSTOP)
    return [await _stopped(victim, "SIGSTOP", victim.name, begun, chance.uniform(*OUTAGE_S))]


async def stop_briefly(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """Shorter than the silence limit: nobody needs to give anything up."""
    victim = cluster[chance.choice(NODES)]
    begun = time.time()
    victim.send(signal.SIGSTOP)
    done = await _stopped(victim, "SIGSTOP, brief", victim.name, begun, chance.uniform(*BLINK_S))
    return [Injected(done.kind, done.detail, done.proof, done.begun, done.healed, frozenset())]


async def _stopped(victim: Member, kind: str, detail: str, begun: float, outage_s: float) -> Injected:
    async def is_stopped() -> bool:
        return victim.state() == "T"

    try:
        await condition(is_stopped, 20.0, f"{victim.name} is in state T")
        await asyncio.sleep(outage_s)  # the outage itself
        if victim.state() != "T":
            raise NoEffect(f"{victim.name} was in state {victim.state()} at the end of the outage, not T")
    finally:
        victim.send(signal.SIGCONT)
    return Injected(kind, f"{detail} {outage_s:.1f} s", "state T", begun, time.time(), _all_lose(victim.name))


def _all_lose(victim: str) -> frozenset[tuple[str, str]]:
    return frozenset((other, victim) for other in MEMBERS if other != victim)


async def cut_off(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """A node loses everybody, and everybody loses it."""
    victim = chance.choice(NODES)
    pairs = [(victim, other) for other in MEMBERS if other != victim]
    directions = [Direction(*ends) for pair in pairs for ends in (pair, pair[::-1])]
    return [await _cut(cluster, "cut off", victim, directions, chance.uniform(*OUTAGE_S))]


async def cut_pair(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """Two members lose each other; the others hear both."""
    first = chance.choice(DECODE)
    second = chance.choice((ROUTER, *PREFILL))
    directions = [Direction(first, second), Direction(second, first)]
    return [await _cut(cluster, "cut pair", f"{first} | {second}", directions, chance.uniform(*OUTAGE_S))]


async def cut_one_way(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """F07: for ten seconds one hears, and is not heard."""
    ends = [chance.choice(DECODE), chance.choice((ROUTER, *PREFILL))]
    chance.shuffle(ends)
    direction = Direction(*ends)
    return [await _cut(cluster, "cut one way", str(direction), [direction], ONE_WAY_S)]


async def blink(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """A pair loses each other for less than the silence limit."""
    first, second = chance.choice(DECODE), chance.choice((ROUTER, *PREFILL))
    directions = [Direction(first, second), Direction(second, first)]
    done = await _cut(cluster, "blink", f"{first} | {second}", directions, chance.uniform(*BLINK_S))
    return [Injected(done.kind, done.detail, done.proof, done.begun, done.healed, frozenset())]


async def _cut(cluster: Cluster, kind: str, detail: str, directions: list[Direction], outage_s: float) -> Injected:
    network = _network(cluster)
    before = await asyncio.to_thread(network.swallowed_packets)
    begun = time.time()
    try:
        for direction in directions:
            await asyncio.to_thread(network.cut, direction)
        await asyncio.sleep(outage_s)  # the outage itself
    finally:
        for direction in directions:
            await asyncio.to_thread(network.heal, direction)
    healed = time.time()
    swallowed = await asyncio.to_thread(network.swallowed_packets) - before
    if not swallowed:
        raise NoEffect(f"no packet was lost while {detail} was cut")
    broken = frozenset((direction.receiver, direction.sender) for direction in directions)
    return Injected(kind, f"{detail} {outage_s:.1f} s", f"{swallowed} packets lost", begun, healed, broken)


async def throttle(cluster: Cluster, chance: random.Random) -> list[Injected]:
    """A slow link is not a dead one: nobody needs to lose anybody."""
    network, victim = _network(cluster), chance.choice(NODES)
    speed, seconds = chance.choice(MEGABITS_PER_SECOND), chance.uniform(*THROTTLE_S)
    begun = time.time()
    await asyncio.to_thread(network.throttle, victim, speed)
    try:
        await asyncio.sleep(seconds)  # the slow time itself
        held_back, patience_until = 0, time.time() + PATIENCE_S
        while not held_back and time.time() < patience_until:
            held_back = await asyncio.to_thread(network.throttled_packets, victim)
            await asyncio.sleep(0.1)
        seconds = time.time() - begun
    finally:
        await asyncio.to_thread(network.unthrottle, victim)
    if not held_back:
        raise NoEffect(f"the link of {victim} held no packet back at {speed} Mbit/s")
    detail = f"{victim} {speed} Mbit/s {seconds:.1f} s"
    return [Injected("throttle", detail, f"{held_back} packets held", begun, time.time(), frozenset())]


def _network(cluster: Cluster) -> Network:
    assert cluster.network is not None, "links can only be harmed where every member has a host of its own"
    return cluster.network


def deck(links: bool) -> list[Fault]:
    """One round of faults, to be shuffled. A kill counts as two when the next life is aimed."""
    processes: list[Fault] = [kill, kill, stop, stop_briefly]
    return [*processes, cut_off, cut_pair, cut_one_way, blink, throttle] if links else processes
