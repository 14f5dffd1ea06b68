"""How Triton's kernels are launched without it, over stand-ins for what it compiles and for what the driver knows of that."""

from __future__ import annotations

from struct import unpack
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.errors import SetupError
from kv_transfer.device_launches import Launch
from kv_transfer.triton_launch import triton_launch

SIGNATURE = {"pool": "*i64", "blocks": "*i32", "count": "i32", "STRIDE": "constexpr", "size": "i64", "heads": "i32"}
AS_THEY_LIE = [(0, 8), (8, 8), (16, 4), (24, 8), (32, 4), (40, 8), (48, 8)]


class Driver:
    def __init__(self, parameters: list[tuple[int, int]]) -> None:
        self._parameters = parameters

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        assert function.value == 99
        if index.value >= len(self._parameters):
            return 1
        offset._obj.value, size._obj.value = self._parameters[index.value]
        return 0


def compiled(signature: dict[str, str] = SIGNATURE, **launcher: object) -> Any:
    plain = {
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
    }
    return SimpleNamespace(
        run=SimpleNamespace(**(plain | launcher)),
        function=99,
        metadata=SimpleNamespace(num_warps=8, shared=512),
        src=SimpleNamespace(signature=signature),
    )


def test_arguments_lie_as_the_driver_says_and_null_stands_for_scratch_memory() -> None:
    launch = triton_launch(compiled(), Driver(AS_THEY_LIE)).over(264, 1 << 40, 2 << 40, 3, 4 << 40, -5)  # type: ignore[arg-type]
    assert launch == Launch(99, 264, 256, 512, launch.arguments)
    assert unpack("=QQi4xqi4xQQ", launch.arguments) == (1 << 40, 2 << 40, 3, 4 << 40, -5, 0, 0)


@pytest.mark.parametrize(
    ("parameters", "signature", "launcher"),
    [
        (AS_THEY_LIE[:-1], SIGNATURE, {}),
        ([*AS_THEY_LIE, (56, 8)], SIGNATURE, {}),
        ([(place, 4 if place == 24 else size) for place, size in AS_THEY_LIE], SIGNATURE, {}),
        ([], SIGNATURE, {}),
        (AS_THEY_LIE, SIGNATURE | {"size": "i128"}, {}),
        ([(8 * place, 8) for place in range(42)], {f"p{place}": "*i8" for place in range(40)}, {}),
        (AS_THEY_LIE, SIGNATURE, {"num_ctas": 2}),
        (AS_THEY_LIE, SIGNATURE, {"global_scratch_size": 128}),
        (AS_THEY_LIE, SIGNATURE, {"profile_scratch_size": 128}),
        (AS_THEY_LIE, SIGNATURE, {"launch_cooperative_grid": True}),
        (AS_THEY_LIE, SIGNATURE, {"launch_pdl": True}),
    ],
)
def test_what_would_be_launched_in_another_way_stops_the_start(
    parameters: list[tuple[int, int]], signature: dict[str, str], launcher: dict[str, object]
) -> None:
    with pytest.raises(SetupError, match="version of Triton is not known"):
        triton_launch(compiled(signature, **launcher), Driver(parameters))  # type: ignore[arg-type]
