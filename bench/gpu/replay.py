"""Whether the run-time choice of mode is right: 300 mixed steps in the modes that were chosen, and forced into one mode each.

Steps are random: batches of decodes, half of them with a chunk of a prompt beside them. Forced, a step runs in that mode where it
is correct for it, otherwise eagerly. All four runs launch the same plans in the same order, one ahead of the host, as loops do.
Contexts lie in one block that nobody owns, so attention reads from caches: modes are compared, not machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from bench.gpu.parts import BLOCK_SIZE, Figures
from engine.build_device import PIECEWISE_SIZES, DeviceEngineParts
from engine.executor.device_runner import leading_decodes
from engine.graphs.select import Choice, Mode, Reason, StepDescriptor, decode_buckets
from engine.step import StepPlan
from engine.trial_steps import trial_step_in_one_block

STEPS = 300
MOST_DECODES, MOST_CHUNK, MOST_CONTEXT = 128, 600, 2048
ROUNDS = 2

Choose = Callable[[StepPlan], Choice]


def replay(parts: DeviceEngineParts) -> Figures:
    """Milliseconds a step by policy, and the chosen modes' time over the best forced one's."""
    plans = mixed_plans(parts)
    selector = parts.runner.selector

    def chosen(plan: StepPlan) -> Choice:
        return selector.choose(_descriptor(plan))

    policies: dict[str, Choose] = {"chosen": chosen}
    policies |= {mode.value: _forced(parts, mode) for mode in Mode}
    seconds = {name: min(_run(parts, plans, choose) for _ in range(ROUNDS)) for name, choose in policies.items()}
    figures = {f"{name}_ms": total / len(plans) * 1e3 for name, total in seconds.items()}
    figures["chosen_over_best"] = seconds["chosen"] / min(seconds[mode.value] for mode in Mode)
    return figures


def _descriptor(plan: StepPlan) -> StepDescriptor:
    return StepDescriptor(plan.tokens, leading_decodes(plan), all_draw=len(plan.sample_tokens) == plan.rows)


def _forced(parts: DeviceEngineParts, mode: Mode) -> Choose:
    """`mode` where it is correct and captured; its smallest bucket that holds the step."""
    captured = {Mode.FULL: decode_buckets(parts.config.max_num_seqs), Mode.PIECEWISE: PIECEWISE_SIZES, Mode.EAGER: ()}
    buckets = captured[mode]

    def choose(plan: StepPlan) -> Choice:
        only_decodes = leading_decodes(plan) == plan.rows and len(plan.sample_tokens) == plan.rows
        fitting = [bucket for bucket in buckets if bucket >= plan.tokens]
        if fitting and (mode is Mode.PIECEWISE or only_decodes):
            return Choice(mode, min(fitting), Reason.NONE)
        return Choice(Mode.EAGER, plan.tokens, Reason.NONE)

    return choose


def _run(parts: DeviceEngineParts, plans: Sequence[StepPlan], choose: Choose) -> float:
    runner = parts.runner
    runner.launch_as(plans[0], choose(plans[0])).result()
    begun = time.perf_counter()
    before = runner.launch_as(plans[0], choose(plans[0]))
    for plan in plans[1:]:
        launched = runner.launch_as(plan, choose(plan))
        before.result()
        before = launched
    before.result()
    return time.perf_counter() - begun


def mixed_plans(parts: DeviceEngineParts, seed: int = 0) -> list[StepPlan]:
    generator = np.random.default_rng(seed)
    plans = []
    for number in range(STEPS):
        decodes = int(generator.integers(1, MOST_DECODES + 1))
        counts = [1] * decodes
        contexts = generator.integers(1, MOST_CONTEXT + 1, decodes).tolist()
        if number % 2:
            chunk = int(generator.integers(2, MOST_CHUNK + 1))
            counts.append(chunk)
            contexts.append(chunk + int(generator.integers(0, MOST_CONTEXT)))
        plans.append(trial_step_in_one_block(number, counts, contexts, parts.storage.dummy_block, BLOCK_SIZE))
    return plans
