"""Who opens a package finds every file of it in the docstring of its `__init__`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted(guide for room in ("bench", "engine", "kv_transfer") for guide in (ROOT / room).rglob("__init__.py"))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.parent.relative_to(ROOT)))
def test_a_package_s_docstring_names_each_of_its_modules(guide: Path) -> None:
    said = ast.get_docstring(ast.parse(guide.read_text(encoding="utf-8"))) or ""
    modules = [path.stem for path in guide.parent.glob("*.py") if path != guide]
    packages = [path.parent.name for path in guide.parent.glob("*/__init__.py")]
    assert [name for name in (*modules, *packages) if not re.search(rf"\b{name}\b", said)] == []
