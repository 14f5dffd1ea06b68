"""The simplest way to drive a `Runner`: one sequence, greedy, blocks in a given order; no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from step_plans import batch_plan

from engine.step import Runner


def generate(
    runner: Runner,
    prompt: Sequence[int],
    max_tokens: int,
    blocks: Sequence[int],
    block_size: int,
    chunk: int,
    eos: Sequence[int],
) -> list[int]:
    """Greedy tokens after `prompt`, whose prefill is cut into chunks. Decode steps are launched before the last one's token is
    known, as an overlapped scheduler does, except that the last one is thrown away."""
    for first in range(0, len(prompt), chunk):
        ids = prompt[first : first + chunk]
        last = first + chunk >= len(prompt)
        launched = runner.launch(batch_plan(0, [(ids, first, blocks)], block_size, sample=[last]))
    tokens: list[int] = []
    for step in range(1, max_tokens + 1):
        position = len(prompt) + step - 1
        following = runner.launch(batch_plan(step, [([0], position, blocks)], block_size, feedback=[0]))
        tokens.append(int(launched.result().token_ids[0]))
        launched = following
        if tokens[-1] in eos:
            break
    launched.result()
    return tokens
