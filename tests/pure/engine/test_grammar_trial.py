"""A grammar is tried in a process: one that takes for ever costs that process, and nobody else."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from llguidance import LLMatcher

from engine.grammar_trial import GrammarTrial
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder

FINE = LLMatcher.grammar_from_lark('start: "a" | "b"')
ENDLESS = LLMatcher.grammar_from_lark("start: T\nT: " + " & ".join(f"/(.*a.{{{count}}})*/" for count in range(20, 30)))
PARENT = """
import sys
from pathlib import Path
from engine.grammar_trial import GrammarTrial
trial = GrammarTrial(Path(sys.argv[1]), int(sys.argv[2]), [int(sys.argv[3])])
assert trial.reads(sys.argv[4])
print(trial._process.pid, flush=True)
trial.reads(sys.argv[5], 600.0)
"""


LIMITED = """
import resource, sys
from pathlib import Path
from engine.grammar_trial import MOST_BYTES, GrammarTrial
resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES - 1, MOST_BYTES - 1))
assert GrammarTrial(Path(sys.argv[1]), int(sys.argv[2]), [int(sys.argv[3])]).reads(sys.argv[4])
"""


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_folder(tmp_path_factory.mktemp("model") / "toy") / "tokenizer.json"


@pytest.fixture
def trial(tokenizer_file: Path) -> Iterator[GrammarTrial]:
    found = GrammarTrial(tokenizer_file, TOY_VOCABULARY_SIZE, [0])
    yield found
    found.close()


def test_f28_what_takes_for_ever_ends_with_its_process_and_the_next_grammar_is_read(trial: GrammarTrial) -> None:
    assert trial.reads(FINE)
    assert trial._process is not None
    pid = trial._process.pid
    assert trial.reads("no grammar"), "that it is none is told by whoever opens it"
    assert not trial.reads(ENDLESS, 0.5)
    assert not runs(pid)
    assert trial.reads(FINE)


def test_a_process_that_has_died_is_begun_anew(trial: GrammarTrial) -> None:
    assert trial.reads(FINE)
    assert trial._process is not None
    os.kill(trial._process.pid, signal.SIGKILL)
    trial._process.wait()
    assert trial.reads(FINE)


def test_what_ends_a_node_and_all_around_it_leaves_a_trial_to_its_node(trial: GrammarTrial) -> None:
    """Ctrl-C in a terminal, or a service's stop: the node may have answers to finish, and ends its trials itself."""
    assert trial.reads(FINE)
    assert trial._process is not None
    pid = trial._process.pid
    for ending in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, ending)
    assert trial.reads(FINE)
    assert trial._process.pid == pid


def test_f28_where_memory_runs_out_a_trial_ends_and_not_its_node(trial: GrammarTrial) -> None:
    assert trial.reads(FINE)
    assert trial._process is not None
    assert Path(f"/proc/{trial._process.pid}/oom_score_adj").read_text() == "1000\n"


def test_where_a_node_may_take_less_memory_than_a_trial_that_is_the_trial_s_limit(tokenizer_file: Path) -> None:
    arguments = [str(tokenizer_file), str(TOY_VOCABULARY_SIZE), "0", FINE]
    subprocess.run([sys.executable, "-c", LIMITED, *arguments], check=True)


def test_a_node_with_more_descriptors_than_select_knows_tries_grammars(trial: GrammarTrial) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with ExitStack() as after:
        after.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        descriptor = 0
        while descriptor < 1024:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            after.callback(os.close, descriptor)
        assert trial.reads(FINE)


def test_modules_in_the_folder_where_a_node_was_begun_are_not_the_trial_s(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    assert trial.reads(FINE)


def test_f28_a_trial_does_not_outlive_the_node_that_was_killed_meanwhile(tokenizer_file: Path) -> None:
    arguments = [str(tokenizer_file), str(TOY_VOCABULARY_SIZE), "0", FINE, ENDLESS]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert runs(pid)
    parent.kill()
    parent.communicate()
    soon(lambda: not runs(pid))


def test_where_no_process_can_be_begun_that_is_said(tmp_path: Path) -> None:
    trial = GrammarTrial(tmp_path / "none", TOY_VOCABULARY_SIZE, [0])
    with pytest.raises(RuntimeError, match="does not get ready"):
        trial.reads(FINE)
