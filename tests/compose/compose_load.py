"""What streams of questions that never stop must show for all to be well."""

from __future__ import annotations

import time

from chaos_load import Load
from compose_project import WHOLE_LIMIT_S, condition

ANSWERS_AFTERWARDS = 6


async def all_is_well(load: Load) -> None:
    """Some questions that are asked from now on are answered, and no answer since the beginning was wrong or missing."""
    since = time.time()

    async def answered() -> bool:
        return sum(answer.begun > since for answer in load.verdict.answers) >= ANSWERS_AFTERWARDS

    await condition(answered, WHOLE_LIMIT_S, lambda: f"answers; errors so far: {load.verdict.errors}")
    assert load.verdict.errors == []
    assert load.verdict.wrong == []
