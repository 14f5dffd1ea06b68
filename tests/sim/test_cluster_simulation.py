"""The cluster simulation as CI's tests see it: it runs, it replays, it needs no torch, and it finds what was planted.

Seeds run in a process of their own, since they replay only under a fixed hash seed. The many seeds are `make sim`'s.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_mutants import MUTANTS, hunt

SIMULATION = Path(__file__).with_name("cluster.py")
FOUND_BY_SEED = (22, 25)
"""Seeds that showed bugs: an operation that ended after its session's fence; a P that waited for a fence for ever."""
QUICKLY_CAUGHT = ("what was granted counts as verified", "a fence before the operations have ended")


def run(*arguments: str) -> list[str]:
    """Lines of the output; fails when an invariant was broken."""
    command = [sys.executable, str(SIMULATION), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_no_invariant_is_broken_in_a_few_clusters() -> None:
    closing = run("--seeds", "12", "--jobs", "1")[-1]
    assert closing.startswith("simulated 12 seeds: 0 with violations")


def test_a_seed_replays_to_the_letter() -> None:
    assert run("--seed", "5")[:-1] == run("--seed", "5")[:-1]


def test_seeds_that_found_bugs_find_none_any_more() -> None:
    run(*(argument for seed in FOUND_BY_SEED for argument in ("--seed", str(seed))))


def test_no_torch_is_loaded() -> None:
    program = "import sys; from cluster_simulation import simulate; simulate(0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=SIMULATION.parent, check=True, timeout=110)


@pytest.mark.parametrize("name", QUICKLY_CAUGHT)
def test_a_planted_bug_is_caught(name: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    _, violation = hunt(mutant, 40)
    assert violation, "no seed shows it"
