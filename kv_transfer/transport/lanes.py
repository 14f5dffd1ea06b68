"""What each lane guarantees, as `tests/contract` has shown it, and how the lane of an endpoint is read from UCX.

UCX decides which transport carries a message; nobody has to guess, since it prints its choice. A lane that is not in the
table guarantees nothing.

Must not know: sessions, sockets.
"""

from __future__ import annotations

import re
from typing import Literal

from kv_transfer.transport.base import Lane

SHOWN = {
    lane.name: lane
    for lane in (
        Lane("tcp", receiver_reads=False, close_fences_receives=True),
        Lane("sysv", receiver_reads=False, close_fences_receives=True),
        Lane("posix", receiver_reads=False, close_fences_receives=True),
        # Shown on GPUs (tests/gpu). `cuda_ipc/put`, where the sender writes, fails: its bytes land after its receive has failed.
        Lane("cuda_ipc/get", receiver_reads=True, close_fences_receives=False),
    )
}

Memory = Literal["host", "cuda"]

_TABLE = "tagged message by ucp_tag_send* from {memory}"
_ROW = re.compile(r"^# \|\s*\S+\.\.(?P<end>\S+) \|(?P<protocol>.*)\|(?P<where>[^|]*)\|$")
_TRANSPORT = re.compile(r"(\w+)/\w")


def lane_named(name: str) -> Lane:
    return SHOWN.get(name, Lane(name, receiver_reads=False, close_fences_receives=False))


def lane_of_endpoint(info: str, memory: Memory = "host") -> Lane:
    """The lane on which long messages from this kind of memory travel, from the text of ucp_ep_print_info.

    Several transports at once make the lane `a+b`, which no test has shown. A remote write by the sender, and a read by the
    receiver, which the table says in words, are other lanes than messages on the same transport.
    """
    lines, title = info.splitlines(), _TABLE.format(memory=memory)
    begin = next((index for index, line in enumerate(lines) if title in line), len(lines))
    rows = [match for line in lines[begin : begin + 32] if (match := _ROW.match(line.strip()))]
    longest = next((row for row in rows if row["end"] == "inf"), None)
    if longest is None:
        return lane_named("unknown")
    name = "+".join(sorted(set(_TRANSPORT.findall(longest["where"]))))
    protocol = longest["protocol"]
    scheme = "/put" if "write to remote" in protocol else "/get" if "read from remote" in protocol else ""
    return lane_named(name + scheme)
