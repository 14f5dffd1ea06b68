"""How UCX is told what we need of it: environment variables, set before the library is loaded.

Whatever the user has set wins and is reported. Reasons stand beside the values; what breaks without them was measured.

Must not know: UCX itself (once loaded, it has read the environment).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

DEFAULT_LANES = "sm,self,tcp"
"""Shared memory on one host, TCP between hosts."""

DEVICE_LANES = "cuda_ipc,cuda_copy,sm,self,tcp"
"""GPU to GPU on one host."""


@dataclass(frozen=True, slots=True)
class AppliedEnvironment:
    """`set_here`: what we set. `kept`: variables of ours that the user had set to something else, with the user's value."""

    set_here: dict[str, str]
    kept: dict[str, str]


def ucx_environment(
    lanes: str, interface: str | None = None, tcp_ports: str | None = None, *, device: bool = False
) -> dict[str, str]:
    """UCX settings for these lanes (the value of UCX_TLS).

    `device`: messages lie in GPU memory.
    `interface`: the network device whose address is advertised to peers; None leaves the choice to UCX.
    `tcp_ports`: `first-last`, the ports on which UCX's own TCP connections may arrive; None means any.
    """
    settings = {
        "UCX_TLS": lanes,
        # Shared memory is not used beside error handling unless it is asked to do error handling too.
        "UCX_POSIX_ERROR_HANDLING": "on",
        "UCX_SYSV_ERROR_HANDLING": "on",
        # The default window (256 cells, 2 MiB) is less than one slot, so that both processes must be scheduled in turn several
        # times for each: on a machine whose cores others want, 0.3 GB/s instead of 1.8. (Cells of 64 KiB and more break.)
        "UCX_POSIX_FIFO_SIZE": "1024",
        "UCX_SYSV_FIFO_SIZE": "1024",
        "UCX_KEEPALIVE_INTERVAL": "500ms",
        "UCX_TCP_KEEPIDLE": "1s",
        "UCX_TCP_KEEPINTVL": "1s",
        # A connection that waits (a firewall, a node cut off at that moment) holds up UCX's thread, and with it all sessions, for
        # as long as the kernel tries: two minutes. One that fails while it waits is never closed: a descriptor each time.
        "UCX_TCP_CONN_NB": "y",
        # Default segments make TCP two to six times slower.
        "UCX_TCP_TX_SEG_SIZE": "1M",
        "UCX_TCP_RX_SEG_SIZE": "1M",
        # A TCP put carries the address it writes to, which outlives the endpoint that handed it out. Messages do not.
        "UCX_TCP_PUT_ENABLE": "n",
        # Shorter messages are copied on their way, longer ones wait for their receive where the receiver is.
        "UCX_RNDV_THRESH": "8192",
        # It would have to see every allocation, and does not see all of torch's.
        "UCX_MEMTYPE_CACHE": "n",
        # Signal handlers belong to Python.
        "UCX_ERROR_SIGNALS": "",
        # Where our logs go. What it says of a late message, say, would come amid what a process answers on its stdout.
        "UCX_LOG_FILE": "stderr",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if lanes != "tcp":
        # Otherwise a missing lane is emulated over TCP without a word.
        settings["UCX_PROTO_EMULATION_ENABLE"] = "n"
    if device:
        # The receiver reads: whatever becomes of the sender, a matched receive ends by itself and is its own fence. Where the
        # sender writes, UCX's choice on one GPU, bytes land after the receive has failed. Without the second setting the first
        # sends everything through host memory, three orders slower, without a word.
        settings |= {"UCX_RNDV_SCHEME": "get_zcopy", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
        # A cached mapping lives as long as this process, also that of a peer long dead, whose memory it holds: each life of a
        # prefill node would cost a decode node its slots (openucx/ucx#11753). `peer_mappings` does what it is for.
        settings["UCX_CUDA_IPC_CACHE"] = "n"
    if interface:
        settings["UCX_NET_DEVICES"] = interface
    if tcp_ports:
        settings["UCX_TCP_PORT_RANGE"] = tcp_ports
    return settings


def apply_ucx_environment(
    settings: dict[str, str], environment: MutableMapping[str, str] = os.environ
) -> AppliedEnvironment:
    """Set what the user has not set."""
    kept = {name: environment[name] for name, value in settings.items() if environment.get(name, value) != value}
    for name, value in settings.items():
        environment.setdefault(name, value)
    return AppliedEnvironment({name: value for name, value in settings.items() if name not in kept}, kept)
