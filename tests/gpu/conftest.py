"""GPU tests need a CUDA device, Triton and FlashInfer; elsewhere they are not collected."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pure" / "engine"))

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
