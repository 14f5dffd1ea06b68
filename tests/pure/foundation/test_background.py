"""Background tasks: a failure is told, a return or a cancel is not."""

from __future__ import annotations

import asyncio

from foundation.background import Background, end


async def fails() -> None:
    raise RuntimeError("planted")


async def lasts() -> None:
    await asyncio.Event().wait()


async def test_only_a_task_that_fails_is_told() -> None:
    told: list[BaseException] = []
    background = Background(told.append)
    ended, failed, cancelled = (
        background.start(work, "work") for work in (asyncio.sleep(0), fails(), asyncio.sleep(3600))
    )
    cancelled.cancel()
    await asyncio.wait((ended, failed, cancelled))
    assert [str(one) for one in told] == ["planted"]


async def test_closing_waits_for_all_and_tells_what_fails_on_the_way() -> None:
    async def fails_when_cancelled() -> None:
        try:
            await lasts()
        finally:
            await fails()

    told: list[BaseException] = []
    background = Background(told.append)
    tasks = [background.start(work, "work") for work in (lasts(), fails_when_cancelled())]
    await asyncio.sleep(0)  # both have begun
    await background.close()
    assert all(task.done() for task in tasks)
    assert [str(one) for one in told] == ["planted"]
    await background.close()


async def test_ending_a_task_that_has_failed_raises_nothing() -> None:
    background = Background(lambda failure: None)
    await end(background.start(fails(), "work"))
    await end(background.start(lasts(), "work"))
    await end(None)
