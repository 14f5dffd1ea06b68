"""`decant doctor`: would Decant run here, and how well? One line a finding; exit code 1 when one of them stands in the way.

Must not know: how anything is repaired; a finding says what to do.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from decant.default_model import default_model_folder, is_converted
from decant.gpus import gpus_here
from decant.local_cluster import TOY_MODEL, LocalCluster, Request, read_request
from decant.processes import require_node_ports, require_router_ports
from foundation.api_keys import api_key_of
from foundation.errors import ConfigurationError, SetupError, StartError
from foundation.model_folder import resolve_model_folder
from node.options import NodeOptions

MIB, GIB = 2**20, 2**30
LIBRARIES = ("torch", "transformers", "libucx-cu13", "grpcio", "protobuf", "aiohttp", "redis", "structlog")
GPU_LANE_SETTINGS = ("UCX_TLS", "UCX_RNDV_SCHEME", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
FILES_WANTED = 4096
PROCESS_BYTES = 700 * MIB
"""A node's resident memory beside weights, KV and staging: Python, torch, UCX."""


class Grade(Enum):
    OK = "ok"
    NOTE = "note"
    UNSAFE = "UNSAFE"
    FAILS = "FAILS"


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    subject: str
    text: str


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    request = read_request(
        arguments, environment, "decant doctor", "Check whether Decant can run here; takes the options of `decant up`."
    )
    cluster = request.cluster(Path("(none)"))
    if request.print_config:
        sys.stdout.write(request.describe(cluster) + "\n")
        return 0
    failed = False
    for finding in examine(request, cluster, environment):
        failed = failed or finding.grade is Grade.FAILS
        sys.stdout.write(f"{finding.grade.value:<7}{finding.subject:<11}{finding.text}\n")
    return 1 if failed else 0


def examine(request: Request, cluster: LocalCluster, environment: Mapping[str, str]) -> Iterator[Finding]:
    yield from _libraries()
    yield from _gpus()
    yield from _lanes()
    yield from _ports(cluster)
    yield from _limits()
    yield from exposure(cluster, environment)
    folder, finding = _model(request)
    yield finding
    if folder is not None:
        yield _memory(cluster, folder)


def _libraries() -> Iterator[Finding]:
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(Grade.OK, "libraries", ", ".join(found))
    if missing:
        yield Finding(Grade.FAILS, "libraries", f"missing: {', '.join(missing)}; make install brings them")


def _gpus() -> Iterator[Finding]:
    """What `--device auto` would find, and which cores are near."""
    for index, gpu in enumerate(gpus_here()):
        where = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
        near = f", near cores {gpu.near_cores}" if gpu.near_cores else ""
        text = f"cuda:{index} {gpu.name}, {gpu.free_bytes / GIB:.0f} of {gpu.memory_bytes / GIB:.0f} GiB free"
        yield Finding(Grade.OK, "gpu", f"{text}, driver {gpu.driver}{where}{near}")
    cores = sorted(os.sched_getaffinity(0))
    yield Finding(Grade.OK, "cores", f"{len(cores)} for this process ({_ranges(cores)})")
    if gpus_here() and (named := [name for name in GPU_LANE_SETTINGS if name in os.environ]):
        kept = ", ".join(f"{name}={os.environ[name]}" for name in named)
        yield Finding(Grade.NOTE, "lane", f"nodes on GPUs keep {kept}, which is set here")


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,8`, of numbers in rising order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _lanes() -> Iterator[Finding]:
    """What UCX could use here. Which lane a pair takes, and how fast it is, is measured when they pair."""
    try:
        transports, version = _ucx_here()
    except (ImportError, SetupError) as error:
        yield Finding(Grade.FAILS, "ucx", f"cannot be used: {error}")
        return
    yield Finding(Grade.OK, "ucx", f"UCX {version}; transports here: {', '.join(sorted(transports)) or 'none'}")
    yield lane_finding(transports)


def _ucx_here() -> tuple[set[str], str]:
    """Transports and version. Raises ImportError where only a router is installed, SetupError."""
    from kv_transfer.transport.base import TransportError
    from kv_transfer.transport.ucx_worker import transports_described, ucx_version

    try:
        return transports_of(transports_described()), ucx_version()
    except TransportError as error:
        raise SetupError(str(error)) from error


def transports_of(context_information: str) -> set[str]:
    """Names of the transports in UCX's own listing (`resource 1 : md 1 dev 1 flags -- tcp/eth0`)."""
    return set(re.findall(r"resource +\d+ .*-- (\w+)/", context_information))


def lane_finding(transports: set[str]) -> Finding:
    verbs = sorted(name for name in transports if name.startswith(("rc", "dc", "ud")))
    if verbs:
        return Finding(Grade.OK, "lane", f"{verbs[0]} (RDMA) between machines")
    if "tcp" in transports:
        return Finding(Grade.NOTE, "lane", "lane tcp; this UCX has no verbs, so no RDMA: docs/rdma.md")
    return Finding(Grade.FAILS, "lane", "no lane between machines: UCX_TLS leaves out tcp and there is no RDMA")


def _ports(cluster: LocalCluster) -> Iterator[Finding]:
    checks: tuple[tuple[str, Callable[[], None]], ...] = (
        ("router", lambda: require_router_ports(cluster.router)),
        ("prefill", lambda: require_node_ports(cluster.prefill)),
        ("decode", lambda: require_node_ports(cluster.decode)),
    )
    for name, check in checks:
        try:
            check()
        except ConfigurationError as error:
            yield Finding(Grade.FAILS, "ports", f"{name}: {error}")
        else:
            yield Finding(Grade.OK, "ports", f"{name}: free")


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files >= FILES_WANTED or files == resource.RLIM_INFINITY
    yield Finding(
        Grade.OK if enough else Grade.NOTE,
        "limits",
        f"{files} open files" + ("" if enough else f"; ulimit -n {FILES_WANTED} or more for many streams"),
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding(Grade.OK, "limits", "locked memory unlimited")
    else:
        yield Finding(Grade.NOTE, "limits", f"locked memory {locked // MIB} MiB; RDMA needs ulimit -l unlimited")


def exposure(cluster: LocalCluster, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Who could read or ask what from other machines."""
    router = cluster.router
    keys_required = router.api_key_file is not None or api_key_of(environment) is not None
    risks = [*router.risks(api_keys_required=keys_required), *cluster.prefill.risks(), *cluster.decode.risks()]
    yield from (Finding(Grade.UNSAFE, "exposure", risk) for risk in risks)
    if risks:
        yield Finding(Grade.NOTE, "exposure", "docs/security.md says what each option protects")
    else:
        yield Finding(Grade.OK, "exposure", f"router on {router.host}, nodes on {cluster.prefill.host}")


def _model(request: Request) -> tuple[Path | None, Finding]:
    if request.model is None:
        folder = default_model_folder()
        if is_converted(folder):
            return folder, Finding(Grade.OK, "model", f"default model in {folder}")
        return None, Finding(Grade.NOTE, "model", "default model is not converted yet; decant up does it once")
    if request.model == TOY_MODEL:
        return None, Finding(Grade.OK, "model", "toy, which needs no files")
    try:
        folder = resolve_model_folder(request.model, request.revision)
    except StartError as error:
        return None, Finding(Grade.FAILS, "model", str(error))
    problem = model_problem(folder)
    if problem is not None:
        return None, Finding(Grade.FAILS, "model", problem)
    return folder, Finding(Grade.OK, "model", str(folder))


def model_problem(folder: Path) -> str | None:
    """What a folder lacks to be served, or None."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("architectures"):
        return f"{folder}/config.json names no architectures"
    if not (folder / "tokenizer.json").is_file():
        return f"{folder} has no tokenizer.json"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors (random weights: --load-format dummy)"
    return None


def _memory(cluster: LocalCluster, folder: Path) -> Finding:
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    wanted = sum(_host_bytes(node, weights) for node in (cluster.prefill, cluster.decode))
    available = memory_available()
    text = f"two nodes take about {wanted / GIB:.1f} GiB; {available / GIB:.1f} GiB are available"
    if wanted <= available:
        return Finding(Grade.OK, "memory", text)
    return Finding(Grade.FAILS, "memory", f"{text}; lower --kv-cache-memory-bytes or --staging-bytes")


def _host_bytes(node: NodeOptions, weights: int) -> int:
    """Weights pass through host memory on their way to a GPU, too."""
    if node.device != "cpu" and gpus_here():
        return weights + PROCESS_BYTES
    return weights + (node.kv_cache_memory_bytes or GIB) + node.staging_on("cpu").staging_bytes + PROCESS_BYTES


def memory_available() -> int:
    """Bytes that may still be taken: what the machine has left, or less where a control group says so."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    machine = int(found[1]) * 1024 if found else page * pages
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, int(limit) - used)
