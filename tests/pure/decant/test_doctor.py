"""The doctor's judgements on what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from decant.doctor import Finding, Grade, _lanes, exposure, lane_finding, model_problem, transports_of
from decant.local_cluster import read_request
from kv_transfer.transport import ucx_worker
from kv_transfer.transport.base import TransportError

UCX_LISTING = """
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1
"""


def test_transports_are_read_from_ucx_own_listing() -> None:
    assert transports_of(UCX_LISTING) == {"self", "tcp", "rc_mlx5"}


def test_tcp_alone_is_said_to_be_no_rdma_and_where_to_read_on() -> None:
    finding = lane_finding({"tcp", "self"})
    assert finding.grade is Grade.NOTE
    assert finding.text == "lane tcp; this UCX has no verbs, so no RDMA: docs/rdma.md"
    assert Path(__file__).parents[3].joinpath("docs/rdma.md").is_file()


def test_verbs_are_named_and_no_lane_at_all_fails() -> None:
    assert lane_finding({"tcp", "rc_mlx5"}).text == "rc_mlx5 (RDMA) between machines"
    assert lane_finding({"self", "posix"}).grade is Grade.FAILS


@pytest.mark.parametrize("lacking", ["kv_transfer.transport.base", "libucx"])
def test_where_only_a_router_is_installed_lanes_are_a_finding(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ucx_worker._libraries.cache_clear()
    monkeypatch.setitem(sys.modules, lacking, None)
    [finding] = _lanes()
    assert finding == Finding(Grade.FAILS, "ucx", f"cannot be used: import of {lacking} halted; None in sys.modules")


def test_where_ucx_does_not_start_lanes_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> str:
        raise TransportError("ucx_unavailable", "UCX does not start")

    monkeypatch.setattr(ucx_worker, "transports_described", described)
    [finding] = _lanes()
    assert finding == Finding(Grade.FAILS, "ucx", "cannot be used: ucx_unavailable: UCX does not start")


def test_a_folder_without_weights_or_tokenizer_is_told_what_it_lacks(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert "names no architectures" in str(model_problem(tmp_path))
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert "no tokenizer.json" in str(model_problem(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "no *.safetensors" in str(model_problem(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert model_problem(tmp_path) is None


def said_about(*arguments: str, **environment: str) -> list[tuple[Grade, str]]:
    request = read_request(["--model=toy", *arguments], environment, "decant doctor", "")
    return [(found.grade, found.text) for found in exposure(request.cluster(Path("unused")), environment)]


def test_what_only_this_machine_reaches_is_safe() -> None:
    assert [grade for grade, _ in said_about()] == [Grade.OK]


@pytest.mark.parametrize(
    ("arguments", "environment", "risks"),
    [
        ((), {}, ["--ssl-certfile", "--api-key-file", "--tls-cert-file", "--tls-cert-file"]),
        ((), {"DECANT_API_KEY": "x" * 16}, ["--ssl-certfile", "--tls-cert-file"]),
        (("--api-key-file=keys", "--ssl-certfile=public.pem"), {}, ["--tls-cert-file"]),
    ],
)
def test_what_others_could_read_or_ask_is_unsafe_and_the_option_against_it_is_named(
    arguments: tuple[str, ...], environment: dict[str, str], risks: list[str]
) -> None:
    found = said_about("--host=0.0.0.0", *arguments, **environment)
    assert [text.rpartition(": ")[2] for grade, text in found if grade is Grade.UNSAFE] == risks
