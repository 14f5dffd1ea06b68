"""Attention of rows with few queries in compiled code that reads the pool where it lies: `paged_rows.c`, through ctypes.

PyTorch has no operation that follows a block table, so without this every step copies all keys and values of its batch (a
quarter of a decode step of 16 sequences). The source is compiled for this machine when it is first needed and kept in the
cache folder; where there is no C compiler, `PagedAttention` gathers and uses PyTorch: slower, same result.

Calls let go of the interpreter lock. Must not know: plans, layers' names, threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from foundation.native_library import native_library

SOURCE = Path(__file__).with_name("paged_rows.c")
FLAGS = (
    *("-O3", "-march=native", "-mprefer-vector-width=512"),
    # Sums may be reordered into vector code; NaN and infinity keep their meaning.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
LANES = 16

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolStrides:
    """Distances in elements within one shard's pool."""

    block: int
    head: int
    position: int
    block_size: int
    heads: int


@dataclass(frozen=True, slots=True)
class RowQueries:
    """Which queries of a step are attended here: token i belongs to row rows[i] and looks at limits[i] positions.

    `tables` [R, n] int32; the others [count] int64."""

    tables: npt.NDArray[np.int32]
    tokens: Int64
    rows: Int64
    limits: Int64


class RowsKernel:
    """`attend_queries` for one head_dim and number of query heads a KV head."""

    def __init__(self, function: Callable[..., None], head_dim: int) -> None:
        self._function = function
        self._scale = head_dim**-0.5

    def attend(
        self,
        queries: torch.Tensor,
        out: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        strides: PoolStrides,
        which: RowQueries,
        scores: torch.Tensor,
    ) -> None:
        """Fill rows `which.tokens` of `out` [T, heads * head_dim] from float32 `queries` [T, heads, head_dim], whose heads are
        contiguous. `keys` and `values` begin at the first one of block 0; `scores` has room for group x longest limit."""
        assert queries.stride()[1:] == (queries.shape[2], 1), "heads of a token must lie together"
        self._function(
            *(queries.data_ptr(), queries.stride(0), out.data_ptr(), out.stride(0)),
            *(keys.data_ptr(), values.data_ptr(), strides.block, strides.head, strides.position),
            *(strides.block_size, strides.heads, which.tables.ctypes.data, which.tables.shape[1]),
            *(which.tokens.ctypes.data, which.rows.ctypes.data, which.limits.ctypes.data, len(which.tokens)),
            *(self._scale, scores.data_ptr()),
        )


@cache
def rows_kernel(head_dim: int, group: int) -> RowsKernel | None:
    """Compiled once a machine (about a second); None where it cannot be compiled or this shape has no whole vectors."""
    if head_dim % LANES:
        return None
    library = native_library(SOURCE, (*FLAGS, f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"), ("-lm",))
    if library is None:
        return None
    function = library.attend_queries
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = [
        *(pointer, count, pointer, count),
        *(pointer, pointer, count, count, count),
        *(count, count, pointer, count),
        *(pointer, pointer, pointer, count),
        *(ctypes.c_float, pointer),
    ]
    return RowsKernel(function, head_dim)
