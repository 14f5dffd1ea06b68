"""Runs the sections within a time budget and writes figures, table and plots: `python -m bench.serving --out FILE`.

Every section catches its own failure, so that the others are still measured; what is missing, and why, is in the figures, which
are written after each section. Loads take what time the budget leaves. The exit code is 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from bench.serving import harm, link, loads, report
from bench.serving.fleet import MODEL_NAME, Arrangement, Fleet, Plan, running_fleet
from bench.serving.hand_over import measure_hand_over
from bench.serving.landing import measure_landing
from bench.serving.open_loop import Client
from bench.serving.sizes import SIZES, Size, write_model_folder
from bench.serving.soak import SoakPlan, soak
from bench.serving.workload import FixedLengths

TTFT_LIMIT_S = 0.5
TPOT_LIMITS_S = (0.010, 0.015, 0.020, 0.030, 0.050)
HARM_S = 20.0
"""Reserved for each kill: load, recovery, drain."""
STOP_S = 20.0

SECTIONS = ("link", "hand_over", "landing", "loads", "kill_prefill", "kill_decode")
ON_REQUEST = ("soak",)


class Run:
    """Figures by section, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace, size: Size) -> None:
        self.size = size
        self.out: Path = arguments.out
        self.sections: list[str] = arguments.sections or list(SECTIONS)
        self.seeds = tuple(range(1, arguments.seeds + 1))
        self.soak_s: float = arguments.soak_s
        self._ends_at: float = time.monotonic() + 60 * arguments.minutes - STOP_S
        self.figures: dict[str, Any] = {
            "devices": [*arguments.prefill_devices, *arguments.decode_devices],
            "size": arguments.size,
            "slot_bytes": arguments.slot_bytes or "the nodes' own",
            "missing": {},
        }

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()

    def say(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def say_logs(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.log")):
            self.say(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-25:]))

    async def section(self, name: str, measure: Callable[[], Awaitable[Any]], least_s: float = 5.0) -> None:
        """Nothing happens to a section that nobody asked for."""
        if name not in self.sections:
            return
        if self.left_s < least_s:
            self.figures["missing"][name] = f"no time left ({self.left_s:.0f} s)"
            return
        begun = time.monotonic()
        try:
            self.figures[name] = await measure()
        except Exception as error:
            self.figures["missing"][name] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc(file=sys.stdout)
        self.say(f"{name}: {time.monotonic() - begun:.1f} s, {self.left_s:.0f} s left")
        self.write()

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.figures, indent=1) + "\n")


async def measure_all(run: Run, plan: Plan, folder: Path) -> None:
    await run.section("link", lambda: asyncio.to_thread(measure_link, run, plan))
    serving = [name for name in run.sections if name != "link"]
    if not serving:
        return
    try:
        with running_fleet(plan, folder) as fleet:
            run.figures["start_s"] = fleet.start_s
            run.say(f"ready: {json.dumps(fleet.start_s)}")
            await measure_serving(run, plan, fleet)
            for name in fleet.nodes:
                run.say(f"--- {name}\n{fleet.log_tail(name, 4)}")
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        for name in serving:
            if name not in run.figures:
                run.figures["missing"].setdefault(name, f"{type(error).__name__}: {error}"[:500])
        run.say_logs(folder)


def measure_link(run: Run, plan: Plan) -> dict[str, float]:
    devices = (plan.prefill_devices[0], plan.decode_devices[0])
    return link.measure(devices, run.size.link_mib, run.size.link_slots_mib, run.say)


async def measure_serving(run: Run, plan: Plan, fleet: Fleet) -> None:
    size = run.size
    async with Client(fleet.url, MODEL_NAME, size.config["vocab_size"]) as client:
        await run.section("hand_over", lambda: measure_hand_over(fleet, client, size.hand_over))
        await run.section("landing", lambda: measure_landing(fleet, client, size.landing))
        mixed = SoakPlan(size.workloads[-1].lengths, size.harm_rate, run.soak_s)
        await run.section("soak", lambda: soak(fleet, client, mixed), least_s=run.soak_s + 20.0)
        run.figures["lanes"] = {node.name: lanes_of(fleet, node.name) for node in fleet.of_role("decode")}
        await run.section("loads", lambda: measure_loads(run, plan, fleet, client), least_s=40.0)
        hurt = harm.HarmPlan(FixedLengths(size.harm_shape), size.harm_rate, seconds=8.0, kill_after_s=3.0)
        await run.section("kill_prefill", lambda: harm.kill_prefill(fleet, client, hurt), least_s=20.0)
        if plan.twins:
            await run.section("kill_decode", lambda: harm.kill_decode(fleet, client, hurt), least_s=20.0)


def lanes_of(fleet: Fleet, node: str) -> dict[str, float]:
    """GB/s by lane, as the node's own self-test at pairing has it."""
    return fleet.metric_by(node, "decant_kv_lane_gigabytes_per_second", "lane")


async def measure_loads(run: Run, plan: Plan, fleet: Fleet, client: Client) -> dict[str, Any]:
    """Each workload on each arrangement; windows as long as the time that is left allows."""
    size = run.size
    arrangements = [Arrangement.APART, Arrangement.COLOCATED] if plan.twins else [Arrangement.APART]
    kills = sum(name.startswith("kill") for name in run.sections)
    pairs = min(len(plan.prefill_devices), len(plan.decode_devices))
    window_s = _window_s(run, len(arrangements), run.left_s - kills * HARM_S)
    figures: dict[str, Any] = {}
    for workload in size.workloads:
        rates = tuple(rate * pairs for rate in workload.rates)
        points = {}
        for arrangement in arrangements:
            load = loads.LoadPlan(workload.lengths, rates, run.seeds, size.warm_s, window_s)
            points[arrangement] = await loads.run_load(fleet, client, arrangement, load)
        figures[workload.lengths.name] = {
            "window_s": window_s,
            "seeds": len(run.seeds),
            "points": {
                arrangement.value: [loads.describe_point(point, TTFT_LIMIT_S, TPOT_LIMITS_S) for point in found]
                for arrangement, found in points.items()
            },
            "goodput": loads.goodput_map(points, TTFT_LIMIT_S, TPOT_LIMITS_S),
        }
    return figures


def _window_s(run: Run, arrangements: int, seconds: float) -> float:
    rates = sum(len(workload.rates) for workload in run.size.workloads)
    fixed_s = arrangements * (rates * run.size.warm_s + len(run.size.workloads) * loads.DRAIN_S)
    shortest, longest = run.size.windows_s
    return max(shortest, min(longest, (seconds - fixed_s) / (arrangements * rates * len(run.seeds))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON; table and plots are written beside it")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--prefill-devices", nargs="+", default=["cuda:0"], help="one prefill node on each")
    parser.add_argument("--decode-devices", nargs="+", default=["cuda:1"], help="one decode node on each")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything, starts included")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", help="of the section loads, by name (default: all)")
    parser.add_argument("--soak-s", type=float, default=180.0, help="length of the section soak")
    parser.add_argument("--slot-bytes", help="of the nodes' transfers, as `decant node --slot-bytes` takes it")
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs (default: a temporary one)")
    help = f"of {', '.join(SECTIONS)} (default: all of these), {', '.join(ON_REQUEST)}"
    parser.add_argument("sections", nargs="*", help=help, choices=[*SECTIONS, *ON_REQUEST, []])
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    if arguments.workloads:
        by_name = {workload.lengths.name: workload for workload in size.workloads}
        if unknown := set(arguments.workloads) - set(by_name):
            parser.error(f"--workloads: {', '.join(sorted(unknown))} is none of {', '.join(by_name)}")
        size = replace(size, workloads=tuple(by_name[name] for name in arguments.workloads))
    run = Run(arguments, size)
    slots = () if arguments.slot_bytes is None else ("--slot-bytes", arguments.slot_bytes)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.logs or Path(scratch) / "logs"
        prefill, decode = tuple(arguments.prefill_devices), tuple(arguments.decode_devices)
        plan = Plan(
            model=write_model_folder(Path(scratch) / "model", run.size.config),
            prefill_devices=prefill,
            decode_devices=decode,
            twins=set(prefill).isdisjoint(decode) or "cpu" in prefill,
            shared_options=(*run.size.shared_options, *slots),
            prefill_options=run.size.prefill_options,
            decode_options=run.size.decode_options,
            start_limit_s=run.size.start_limit_s,
        )
        uvloop.run(measure_all(run, plan, folder))
    run.write()
    table = report.as_markdown(run.figures)
    run.out.with_suffix(".md").write_text(table + "\n")
    run.say(table)
    if isinstance(run.figures.get("loads"), dict):
        try:
            report.draw_loads(run.figures["loads"], run.out.parent)
        except ImportError:
            run.say("no plots: matplotlib is not installed")
    return 1 if run.figures["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
