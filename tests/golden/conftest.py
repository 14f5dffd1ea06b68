"""Golden tests use the hand-written step plans of the engine's pure tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pure" / "engine"))
