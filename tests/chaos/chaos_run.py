# ruff: noqa: T201 - a verb that prints its figures
"""Faults on real processes under load: `make chaos FAULTS=n [SEED=k] [MODEL=toy|random|real] [ARGS="--minutes m"]`.

One router, two prefill and two decode nodes; streams that never stop; one node down at a time. At the end: no client error, every
answer equal to the unharmed one, nothing left over anywhere. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos_cluster import DECODE, MEMBERS, PREFILL, SILENCE_LIMIT_S, Cluster
from chaos_faults import Injected, NoEffect, deck
from chaos_load import Load, draw_questions, usual_seconds
from chaos_models import ServedModel, served_model
from chaos_network import Network, free_number, why_not_possible
from chaos_storms import StormOutcome, storms

QUESTIONS = 24
KNOWN_AT_ONCE_S = 1.0
KNOWN_BY_SILENCE_S = SILENCE_LIMIT_S + 0.5
DESCRIPTORS_LIMIT_S = 30.0
SPARE_DESCRIPTORS = 2 * len(PREFILL)
"""Two for each pair. One: UCX carries both directions of a session on one TCP connection until one worker has once lost the
other; from then on, their counters of connections having parted, each side opens its own. One more, open at both ends, was seen
between two nodes that had been cut twice for ten seconds."""
UNCONNECTED = "socket"
"""The kind of descriptor that the kernel lists under no connection: none may be left."""
MISSED_ALLOWED = 2
ALL_PAIRS = {(decode, prefill) for decode in DECODE for prefill in PREFILL}


@dataclass
class Report:
    injected: list[Injected] = field(default_factory=list)
    noticed: list[dict[tuple[str, str], float]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    missed: int = 0
    """Faults that nothing showed to have taken effect: not counted, but bounded."""
    storms: list[StormOutcome] = field(default_factory=list)


async def chaos(
    cluster: Cluster, model: ServedModel, faults: int, minutes: float, streams: int, seed: int, with_storms: bool
) -> tuple[Report, Load]:
    report, chance = Report(), random.Random(seed)
    await cluster.whole()
    async with cluster.channel() as channel:
        load = Load(model, channel, draw_questions(model, QUESTIONS, chance), seed)
        await load.learn()
        while await cluster.pairs() != ALL_PAIRS:
            await load.once()
        report.left_over += await cluster.rest()
        before = {name: cluster[name].descriptors() for name in MEMBERS}
        load.start(streams)
        await inject(cluster, report, faults, time.monotonic() + 60 * minutes, chance)
        await load.stop()
        report.storms = await storms(cluster, load, seed) if with_storms else []
        await load.once()
    report.left_over += await cluster.rest()
    report.left_over += await descriptors_left(cluster, before)
    return report, load


async def inject(cluster: Cluster, report: Report, faults: int, until_s: float, chance: random.Random) -> None:
    """So many faults, or as many as there is time for."""
    round_of_faults: list[int] = []
    kinds = deck(cluster.network is not None)
    while len(report.injected) < faults and time.monotonic() < until_s:
        if not round_of_faults:
            round_of_faults = list(range(len(kinds)))
            chance.shuffle(round_of_faults)
        await asyncio.sleep(chance.uniform(0.2, 1.0))  # some time without harm
        offsets = cluster.log_sizes()
        try:
            done = await kinds[round_of_faults.pop()](cluster, chance)
        except NoEffect as missed:
            report.missed += 1
            print(f"   -  not counted: {missed}", flush=True)
            assert report.missed <= MISSED_ALLOWED + faults // 10, (
                "too many faults had no effect: this run shows nothing"
            )
            done = []
        await cluster.whole()
        for fault in done:
            noticed = cluster.noticed(offsets, fault.begun, max(fault.healed, fault.begun + KNOWN_BY_SILENCE_S))
            noticed = {pair: seconds for pair, seconds in noticed.items() if pair in fault.broken}
            report.injected.append(fault)
            report.noticed.append(noticed)
            print(row(len(report.injected), fault, noticed), flush=True)


def broken_by(report: Report) -> list[str]:
    return [told for storm in report.storms for told in storm.broken]


def row(number: int, fault: Injected, noticed: dict[tuple[str, str], float]) -> str:
    subjects = {subject for _, subject in noticed}
    seen = ", ".join(
        f"{observer}{f' ({subject})' * (len(subjects) > 1)} {seconds:.2f}"
        for (observer, subject), seconds in sorted(noticed.items())
    )
    return f"{number:>4}  {fault.kind:<15} {fault.detail:<44} {fault.proof:<22} noticed after s: {seen or '-'}"


async def descriptors_left(cluster: Cluster, before: dict[str, Counter[str]]) -> list[str]:
    """Descriptors beyond what any member of the role had when every pair had met; waits for connections that are closing."""
    roles = {name: [before[one] for one in MEMBERS if one[:4] == name[:4]] for name in MEMBERS}
    most = {name: max(kinds.total() for kinds in role) for name, role in roles.items()}
    unconnected = {name: max(kinds[UNCONNECTED] for kinds in role) for name, role in roles.items()}
    left: dict[str, Counter[str]] = {}
    deadline = time.monotonic() + DESCRIPTORS_LIMIT_S
    while time.monotonic() < deadline:
        now = {name: cluster[name].descriptors() for name in MEMBERS}
        left = {
            name: kinds
            for name, kinds in now.items()
            if kinds.total() > most[name] + SPARE_DESCRIPTORS or kinds[UNCONNECTED] > unconnected[name]
        }
        if not left:
            return []
        await asyncio.sleep(0.1)
    return [
        f"{name}: {kinds.total()} descriptors, {most[name]} at the start: {dict(kinds)}" for name, kinds in left.items()
    ]


def summary(report: Report, load: Load, what: str, seconds: float) -> list[str]:
    verdict = load.verdict
    harmed = [(fault.begun, fault.healed + 1.0) for fault in report.injected]
    usual = usual_seconds(verdict.answers, harmed)
    lines = [
        "",
        f"{'kind':<16}{'injected':>9}{'noticed by':>12}{'median s':>10}{'most s':>8}{'bound s':>9}{'beyond':>8}",
    ]
    for kind, count in sorted(Counter(fault.kind for fault in report.injected).items()):
        times = [
            second
            for fault, noticed in zip(report.injected, report.noticed, strict=True)
            if fault.kind == kind
            for second in noticed.values()
        ]
        if not times:
            lines.append(f"{kind:<16}{count:>9}{'-':>12}")
            continue
        bound = KNOWN_AT_ONCE_S if "KILL" in kind else KNOWN_BY_SILENCE_S
        beyond = sum(second > bound for second in times)
        middle, most = statistics.median(times), max(times)
        lines.append(f"{kind:<16}{count:>9}{len(times):>12}{middle:>10.2f}{most:>8.2f}{bound:>9.1f}{beyond:>8}")
    lines += [delays(report, load, usual, what, chosen) for what, chosen in HIT_BY.items()]
    lines += latest(report, load, usual)
    lines += [storm.line for storm in report.storms]
    lines += [f"near-tie: {told}" for told in verdict.near_ties]
    lines += [f"ERROR {told}" for told in verdict.errors] + [f"WRONG {told}" for told in verdict.wrong]
    lines += [f"LEFT OVER {told}" for told in report.left_over]
    lines += [f"BROKEN {told}" for told in broken_by(report)]
    lines.append(
        f"chaos: {len(report.injected)} faults ({what}) in {seconds:.0f} s, "
        f"{len(verdict.answers)} answers ({sum(len(a.tokens) for a in verdict.answers)} tokens), "
        f"{len(verdict.errors)} client errors, {len(verdict.wrong)} wrong answers, {len(verdict.near_ties)} near-ties, "
        f"{len(report.left_over)} leftovers, {len(broken_by(report))} promises broken in storms"
    )
    return lines


HIT_BY: dict[str, Callable[[Injected], bool]] = {
    "a killed prefill node": lambda fault: "KILL" in fault.kind and fault.detail.startswith("prefill"),
    "a killed decode node": lambda fault: "KILL" in fault.kind and fault.detail.startswith("decode"),
    "any fault": lambda fault: True,
}


def delays(report: Report, load: Load, usual: dict[int, float], what: str, chosen: Callable[[Injected], bool]) -> str:
    """How much later than usual the answers came that were under way when such a fault began."""
    begun = [fault.begun for fault in report.injected if chosen(fault)]
    late = [
        answer.ended - answer.begun - usual[answer.question]
        for answer in load.verdict.answers
        if answer.question in usual and any(answer.begun < at < answer.ended for at in begun)
    ]
    if not late:
        return f"under way at {what}: no answer"
    median = statistics.median(late)
    return f"under way at {what}: {len(late)} answers, {median:.2f} s later than usual in the median, {max(late):.2f} at most"


def latest(report: Report, load: Load, usual: dict[int, float]) -> list[str]:
    """The answers that came latest, each with the faults that it met."""
    late = [(a.ended - a.begun - usual[a.question], a) for a in load.verdict.answers if a.question in usual]
    return [
        f"latest: {by:.2f} s later than usual; first token after {answer.first_token_s:.2f} s, longest gap "
        f"{answer.longest_gap_s:.2f} s; met "
        + (
            ", ".join(
                f"{f.kind} {f.detail}" for f in report.injected if answer.begun < f.healed and f.begun < answer.ended
            )
            or "no fault"
        )
        for by, answer in sorted(late, key=lambda pair: -pair[0])[:3]
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more faults after so long")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", choices=("toy", "random", "real"), default="random")
    parser.add_argument("--links", choices=("harm", "spare", "if-possible"), default="harm", help="needs root")
    parser.add_argument("--storms", action=argparse.BooleanOptionalAction, default=True, help="storms after the faults")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs, kept")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    spared = "as asked" if options.links == "spare" else why_not_possible()
    if spared is not None and options.links == "harm":
        print(f"links cannot be harmed here ({spared}): run as root with iproute2, or --links=spare", file=sys.stderr)
        return 2
    links = "links harmed" if spared is None else f"links spared ({spared})"
    print(f"chaos: seed {seed}, {options.streams} streams, {options.model} model, {links}", flush=True)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decant-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        network = stack.enter_context(Network(MEMBERS, free_number())) if spared is None else None
        model = served_model(options.model, folder)
        common = (*model.options, f"--slot-bytes={model.slot_bytes}", f"--staging-bytes={32 * model.slot_bytes}")
        common += ("--kv-cache-memory-bytes=192MiB", "--max-num-seqs=16", "--max-num-batched-tokens=256")
        roles = {"prefill": (), "decode": ("--no-enable-prefix-caching",)}
        cluster = stack.enter_context(Cluster(folder, model.folder, network, common, roles))
        begun = time.monotonic()
        report, load = asyncio.run(
            chaos(cluster, model, options.faults, options.minutes, options.streams, seed, options.storms)
        )
        print("\n".join(summary(report, load, f"{model.kind} model, {links}", time.monotonic() - begun)))
    verdict = load.verdict
    return 1 if verdict.errors or verdict.wrong or report.left_over or broken_by(report) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
