"""An engine thread whose GPU breaks under it, in a process of its own: after a device-side assertion no CUDA call succeeds there.

Prints one JSON line: what the engine reported, and why it says it failed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from engine.build import BuildOptions
from engine.build_device import build_device_engine
from engine.loop import Engine, EngineThread
from engine.port import EngineEvent, RequestFailed, RequestKey, SamplingParameters, Submit, TokenSampled

LIMIT_S = 60.0


def main(folder: Path) -> None:
    options = BuildOptions(
        model=folder, load_format="dummy", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=128, max_model_len=256
    )
    parts = build_device_engine(options, torch.device("cuda"))
    tokens, failed = threading.Event(), threading.Event()
    reported: list[str] = []

    def report(events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, TokenSampled):
                tokens.set()
            elif isinstance(event, RequestFailed):
                reported.append(event.reason)
                failed.set()

    thread = EngineThread(Engine(parts.config, parts.runner, np.zeros(64, np.uint64)), report)
    thread.start()
    thread.post(Submit(RequestKey("r"), (1, 2, 3), SamplingParameters(seed=1, max_tokens=200, ignore_eos=True)))
    assert tokens.wait(LIMIT_S), "no token came"
    beyond = torch.full((1,), 1 << 20, device="cuda")
    torch.zeros(4, device="cuda")[beyond]
    assert failed.wait(LIMIT_S), "the engine did not notice"
    thread.stop(5.0)
    print(json.dumps({"reported": reported, "failed": thread.status.failed}), flush=True)  # noqa: T201
    os._exit(0)  # CUDA's own teardown would complain of the broken context


if __name__ == "__main__":
    main(Path(sys.argv[1]))
