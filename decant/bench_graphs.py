"""`decant bench graphs`: what CUDA graphs give on this GPU for this model, over a random load, and why.

Takes a decode node's options. Nothing is served: one engine runs requests of random lengths, as they might mix on a decode node
that computes its prompts itself, and `engine.graphs.explain` says what came of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from decant.processes import ALL_FIELDS
from engine.port import Mode, RequestKey, SamplingParameters, Submit
from foundation.errors import ConfigurationError
from foundation.option_sources import parse
from node.options import DecodeOptions

if TYPE_CHECKING:
    from engine.loop import Engine

REQUESTS, SEED = 200, 0
MOST_PROMPT, MOST_ANSWER = 1024, 128
ARRIVE_EVERY_STEPS = 4
STEPS_AT_MOST = 100_000


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    if not arguments or arguments[0] != "graphs":
        sys.stderr.write("usage: decant bench graphs [option ...]    (options of decant decode)\n")
        return 2
    parsed = parse(
        DecodeOptions,
        arguments[1:],
        environment,
        program="decant bench graphs",
        description="What CUDA graphs give on this GPU for this model, over a random load.",
        other_fields=ALL_FIELDS,
    )
    if parsed.print_config:
        sys.stdout.write(parsed.describe() + "\n")
        return 0
    from engine.build import EngineParts
    from engine.graphs.explain import explain
    from node.engine_setup import prepare_engine

    ready = prepare_engine(parsed.options)
    if isinstance(ready.parts, EngineParts):
        raise ConfigurationError("--device", "graphs are captured on a GPU only, and this engine runs on a CPU")
    selector = ready.parts.runner.selector
    selector.forget_statistics()
    limit = min(MOST_PROMPT + MOST_ANSWER, ready.config.max_model_len)
    begun = time.perf_counter()
    run_load(ready.engine, limit, ready.parts.fingerprint.vocabulary_size)
    for line in explain(selector.statistics, selector.costs, time.perf_counter() - begun):
        sys.stdout.write(line + "\n")
    return 0


def run_load(engine: Engine, most_positions: int, vocabulary_size: int, requests: int = REQUESTS) -> None:
    """Requests of random lengths, a new one every few steps, until all have ended."""
    generator = np.random.default_rng(SEED)
    sent = 0
    for step in range(STEPS_AT_MOST):
        if sent < requests and step % ARRIVE_EVERY_STEPS == 0:
            answer = int(generator.integers(1, min(MOST_ANSWER, most_positions // 2) + 1))
            prompt = generator.integers(0, vocabulary_size, int(generator.integers(1, most_positions - answer + 1)))
            sampling = SamplingParameters(seed=sent, max_tokens=answer, temperature=0.0, ignore_eos=True)
            engine.take(Submit(RequestKey(f"load-{sent}"), tuple(prompt.tolist()), sampling, Mode.GENERATE))
            sent += 1
        engine.step()
        if sent == requests and not engine.status().has_work:
            return
    raise AssertionError(f"the load does not end within {STEPS_AT_MOST} steps")
