"""A step's plan as tensors on the device. Nothing is chosen here: the plan has chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`wanted_tokens`: those that draw, then those that are scored; None when every token draws, in order."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted_tokens: torch.Tensor | None


def step_inputs(plan: StepPlan, previous_tokens: torch.Tensor | None, device: torch.device) -> StepInputs:
    """`previous_tokens` [S'] are the samples of the plan launched before; needed when `feedback` names any."""
    token_ids = torch.from_numpy(plan.token_ids).to(device)
    fed = np.flatnonzero(plan.feedback >= 0)
    if len(fed):
        assert previous_tokens is not None, f"step {plan.number} takes tokens from a step that never ran"
        sources = torch.from_numpy(plan.feedback[fed].astype(np.int64)).to(device)
        token_ids = token_ids.index_put((torch.from_numpy(fed).to(device),), previous_tokens[sources])
    wanted = plan.sample_tokens
    if plan.scored is not None:
        wanted = np.concatenate((wanted, plan.scored.tokens))
    everything = len(wanted) == plan.tokens and bool((wanted == np.arange(plan.tokens)).all())
    return StepInputs(
        token_ids=token_ids,
        positions=torch.from_numpy(plan.positions).to(device),
        wanted_tokens=None if everything else torch.from_numpy(wanted.astype(np.int64)).to(device),
    )
