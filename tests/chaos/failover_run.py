# ruff: noqa: T201 - a verb that prints its figures
"""Live streams whose decode node is taken away: `make failover [STREAMS=100] [SEED=k] [MODEL=real|random|toy]`.

One router, two prefill and two decode nodes. In each round some streams begin on one decode node; when one of them has shown a
drawn number of tokens, the node is killed, stopped, drained (SIGTERM, or through Admin) or cut off from the router. Every stream
must go on elsewhere: no error, no token lost or repeated, the answer equal to the unharmed one; and the gap at its client is at
most the silence limit + 1 s + the time to compute what was not cached. Exit code 1 otherwise; with DECANT_TIMES=told, gaps are
told and not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos_cluster import DECODE, MEMBERS, PREFILL, ROUTER, SILENCE_LIMIT_S, Cluster
from chaos_faults import NoEffect
from chaos_models import ServedModel, served_model
from chaos_network import Network, free_number, why_not_possible
from failover_harms import LINK_HARMS, PROCESS_HARMS, Harm, Operator
from failover_streams import Client, Judgement, Watch, draw_asked
from waiting import TIMES_ARE_TOLD

STREAMS_A_ROUND = 5
START_SPREAD_S = 0.5
ALLOWED_S = SILENCE_LIMIT_S + 1.0
BLOCK_SIZE = 16
MISSED_ALLOWED = 10


@dataclass
class Tally:
    """Of one kind of harm. `hit`: streams that had to go on elsewhere."""

    rounds: int = 0
    tokens_when_hit: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)

    @property
    def hit(self) -> int:
        return len(self.gaps_s)

    @property
    def beyond(self) -> int:
        return sum(gap > bound for gap, bound in zip(self.gaps_s, self.bounds_s, strict=True))


@dataclass
class Report:
    tallies: dict[str, Tally] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    cached_tokens: float = 0
    """History that prefill nodes found in their caches while streams failed over."""


class Run:
    def __init__(self, cluster: Cluster, client: Client, operator: Operator, chance: random.Random) -> None:
        self.report = Report()
        self._cluster = cluster
        self._client = client
        self._operator = operator
        self._chance = chance

    async def harms(self, kinds: dict[str, Harm], streams: int) -> None:
        wanted = {kind: streams // len(kinds) + (index < streams % len(kinds)) for index, kind in enumerate(kinds)}
        self.report.tallies = {kind: Tally() for kind in kinds}
        while due := [kind for kind, tally in self.report.tallies.items() if tally.hit < wanted[kind]]:
            kind = self._chance.choice(due)
            tally = self.report.tallies[kind]
            try:
                await self._round(kinds[kind], tally, min(STREAMS_A_ROUND, wanted[kind] - tally.hit))
            except NoEffect as missed:
                self.report.missed.append(f"{kind}: {missed}")
                assert len(self.report.missed) <= MISSED_ALLOWED, self.report.missed
            await self._cluster.whole()
            self.report.left_over += await self._cluster.rest()
            print(f"   {kind}: {tally.hit} of {wanted[kind]} streams after {tally.rounds} rounds", flush=True)

    async def _round(self, harm: Harm, tally: Tally, count: int) -> None:
        cluster, operator, chance = self._cluster, self._operator, self._chance
        victim, other = chance.sample(DECODE, 2)
        offset = cluster[ROUTER].log_size()
        await operator.spare(other)
        try:
            watches = [Watch(asked) for asked in chance.sample(self._client.asked, count)]
            running = [asyncio.create_task(self._begin(watch, chance.uniform(0, START_SPREAD_S))) for watch in watches]
            await self._drawn_moment(watches)
        finally:
            await operator.use_again(other)
        harmed_s = time.monotonic()
        shown = [len(watch.tokens) for watch in watches]
        async with harm(cluster, operator, victim):
            await asyncio.gather(*running)
        tally.rounds += 1
        moved = self._moved(offset)
        if not moved:
            raise NoEffect("every stream was over before it was hit")
        speed = await self._prefill_speed()
        for watch, tokens in zip(watches, shown, strict=True):
            await self._client.judge(watch, tally.judgement)
            if watch.request_id in moved or watch.error:
                tally.tokens_when_hit.append(tokens)
                tally.gaps_s.append(watch.gap_s(harmed_s))
                tally.bounds_s.append(ALLOWED_S + self._uncached_tokens(watch, tokens) / speed)

    async def _begin(self, watch: Watch, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._client.watch(watch)

    async def _drawn_moment(self, watches: list[Watch]) -> None:
        trigger = self._chance.choice(watches)
        await trigger.shows(self._chance.randint(1, self._client.answer_tokens(trigger.asked) // 2))

    def _moved(self, offset: int) -> set[str]:
        """Requests that ended since then after more than one attempt, as the router's log says."""
        lines = self._cluster[ROUTER].lines_since(offset)
        return {line["request"] for line in lines if line.get("event") == "request ended" and line["attempt"] > 1}

    @staticmethod
    def _uncached_tokens(watch: Watch, shown: int) -> int:
        """At most: what was emitted, and the prompt's last block, which is cached only when it is whole; before the first token,
        the prompt."""
        return shown + BLOCK_SIZE if shown else len(watch.asked.question.prompt)

    async def _prefill_speed(self) -> float:
        """Prompt tokens a second of the slower prefill node, as it measures itself."""
        speeds = [view.prompt_tokens_per_second for view in await self._operator.nodes() if view.node_id in PREFILL]
        return min((speed for speed in speeds if speed), default=1000.0)


async def failover(cluster: Cluster, model: ServedModel, kinds: dict[str, Harm], streams: int, seed: int) -> Report:
    chance = random.Random(seed)
    await cluster.whole()
    async with cluster.channel() as channel:
        client = Client(model, channel, draw_asked(model, 4 * STREAMS_A_ROUND, chance))
        await client.learn()
        assert not await cluster.rest(), "rest before any harm"
        run = Run(cluster, client, Operator(channel), chance)
        before = await _cached_tokens(cluster)
        await run.harms(kinds, streams)
        run.report.cached_tokens = await _cached_tokens(cluster) - before
    return run.report


async def _cached_tokens(cluster: Cluster) -> float:
    return sum([(await cluster[name].metrics()).value("prefix_cached_tokens_total") for name in PREFILL])


def table(report: Report, what: str, seconds: float) -> list[str]:
    columns = ("rounds", "streams", "tokens when hit", "errors", "lost", "repeated", "unequal", "near-ties")
    lines = [
        "",
        f"{'decode node':<13}{columns[0]:>7}{columns[1]:>9}{columns[2]:>17}"
        + "".join(f"{name:>{len(name) + 2}}" for name in columns[3:])
        + f"{'gap median s':>14}{'gap most s':>12}{'bound s':>9}{'beyond':>8}",
    ]
    everything = Tally()
    for kind, tally in report.tallies.items():
        lines.append(_row(kind, tally))
        _add(everything, tally)
    judgement = everything.judgement
    lines += [f"near-tie: {told}" for told in judgement.near_ties]
    lines += [f"no effect, not counted: {told}" for told in report.missed]
    lines += [f"ERROR {told}" for told in judgement.errors] + [f"UNEQUAL {told}" for told in judgement.unequal]
    lines += [f"LEFT OVER {told}" for told in report.left_over]
    lines.append(
        f"failover: {everything.hit} streams in {everything.rounds} rounds ({what}) in {seconds:.0f} s: "
        f"{len(judgement.errors)} errors, {judgement.lost} tokens lost, {judgement.repeated} repeated, "
        f"{len(judgement.unequal)} answers unequal, {len(judgement.near_ties)} near-ties, {len(report.left_over)} leftovers; "
        f"gap at the client {statistics.median(everything.gaps_s):.2f} s in the median, {max(everything.gaps_s):.2f} s at most, "
        f"{everything.beyond} beyond the bound{' (told, not judged)' if TIMES_ARE_TOLD else ''}; "
        f"{report.cached_tokens:.0f} tokens of history came from caches of prefill nodes"
    )
    return lines


def _row(kind: str, tally: Tally) -> str:
    judgement, hit = tally.judgement, sorted(tally.tokens_when_hit)
    shown = f"{hit[0]}-{hit[len(hit) // 2]}-{hit[-1]}"
    counts = (
        len(judgement.errors),
        judgement.lost,
        judgement.repeated,
        len(judgement.unequal),
        len(judgement.near_ties),
    )
    widths = (8, 6, 10, 9, 11)
    return (
        f"{kind:<13}{tally.rounds:>7}{tally.hit:>9}{shown:>17}"
        + "".join(f"{count:>{width}}" for count, width in zip(counts, widths, strict=True))
        + f"{statistics.median(tally.gaps_s):>14.2f}{max(tally.gaps_s):>12.2f}{max(tally.bounds_s):>9.2f}{tally.beyond:>8}"
    )


def _add(total: Tally, tally: Tally) -> None:
    total.rounds += tally.rounds
    for name in ("tokens_when_hit", "gaps_s", "bounds_s"):
        getattr(total, name).extend(getattr(tally, name))
    for name in ("errors", "unequal", "near_ties"):
        getattr(total.judgement, name).extend(getattr(tally.judgement, name))
    total.judgement.lost += tally.judgement.lost
    total.judgement.repeated += tally.judgement.repeated


def passed(report: Report) -> bool:
    in_time = TIMES_ARE_TOLD or not any(tally.beyond for tally in report.tallies.values())
    return in_time and all(tally.judgement.clean for tally in report.tallies.values()) and not report.left_over


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100, help="so many must be hit in all")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", choices=("toy", "random", "real"), default="random")
    parser.add_argument("--links", choices=("harm", "spare", "if-possible"), default="harm", help="needs root")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs, kept")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    spared = "as asked" if options.links == "spare" else why_not_possible()
    if spared is not None and options.links == "harm":
        print(f"links cannot be cut here ({spared}): run as root with iproute2, or --links=spare", file=sys.stderr)
        return 2
    kinds = PROCESS_HARMS if spared is not None else PROCESS_HARMS | LINK_HARMS
    what = f"{options.model} model in float32, " + ("links cut" if spared is None else f"no link cut: {spared}")
    print(f"failover: seed {seed}, {what}", flush=True)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decant-failover-")))
        folder.mkdir(parents=True, exist_ok=True)
        network = stack.enter_context(Network(MEMBERS, free_number())) if spared is None else None
        model = served_model(options.model, folder)
        common = (*model.options, f"--slot-bytes={model.slot_bytes}", f"--staging-bytes={32 * model.slot_bytes}")
        common += ("--kv-cache-memory-bytes=192MiB", "--max-num-seqs=16", "--max-num-batched-tokens=256")
        common += (f"--block-size={BLOCK_SIZE}",)
        roles = {"prefill": (), "decode": ("--no-enable-prefix-caching",)}
        cluster = stack.enter_context(Cluster(folder, model.folder, network, common, roles))
        begun = time.monotonic()
        report = asyncio.run(failover(cluster, model, kinds, options.streams, seed))
        print("\n".join(table(report, what, time.monotonic() - begun)))
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
