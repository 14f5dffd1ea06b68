from __future__ import annotations

import pytest
import torch

from foundation.errors import ConfigurationError
from node.devices import device_of
from node.options import MIB, DecodeOptions, PrefillOptions

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert device_of("auto", 0, toy=False) == torch.device("cpu")


def test_the_toy_model_runs_on_the_cpu() -> None:
    assert device_of("auto", 0, toy=True) == torch.device("cpu")


@no_gpu
@pytest.mark.parametrize("asked", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_named(asked: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--device: is {asked}; no GPU can be used"):
        device_of(asked, 0, toy=False)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:1234"])
def test_a_device_is_auto_cpu_or_a_numbered_gpu(device: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--device: .* is not one of auto, cpu, cuda, cuda:N"):
        DecodeOptions(model="m", device=device)


def test_slots_on_a_gpu_are_larger_and_fit_twice_into_what_staging_is_given() -> None:
    options = DecodeOptions(model="m")
    assert options.staging_on("cpu") == (512 * MIB, 4 * MIB)
    assert options.staging_on("cuda") == (4096 * MIB, 64 * MIB)
    assert PrefillOptions(model="m", key_file="k").staging_on("cpu") == (256 * MIB, 4 * MIB)
    assert DecodeOptions(model="m", staging_bytes=8 * MIB).staging_on("cuda") == (8 * MIB, 4 * MIB)
    with pytest.raises(ConfigurationError, match="--staging-bytes: must hold at least two slots"):
        DecodeOptions(model="m", device="cuda", slot_bytes=4096 * MIB)
