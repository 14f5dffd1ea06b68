from __future__ import annotations

from kv_transfer.transport.lanes import lane_of_endpoint
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment

HEAD = """
#                 lane[0]:  3:sysv/memory.0 md[2]           -> md[2]/sysv/sysdev[255] seg 4294967295 am keepalive
# +--------------------------------+--------------------------------------------+-------------+
# | ucp_context_0 intra-node cfg#3 | tagged message by ucp_tag_send* from host memory         |
# +--------------------------------+--------------------------------------------+-------------+
# |                          0..92 | eager short                                | sysv/memory |
"""
OTHER = """
# | ucp_context_0 intra-node cfg#3 | stream message by ucp_stream_send* from host memory    |
# |                         0..inf | multi-frag stream copy-in copy-out       | self/memory |
"""


def longest(protocol: str, where: str) -> str:
    return f"# |                        8K..inf | {protocol} | {where} |\n"


def test_the_lane_is_the_transport_of_long_messages() -> None:
    lane = lane_of_endpoint(HEAD + longest("(?) rendezvous fragmented copy-in copy-out", "sysv/memory") + OTHER)
    assert (lane.name, lane.close_fences_receives, lane.fences) == ("sysv", True, True)


def test_a_lane_on_which_the_sender_writes_is_another_lane_that_nobody_has_shown_to_fence() -> None:
    lane = lane_of_endpoint(HEAD + longest("(?) rendezvous zero-copy fenced write to remote", "tcp/lo"))
    assert (lane.name, lane.fences) == ("tcp/put", False)


CUDA_HEAD = """
# | ucp_context_0 intra-node cfg#1 | tagged message by ucp_tag_send* from cuda/GPU0            |
# |                          0..8K | copy-in                                   | tcp/lo        |
"""


def test_messages_in_a_gpus_memory_have_a_lane_of_their_own() -> None:
    info = HEAD + longest("(?) rendezvous fragmented copy-in copy-out", "sysv/memory") + CUDA_HEAD
    read = lane_of_endpoint(info + longest("(?) rendezvous zero-copy read from remote", "cuda_ipc/cuda"), "cuda")
    assert (read.name, read.receiver_reads, read.fences) == ("cuda_ipc/get", True, True)
    written = lane_of_endpoint(
        info + longest("(?) rendezvous zero-copy flushed write to remote", "cuda_ipc/cuda"), "cuda"
    )
    assert (written.name, written.fences) == ("cuda_ipc/put", False)
    assert lane_of_endpoint(info).name == "sysv"


def test_on_a_gpu_the_receiver_is_told_to_read() -> None:
    settings = ucx_environment("cuda_ipc,cuda_copy,sm,self,tcp", device=True)
    assert (settings["UCX_RNDV_SCHEME"], settings["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"]) == ("get_zcopy", "y")
    assert "UCX_RNDV_SCHEME" not in ucx_environment("sm,self,tcp")


def test_several_transports_at_once_guarantee_nothing() -> None:
    lane = lane_of_endpoint(HEAD + longest("(?) rendezvous zero-copy", "50% on tcp/lo and 50% on sysv/memory"))
    assert (lane.name, lane.fences) == ("sysv+tcp", False)


def test_two_devices_of_one_transport_are_one_lane() -> None:
    assert lane_of_endpoint(HEAD + longest("rendezvous zero-copy", "50% on tcp/eth0 and 50% on tcp/lo")).name == "tcp"


def test_an_unreadable_description_is_an_unknown_lane_without_guarantees() -> None:
    lane = lane_of_endpoint("no such table")
    assert (lane.name, lane.fences) == ("unknown", False)


def test_what_the_user_has_set_wins_and_is_reported() -> None:
    environment = {"UCX_TLS": "rc", "UCX_KEEPALIVE_INTERVAL": "500ms"}
    applied = apply_ucx_environment(ucx_environment("tcp", interface="lo", tcp_ports="7103-7109"), environment)
    assert applied.kept == {"UCX_TLS": "rc"}
    assert environment["UCX_TLS"] == "rc"
    assert environment["UCX_NET_DEVICES"] == applied.set_here["UCX_NET_DEVICES"] == "lo"
    assert environment["UCX_TCP_PORT_RANGE"] == "7103-7109"


def test_emulation_is_forbidden_where_a_better_lane_than_tcp_is_meant() -> None:
    assert ucx_environment("sm,self,tcp")["UCX_PROTO_EMULATION_ENABLE"] == "n"
    assert "UCX_PROTO_EMULATION_ENABLE" not in ucx_environment("tcp")
