"""Runs the figures named on the command line (default: all), one by one, and writes them as JSON and as a table.

    python -m bench.gpu --out FILE [figure ...]

A figure that fails is reported and the others go on; the exit code then is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu import hand_over, landing, landing_causes, measure, parts, replay, steps, timeline
from bench.serving.link import ratios_of_link
from engine.build_device import DeviceEngineParts
from foundation.kv_layout import HeadOrder

HEAD_ORDER: HeadOrder = "HND"
INVARIANT_KV_GIB = 32
LAYER_GROUP = 8
SERVING_SECTIONS = ("link", "hand_over", "landing")


class Run:
    """Figures by name, and the engine that those of the loop share."""

    def __init__(self, out: Path) -> None:
        self.figures: dict[str, Any] = {}
        self.picture = out.with_name(f"{out.stem}-timeline.png")
        self._parts: DeviceEngineParts | None = None

    def report(self, line: str) -> None:
        sys.stdout.write(f"    {line}\n")
        sys.stdout.flush()

    def engine(self) -> DeviceEngineParts:
        if self._parts is None:
            torch.cuda.empty_cache()
            folder = Path(tempfile.mkdtemp())
            self._parts, seconds = steps.build(folder, HEAD_ORDER, LAYER_GROUP)
            self.figures["start_s"] = seconds
            warm = self._parts.runner.warm
            self.figures["graphs"] = {
                "captured": warm.graphs,
                "capture_gib": warm.capture_bytes / 2**30,
                "warm_up_s": warm.seconds,
            }
            for line in self._parts.report:
                self.report(line)
        return self._parts

    def serving(self) -> dict[str, Any]:
        """A router, a prefill and a decode node that share this GPU: hand-over while nothing else runs on it."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "serving.json"
            command = [sys.executable, "-m", "bench.serving", "--out", str(out), "--minutes", "3"]
            command += ["--prefill-devices", "cuda:0", "--decode-devices", "cuda:0", "--", *SERVING_SECTIONS]
            subprocess.run(command, check=False, timeout=240)
            found: dict[str, Any] = json.loads(out.read_text())
        return found

    def ceilings(self) -> dict[str, float]:
        return {
            "copy_tb_s": measure.copy_bytes_a_second() / 1e12,
            "read_tb_s": measure.read_bytes_a_second() / 1e12,
            "matmul_tflops": measure.matmul_flops() / 1e12,
        }

    def layouts(self) -> dict[str, float]:
        return parts.attention_by_layout(self.report)

    def attention(self) -> dict[str, float]:
        return parts.attention_of_steps(self.report, HEAD_ORDER, LAYER_GROUP)

    def linears(self) -> dict[str, float]:
        return parts.linears(self.report)

    def decode(self) -> dict[str, Any]:
        cases = {"batch1": (1, 128), "batch64_2k": (64, 2048), "batch256_1k": (256, 1024)}
        return {name: self._told(name, steps.decode(self.engine(), *case)) for name, case in cases.items()}

    def decode_more(self) -> dict[str, Any]:
        cases = [(1, 16_384), (8, 2048), (16, 2048), (32, 2048), (1, 32_000)]
        more = {f"{r}x{m}": self._told(f"{r}x{m}", steps.decode(self.engine(), r, m, profile=False)) for r, m in cases}
        more["64x2048_sampled"] = self._told("sampled", steps.decode(self.engine(), 64, 2048, temperature=0.7))
        return more

    def eager(self) -> dict[str, Any]:
        """The same decode steps and small prefills without any graph."""
        engine = self.engine()
        kept = steps.eager_only(engine)
        try:
            return {
                "batch1": self._told("eager batch1", steps.decode(engine, 1, 128)),
                "batch64_2k": self._told("eager batch64_2k", steps.decode(engine, 64, 2048)),
            } | {f"prefill_{n}": self._told(f"eager {n}", steps.prefill(engine, n)) for n in (64, 128, 256, 512)}
        finally:
            engine.runner.selector = kept

    def host(self) -> dict[str, str]:
        """Where the host's time goes in an eager step."""
        engine = self.engine()
        kept = steps.eager_only(engine)
        try:
            text = steps.host_profile(engine, 64)
        finally:
            engine.runner.selector = kept
        self.report(text)
        return {}

    def prefill(self) -> dict[str, Any]:
        return {
            str(n): self._told(f"prefill {n}", steps.prefill(self.engine(), n)) for n in (64, 128, 256, 512, 2048, 8192)
        }

    def prefill_more(self) -> dict[str, Any]:
        return {
            "16384": self._told("prefill 16384", steps.prefill(self.engine(), 16_384, repetitions=3)),
            "32000": self._told("prefill 32000", steps.prefill(self.engine(), 32_000, repetitions=2)),
            "32x2048": self._told("32 x 2048", steps.prefill_many(self.engine(), 32, 2048)),
        }

    def hand_over(self) -> dict[str, float]:
        return hand_over.hand_over(self.report)

    def profile_prefill(self) -> dict[str, Any]:
        """Where a prompt's time goes on the GPU."""
        return {str(n): self._told(f"profile {n}", steps.profile_prefill(self.engine(), n)) for n in (512, 2048, 8192)}

    def mixed(self) -> dict[str, float]:
        return self._told("mixed 64 + 512", steps.mixed(self.engine(), 64, 2048, 512))

    def replay(self) -> dict[str, float]:
        """300 mixed steps in the modes that are chosen, against each mode forced."""
        return self._told("replay", replay.replay(self.engine()))

    def landing(self) -> dict[str, Any]:
        """Decode beside KV that lands at 50 GB/s, from another GPU too, if there is one; prefill beside gathers."""
        engine = self.engine()
        sources: dict[str, torch.device | None] = {"decode": None}
        if torch.cuda.device_count() > 1:
            sources["decode_from_gpu"] = torch.device("cuda", 1)
        found = {}
        for name, source in sources.items():
            copying = landing.Copying(HEAD_ORDER, LAYER_GROUP, source=source)
            found[name] = self._told(name, landing.decode_beside_landing(engine, copying, 64, 2048, 50.0))
        found["prefill"] = self._told("gathers", landing.prefill_beside_gathers(engine, HEAD_ORDER, LAYER_GROUP))
        return found

    def invariant(self) -> dict[str, Any]:
        """What equal bits in every step cost: steps of an engine with --batch-invariant beside those of the normal one."""

        def measured(mode: str, engine: DeviceEngineParts) -> dict[str, float]:
            decodes = {"decode_1x128": (1, 128), "decode_64x2048": (64, 2048)}
            cases = {name: self._told(f"{mode} {name}", steps.decode(engine, *case)) for name, case in decodes.items()}
            cases["prefill_2048"] = self._told(f"{mode} prefill_2048", steps.prefill(engine, 2048))
            return {name: case["ms"] for name, case in cases.items()}

        normal = measured("normal", self.engine())
        with tempfile.TemporaryDirectory() as folder:
            self._parts = None  # its pool makes room
            gc.collect()
            torch.cuda.empty_cache()
            engine, _ = steps.build(
                Path(folder), HEAD_ORDER, LAYER_GROUP, kv_gib=INVARIANT_KV_GIB, batch_invariant=True
            )
        for line in engine.report:
            self.report(line)
        invariant = measured("batch-invariant", engine)
        engine.runner.close()
        price = self._told("price", {name: invariant[name] / normal[name] for name in normal})
        return {"normal_ms": normal, "invariant_ms": invariant, "price": price}

    def landing_causes(self) -> dict[str, dict[str, float]]:
        """Whether landing KV slows the GPU's kernels or the host."""
        return landing_causes.landing_causes(self.engine(), HEAD_ORDER, LAYER_GROUP, 64, 2048, self.report)

    def timeline(self) -> dict[str, float]:
        """Two decode steps and a prefill as a picture beside the figures."""
        found = timeline.timelines(self.engine(), 64, 2048, 2048)
        timeline.draw(found, self.picture)
        self.report(f"{self.picture}: {self.picture.stat().st_size >> 10} KiB")
        return {shown.title: shown.busy_share() for shown in found}

    def _told(self, name: str, figures: dict[str, float]) -> dict[str, float]:
        self.report(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
        return figures


FIGURES: tuple[Callable[[Run], Any], ...] = (
    Run.serving,  # before an engine takes the memory
    Run.ceilings,
    Run.layouts,
    Run.attention,
    Run.hand_over,
    Run.linears,
    Run.decode,
    Run.prefill,
    Run.eager,
    Run.decode_more,
    Run.prefill_more,
    Run.mixed,
    Run.replay,
    Run.landing,
    Run.landing_causes,
    Run.profile_prefill,
    Run.timeline,
    Run.host,
    Run.invariant,
)


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that are compared from run to run, under the names they keep."""
    decode, prefill = figures.get("decode"), figures.get("prefill")
    short: dict[str, Any] = {}
    if isinstance(decode, dict):
        short["decode_step_ms"] = {name: case["ms"] for name, case in decode.items()}
        short["gpu_idle_share"] = {name: case["gpu_idle_share"] for name, case in decode.items()}
    if isinstance(prefill, dict):
        short["prefill_ms"] = {name: case["ms"] for name, case in prefill.items()}
    if isinstance(landing := figures.get("landing"), dict):
        short["itl_under_landing"] = {name: landing["decode"][name] for name in ("p50", "p99")}
        short["prefill_under_gathers"] = landing["prefill"]["price"]
    if isinstance(replay := figures.get("replay"), dict):
        short["replay_chosen_over_best"] = replay["chosen_over_best"]
    if isinstance(serving := figures.get("serving"), dict):
        short |= _serving_summary(serving, short.get("gpu_idle_share", {}))
    return short


def _serving_summary(serving: dict[str, Any], idle_share: dict[str, float]) -> dict[str, Any]:
    short: dict[str, Any] = {}
    if hand_over := serving.get("hand_over"):
        short |= {name: hand_over[name] for name in ("handover_ms", "second_token_gap_ms", "ttft_added_ms")}
    if link := serving.get("link"):
        short |= ratios_of_link(link)
    if landing := serving.get("landing"):
        short["gpu_idle_share"] = idle_share | {"serving": landing["gpu_idle_share_serving"]}
    return short


def main() -> int:
    by_name = {figure.__name__: figure for figure in FIGURES}
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("figures", nargs="*", choices=[*by_name, []])
    arguments = parser.parse_args()
    run, failed = Run(arguments.out), False
    run.figures["device"] = torch.cuda.get_device_name()
    for name in arguments.figures or by_name:
        begun = time.perf_counter()
        sys.stdout.write(f"{name}\n")
        try:
            run.figures[name] = by_name[name](run)
        except Exception:
            failed = True
            run.figures[name] = "failed"
            traceback.print_exc(file=sys.stdout)
        run.report(f"({time.perf_counter() - begun:.1f} s)")
        arguments.out.write_text(json.dumps(summary(run.figures) | run.figures, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
