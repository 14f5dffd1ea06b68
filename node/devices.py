"""Which device a node computes on: what `--device` asks for, if it can serve there.

`auto` takes a GPU if the engine can run on it, and says in the log why it did not. Asking for a GPU that cannot serve is an error
with the reason. Where no number is given, the nodes of a machine spread over its GPUs by their node index.

Must not know: roles, models.
"""

from __future__ import annotations

import importlib.util

import torch

from foundation.errors import ConfigurationError
from foundation.log import get_logger

KERNEL_LIBRARIES = ("triton", "flashinfer")
HOPPER = (9, 0)
"""Prompts run through FlashAttention-3, which is written for this generation."""

log = get_logger()


def device_of(asked: str, node_index: int, *, toy: bool) -> torch.device:
    """`asked`: auto, cpu, cuda or cuda:N. Raises ConfigurationError naming what this GPU, or this machine, lacks."""
    if asked == "cpu" or (asked == "auto" and toy):
        return torch.device("cpu")
    count = max(1, torch.cuda.device_count())
    device = torch.device("cuda", node_index % count) if asked in ("auto", "cuda") else torch.device(asked)
    problem = problem_of(device)
    if problem is None:
        return device
    if asked != "auto":
        raise ConfigurationError("--device", f"is {asked}; {problem}")
    if torch.cuda.is_available():
        log.warning("no GPU is used", because=problem)
    return torch.device("cpu")


def problem_of(device: torch.device) -> str | None:
    """Why the engine cannot run there; None when it can."""
    if not torch.cuda.is_available():
        return "no GPU can be used by this process (CUDA_VISIBLE_DEVICES, driver, or a torch without CUDA)"
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        return f"GPUs here are numbered 0 to {count - 1}"
    if (generation := torch.cuda.get_device_capability(device)) < HOPPER:
        return f"{torch.cuda.get_device_name(device)} has compute capability {generation}, less than {HOPPER}"
    missing = [name for name in KERNEL_LIBRARIES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} cannot be imported" if missing else None
