"""One row times a weight: y = x W^T for the decode of a single sequence, where reading W is all the work.

Each program reads whole rows of W once, in order, and keeps its sums in float32. Optionally two halves of W are combined on the
way out as a gated MLP wants it, so that the gate costs no pass of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.overlap import OVERLAPPED

ROWS_AT_MOST = 1
"""Of two rows and more the library's products are faster."""
STEP = 1024
FEW_OUTPUTS = 32_768
"""Of so few outputs each program takes one, so that enough of them run."""


@triton.jit
def _product(
    x,
    weight,
    out,
    in_features,
    out_features,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < out_features
    place = weight + output.to(tl.int64)[:, None] * in_features
    lane = tl.arange(0, STEP)
    live = lane < in_features
    mask = inside[:, None] & live[None, :]
    second = place + out_features.to(tl.int64) * in_features
    # The first piece of the weight is on its way before the row that it waits for has been written.
    first = tl.load(place + lane[None, :], mask=mask, other=0.0)
    if GATED:
        first_gated = tl.load(second + lane[None, :], mask=mask, other=0.0)
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + lane, mask=live, other=0.0).to(tl.float32)[None, :]
    total = first.to(tl.float32) * value
    if GATED:
        gated = first_gated.to(tl.float32) * value
    for offset in range(STEP, in_features, STEP):
        live = offset + lane < in_features
        mask = inside[:, None] & live[None, :]
        value = tl.load(x + offset + lane, mask=live, other=0.0).to(tl.float32)[None, :]
        total += tl.load(place + offset + lane[None, :], mask=mask, other=0.0).to(tl.float32) * value
        if GATED:
            gated += tl.load(second + offset + lane[None, :], mask=mask, other=0.0).to(tl.float32) * value
    result = tl.sum(total, axis=1)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * tl.sum(gated, axis=1)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=inside)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gated: bool = False,
    outputs: int | None = None,
    warps: int = 4,
) -> torch.Tensor:
    """x [1, in] times weight [out, in] transposed: [1, out]; `gated`: silu of the first half times the second."""
    rows, in_features = x.shape
    assert rows == ROWS_AT_MOST, f"{rows} rows"
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    if outputs is None:
        outputs = 1 if out_features <= FEW_OUTPUTS else 2
    if out is None:
        out = x.new_empty(rows, out_features)
    _product[(triton.cdiv(out_features, outputs),)](
        x,
        weight,
        out,
        in_features,
        out_features,
        OUTPUTS=outputs,
        STEP=STEP,
        GATED=gated,
        OVERLAPPED=OVERLAPPED,
        launch_pdl=OVERLAPPED,
        num_warps=warps,
    )
    return out
