"""Numbers of the host's that change logits, brought to where these are.

Must not know: what they mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def beside(logits: torch.Tensor, values: npt.NDArray[Any]) -> torch.Tensor:
    """`values` on the device of `logits`. On a GPU they are on their way: nothing waits for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    device = logits.device
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
