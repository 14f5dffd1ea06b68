# ruff: noqa: T201 - a verb that prints its figures
"""The verb of the cluster simulation.

    python tests/sim/cluster.py --seeds 10000            seeds 0 to 9999, on all cores
    python tests/sim/cluster.py --minutes 5 --seeds 1000 as many as fit, at least so many
    python tests/sim/cluster.py --seed 17                one, with all that happened

The last line holds the figures; the exit code is 1 if an invariant was broken.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

SEEDS_AT_ONCE = 8
TRACE_LINES = 60
MOST_SHOWN = 5
HASH_SEED = "PYTHONHASHSEED"


@dataclass
class Figures:
    seeds: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    failed: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Any) -> None:
        self.seeds += 1
        self.requests += outcome.requests
        self.virtual_s += outcome.virtual_s
        self.counts += outcome.counts
        if outcome.violations:
            self.failed.append(outcome)

    def line(self, wall_s: float) -> str:
        faults = sorted((kind[6:], count) for kind, count in self.counts.items() if kind.startswith("fault "))
        answers = sorted((how[8:], count) for how, count in self.counts.items() if how.startswith("answers "))
        return (
            f"simulated {self.seeds} seeds: {len(self.failed)} with violations, {self.requests} requests "
            f"({_list(answers)}), {sum(count for _, count in faults)} faults ({_list(faults)}), "
            f"{self.virtual_s / 3600:.1f} virtual hours in {wall_s:.0f} s"
        )


def _list(counts: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)


def run_batch(seeds: range) -> list[Any]:
    from cluster_simulation import simulate

    gc.disable()
    outcomes = []
    for seed in seeds:
        outcome = simulate(seed)
        outcomes.append(written_out(outcome) if outcome.violations else replace(outcome, trace=()))
        gc.collect()
    return outcomes


def written_out(outcome: Any) -> Any:
    """The trace as text: time since the start, who, what."""
    lines = (
        f"{at_s - 1000:9.4f}  {who:<10} {what if isinstance(what, str) else _text(what)}"
        for at_s, who, what in outcome.trace
    )
    return replace(outcome, trace=tuple(lines))


def _text(what: Any) -> str:
    if isinstance(what, dict):
        rest = {name: value for name, value in what.items() if name != "event"}
        return f"{what.get('event')} {rest}"
    text = repr(what).replace("TransferId(request=", "(")
    return text if len(text) < 240 else text[:240] + "..."


def batches(first: int, least: int, budget_s: float | None, began_s: float) -> Iterator[range]:
    """Seeds from `first` on: `least` of them, or as many as can be begun within the budget, whatever is more."""
    seed = first
    while True:
        done = seed - first
        if done >= least and (budget_s is None or time.monotonic() - began_s >= budget_s):
            return
        count = SEEDS_AT_ONCE if budget_s is not None else min(SEEDS_AT_ONCE, least - done)
        yield range(seed, seed + count)
        seed += count


def run_many(first: int, least: int, minutes: float | None, jobs: int) -> int:
    import cluster_simulation  # noqa: F401 - loaded once, before the workers are forked

    gc.collect()
    gc.freeze()
    began_s = time.monotonic()
    figures = Figures()
    plan = batches(first, least, None if minutes is None else minutes * 60, began_s)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        running = [pool.apply_async(run_batch, (seeds,)) for seeds in islice(plan, 2 * jobs)]
        while running:
            for outcome in running.pop(0).get():
                figures.add(outcome)
                if outcome.violations and len(figures.failed) <= MOST_SHOWN:
                    show(outcome, TRACE_LINES)
            seeds = next(plan, None)
            if seeds is not None:
                running.append(pool.apply_async(run_batch, (seeds,)))
    if figures.failed:
        print("failed seeds:", *(outcome.seed for outcome in figures.failed))
    print(figures.line(time.monotonic() - began_s))
    return 1 if figures.failed else 0


def show(outcome: Any, trace_lines: int | None) -> None:
    """`trace_lines`: so many up to the first violation; None shows all."""
    lines = list(outcome.trace)
    if trace_lines is not None:
        first = next((index for index, line in enumerate(lines) if "VIOLATION" in line), len(lines) - 1)
        lines = lines[max(0, first + 1 - trace_lines) : first + 1]
    print(f"seed {outcome.seed}: {outcome.plan}", *lines, sep="\n")
    for violation in outcome.violations:
        print(f"seed {outcome.seed} VIOLATION {violation}")
    print(f"replay: make sim SEED={outcome.seed}", flush=True)


def run_one(seed: int) -> int:
    from cluster_simulation import simulate

    began_s = time.monotonic()
    outcome = simulate(seed)
    show(written_out(outcome), None)
    figures = Figures()
    figures.add(outcome)
    print(figures.line(time.monotonic() - began_s))
    return 1 if figures.failed else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="simulate clusters under random loads and faults")
    parser.add_argument("--seed", type=int, action="append", help="one seed, with its whole trace (may be repeated)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (with --minutes: at least)")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, help="go on until this time is over")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    if chosen.seed:
        return max(run_one(seed) for seed in chosen.seed)
    return run_many(chosen.first, chosen.seeds, chosen.minutes, chosen.jobs)


if __name__ == "__main__":
    if os.environ.get(HASH_SEED) != "0":  # sets of names are walked in the order of their hashes
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, HASH_SEED: "0"})
    sys.exit(main(sys.argv[1:]))
