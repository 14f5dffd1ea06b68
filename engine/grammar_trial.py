"""Whether a grammar can be read, found out in a process that can be killed: for some, of a few words, the library needs hours or
all memory, and a thread that reads one cannot be stopped.

`python grammar_trial.py TOKENIZER_FILE VOCABULARY_SIZE EOS_TOKEN_ID ...` says on its output when it is ready, then once
for each line of its input (a grammar as JSON) that it has read it. It ends with its input, or with the thread that began it;
it ignores SIGINT and SIGTERM, as its node may have answers to finish.

Must not know: requests, engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

READ_WITHIN_S = 10.0
"""Large ones take a tenth of a second; a machine under load may take much longer for that."""
READY_WITHIN_S = 60.0
MOST_BYTES = 4 << 30
"""Of addresses: what a trial may take, its tokenizer included."""
NICENESS = 10
FIRST_TO_END = "1000"
_PR_SET_PDEATHSIG = 1
SAID = b"."


class GrammarTrial:
    """Used by one thread, whose end ends its process, which is begun with the first grammar, and anew after one that it could not
    read."""

    def __init__(self, tokenizer_file: Path, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        names = [str(tokenizer_file), str(vocabulary_size), *map(str, eos_token_ids)]
        self._command = [sys.executable, "-P", __file__, *names]  # -P: no modules of wherever the node was begun
        self._process: subprocess.Popen[bytes] | None = None

    def reads(self, grammar: str, within_s: float = READ_WITHIN_S) -> bool:
        """Raises RuntimeError where no such process can be begun."""
        process = self._process
        if process is None or process.poll() is not None:  # never begun, or ended between two grammars
            self.close()
            process = self._begin()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
            if _heard(process, within_s):
                return True
        except BrokenPipeError:
            pass
        self.close()
        return False

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _begin(self) -> subprocess.Popen[bytes]:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=nothing)
        except OSError as error:
            raise RuntimeError(f"{' '.join(self._command)} cannot be begun: {error}") from error
        if not _heard(process, READY_WITHIN_S):
            self.close()
            raise RuntimeError(f"{' '.join(self._command)} does not get ready")
        return process


def _heard(process: subprocess.Popen[bytes], within_s: float) -> bool:
    assert process.stdout is not None
    answer = select.poll()  # which knows every descriptor of a node that has thousands
    answer.register(process.stdout, select.POLLIN)
    return bool(answer.poll(within_s * 1000)) and os.read(process.stdout.fileno(), len(SAID)) == SAID


def main(arguments: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who is busy for hours does not look at its input
    for ending in (signal.SIGINT, signal.SIGTERM):  # sent to the whole terminal, or the whole container
        signal.signal(ending, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # then the kernel chooses for itself whom to end where memory runs out
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_END)
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_BYTES if allowed == resource.RLIM_INFINITY else min(MOST_BYTES, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.nice(NICENESS)
    said = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is said here
    file, vocabulary_size, *eos_token_ids = arguments
    tokenizer = LLTokenizer(
        Path(file).read_text(encoding="utf-8"), n_vocab=int(vocabulary_size), eos_token=list(map(int, eos_token_ids))
    )
    os.write(said, SAID)
    for line in sys.stdin.buffer:
        LLMatcher(tokenizer, json.loads(line), log_level=0)
        os.write(said, SAID)


if __name__ == "__main__":
    main(sys.argv[1:])
