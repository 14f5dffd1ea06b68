"""How a kernel that Triton has compiled is launched without Triton, whose launcher is Python's.

What Triton hands to the driver is the kernel's arguments in their order, without the constants, and behind them two addresses of
scratch memory (so in 3.6 to 3.9). The driver is asked whether the kernel's parameters are just these.

Must not know: what kernels do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from struct import Struct, calcsize
from typing import Any

from foundation.errors import SetupError
from kv_transfer.device_launches import ARGUMENT_BYTES, Launch

_FORMATS = {"i32": "i", "i64": "q", "u64": "Q"}
_POINTER = "Q"
_SCRATCH = 2 * _POINTER
WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """A kernel as the driver knows it."""

    function: int
    threads: int
    shared_bytes: int
    parameters: Struct

    def over(self, programs: int, *arguments: int) -> Launch:
        """`arguments`: all but the constants. Raises struct.error where one is too large for the kernel."""
        packed = self.parameters.pack(*arguments, 0, 0)
        return Launch(self.function, programs, self.threads, self.shared_bytes, packed)


def triton_launch(compiled: Any, driver: ctypes.CDLL) -> TritonLaunch:
    """`compiled`: what Triton's `warmup` gives, which is loaded onto the current device. `driver`: libcuda. Raises SetupError
    where this Triton launches it in another way."""
    launcher, metadata = compiled.run, compiled.metadata
    needs = {
        "clusters": launcher.num_ctas != 1,
        "scratch memory": bool(launcher.global_scratch_size or launcher.profile_scratch_size),
        "a cooperative launch": bool(launcher.launch_cooperative_grid),
        "a dependent launch": bool(launcher.launch_pdl),
    }
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    formats = "".join(_POINTER if kind.startswith("*") else _FORMATS.get(kind, "") for kind in kinds) + _SCRATCH
    parameters, wanted, found = (
        Struct(formats),
        _places(formats),
        _parameters(driver, compiled.function, len(formats) + 1),
    )
    if any(needs.values()) or found != wanted or parameters.size > ARGUMENT_BYTES:
        what = ", ".join(name for name, needed in needs.items() if needed) or f"parameters {found}, not {wanted}"
        raise SetupError(f"this version of Triton is not known here: a kernel of transfers takes {what}")
    return TritonLaunch(compiled.function, metadata.num_warps * WARP_THREADS, metadata.shared, parameters)


def _places(formats: str) -> list[tuple[int, int]]:
    """Offsets and sizes of values that lie as C would have them."""
    sizes = [calcsize(one) for one in formats]
    return [(calcsize(formats[: index + 1]) - size, size) for index, size in enumerate(sizes)]


def _parameters(driver: ctypes.CDLL, function: int, at_most: int) -> list[tuple[int, int]]:
    """Offsets and sizes of a kernel's parameters."""
    found = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for index in range(at_most):
        if driver.cuFuncGetParamInfo(
            ctypes.c_void_p(function), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
        ):
            break
        found.append((offset.value, size.value))
    return found
