"""The GPUs of this machine, as the driver lists them: without CUDA and torch, so that looking costs nothing and holds none.

Must not know: what runs on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HIDES_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    numa_node: int | None
    near_cores: str
    """As the kernel lists them (`0-15,32-47`); empty when it does not say."""


def gpus_here() -> tuple[Gpu, ...]:
    """Empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def count_visible(environment: Mapping[str, str]) -> int:
    """GPUs that a process with this environment may use."""
    count = len(gpus_here())
    if HIDES_GPUS not in environment:
        return count
    return min(count, sum(1 for name in environment[HIDES_GPUS].split(",") if name.strip() not in ("", "-1")))


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    device = Path("/sys/bus/pci/devices") / _pci_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    node = _read(device / "numa_node")
    return Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=_text(pynvml.nvmlSystemGetDriverVersion()),
        numa_node=int(node) if node and int(node) >= 0 else None,
        near_cores=_read(device / "local_cpulist"),
    )


def _pci_address(bus_id: str) -> str:
    """NVML writes an 8-digit domain in capitals, the kernel 4 digits in small letters."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
