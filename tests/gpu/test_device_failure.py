from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from device_model import write_config

pytestmark = pytest.mark.gpu


def test_a_gpu_that_breaks_fails_every_request_and_ends_the_engine_with_its_reason(tmp_path: Path) -> None:
    """The node that runs such an engine stops with exit code 1 (node/host)."""
    write_config(tmp_path)
    program = Path(__file__).parent / "failing_engine.py"
    ran = subprocess.run([sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["reported"] == ["engine_error"]
    assert "GPU failed" in told["failed"] or "CUDA" in told["failed"], told
