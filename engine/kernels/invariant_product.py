"""Matrix products whose rows do not know each other: a row of y = x W^T + b has the same bits whatever rows stand beside it.

An output is one float32 sum over the features in their order, rounded once; nothing splits it. Tiles of other sizes keep that
order, so that few rows can be read along the weight and many computed along both, but that the hardware then sums alike is
measured, not known: `agreeing_tilings` drops those whose sums differ from the smallest tile's in any bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.overlap import OVERLAPPED

ROW_TILES_A_GROUP = 8
"""Tiles of rows that take the same piece of the weight one after another, from the cache."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of products of at least `from_rows` rows and `from_outputs` outputs."""

    from_rows: int
    from_outputs: int
    rows: int
    outputs: int
    step: int
    warps: int
    stages: int


TILINGS = (
    Tiling(0, 0, rows=64, outputs=64, step=128, warps=4, stages=4),
    Tiling(33, 16_384, rows=64, outputs=128, step=128, warps=4, stages=3),
    Tiling(129, 0, rows=128, outputs=128, step=64, warps=8, stages=4),
    Tiling(1024, 0, rows=128, outputs=256, step=64, warps=8, stages=3),
)
"""The last that fits is taken. The first reads a weight for few rows: many thread blocks, each with much of it on its way; where
there are enough of them, wider ones read the rows less often."""


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    in_features,
    out_features,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    ROW_TILES_A_GROUP: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, ROWS)
    programs_a_group = ROW_TILES_A_GROUP * tl.cdiv(out_features, OUTPUTS)
    group = tl.program_id(0) // programs_a_group
    first_tile = group * ROW_TILES_A_GROUP
    tiles = tl.minimum(row_tiles - first_tile, ROW_TILES_A_GROUP)
    in_group = tl.program_id(0) % programs_a_group
    row = (first_tile + in_group % tiles) * ROWS + tl.arange(0, ROWS)
    output = (in_group // tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, STEP)
    live_rows, live_outputs = (row < rows)[:, None], (output < out_features)[:, None]
    row_place = x + row.to(tl.int64)[:, None] * in_features + lane[None, :]
    weight_place = weight + output.to(tl.int64)[:, None] * in_features + lane[None, :]
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for offset in range(0, in_features, STEP):
        if EVEN:
            values = tl.load(row_place + offset, mask=live_rows, other=0.0)
            weights = tl.load(weight_place + offset, mask=live_outputs, other=0.0)
        else:
            live = (offset + lane < in_features)[None, :]
            values = tl.load(row_place + offset, mask=live_rows & live, other=0.0)
            weights = tl.load(weight_place + offset, mask=live_outputs & live, other=0.0)
        total = tl.dot(values, weights.T, total)
    if BIASED:
        total += tl.load(bias + output, mask=output < out_features, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_features + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=live_rows & (output < out_features)[None, :])


def invariant_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: Tiling,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out]; all contiguous."""
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if out is None:
        out = x.new_empty(rows, out_features)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous(), "a product of strided matrices"  # noqa: PT018
    programs = triton.cdiv(rows, tiling.rows) * triton.cdiv(out_features, tiling.outputs)
    if programs:
        _product[(programs,)](
            x,
            weight,
            bias,
            out,
            rows,
            in_features,
            out_features,
            ROWS=tiling.rows,
            OUTPUTS=tiling.outputs,
            STEP=tiling.step,
            ROW_TILES_A_GROUP=ROW_TILES_A_GROUP,
            BIASED=bias is not None,
            EVEN=in_features % tiling.step == 0,
            OVERLAPPED=OVERLAPPED,
            launch_pdl=OVERLAPPED,
            enable_fp_fusion=False,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return out


def tiling_for(tilings: tuple[Tiling, ...], rows: int, outputs: int) -> Tiling:
    return next(tiling for tiling in reversed(tilings) if tiling.from_rows <= rows and tiling.from_outputs <= outputs)


def agreeing_tilings(dtype: torch.dtype, device: torch.device) -> tuple[Tiling, ...]:
    """Those of `TILINGS` whose float32 sums here equal the first one's bit by bit, on numbers of many magnitudes."""
    rows, in_features, out_features = 192, 4096, 320
    generator = torch.Generator(device).manual_seed(0)

    def numbers(count: int) -> torch.Tensor:
        normal = torch.randn(count, in_features, generator=generator, device=device)
        magnitude = torch.randn(count, in_features, generator=generator, device=device)
        return (normal * (2 * magnitude).exp2()).to(dtype)

    x, weight = numbers(rows), numbers(out_features)

    def sums(tiling: Tiling) -> torch.Tensor:
        return invariant_product(x, weight, None, tiling, torch.empty(rows, out_features, device=device))

    first = sums(TILINGS[0])
    return TILINGS[:1] + tuple(tiling for tiling in TILINGS[1:] if torch.equal(sums(tiling), first))
