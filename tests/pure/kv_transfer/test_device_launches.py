"""Launches by a thread of C, over a stand-in for the driver that ends them when it is told to."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from launch_driver import PLENTY, LaunchDriver, compiled_driver
from waiting import until

from foundation.errors import SetupError
from kv_transfer.device_launches import ARGUMENT_BYTES, AT_ONCE, DeviceLaunches, Launch, launch_libraries
from kv_transfer.transport.base import TransportError

STREAM = 77


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LaunchDriver]:
    return compiled_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(fresh: Callable[[], LaunchDriver]) -> LaunchDriver:
    return fresh()


class Asked:
    """Numbered launches. The kernel of each copies its number into its place, from where it is read at its end."""

    def __init__(self, driver: LaunchDriver, answer: int = 0) -> None:
        self.launches = DeviceLaunches(driver.library, driver.entering(answer), STREAM)
        self.sources = np.arange(10_000, dtype=np.uint64)
        self.places = np.zeros(AT_ONCE, np.uint64)
        self.begun: list[int] = []
        self.told: list[int] = []
        self.threads: set[int] = set()

    def ask(self, number: int, also: Callable[[], None] = lambda: None) -> None:
        self.launches.ask(partial(self._begin, number), partial(self._end, also))

    def launch(self, number: int) -> Launch:
        told = pack("3Q", 1, self.sources[number:].ctypes.data, self.places[number % AT_ONCE :].ctypes.data)
        padding = bytes(byte % 251 for byte in range(number % (ARGUMENT_BYTES - len(told) + 1)))
        return Launch(1000 + number, number + 1, 32 * (1 + number % 8), 16 * number, told + padding)

    def _begin(self, number: int, place: int) -> Launch:
        assert place == number % AT_ONCE
        self.begun.append(number)
        self.places[place] = 9999
        return self.launch(number)

    def _end(self, also: Callable[[], None], place: int) -> Callable[[], None]:
        number = int(self.places[place])

        def tell() -> None:
            self.told.append(number)
            self.threads.add(threading.get_ident())
            also()

        return tell


async def test_all_that_is_asked_for_is_launched_and_told_in_order_and_in_full(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    driver.set("may_end", PLENTY)
    for number in range(3000):
        asked.ask(number)
        assert not asked.told, "never from within"
    await asked.launches.close()
    assert asked.told == list(range(3000))
    assert asked.threads == {threading.get_ident()}
    assert driver.launches == [(asked.launch(number), STREAM) for number in range(3000)]
    assert driver.get("most_open") <= AT_ONCE
    assert driver.get("events") == 0
    assert asked.launches.failure.cancelled()


async def test_a_place_is_filled_again_only_when_its_kernel_has_ended_and_been_read(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    for number in range(2 * AT_ONCE):
        asked.ask(number)
    await driver.until("launched", AT_ONCE)
    assert asked.begun == list(range(AT_ONCE))
    driver.set("may_end", 3)
    await until(lambda: asked.told == [0, 1, 2])
    await driver.until("launched", AT_ONCE + 3)
    assert asked.begun == list(range(AT_ONCE + 3))
    driver.set("may_end", PLENTY)
    await asked.launches.close()
    assert asked.told == list(range(2 * AT_ONCE))


async def test_launches_need_no_interpreter(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    for number in range(AT_ONCE):
        asked.ask(number)
    assert driver.keeping_the_interpreter.launched_within_10_s(AT_ONCE)
    driver.set("may_end", PLENTY)
    await asked.launches.close()


async def test_a_callback_may_ask_for_more(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    driver.set("may_end", PLENTY)

    def next_after(number: int) -> None:
        if number < 500:
            asked.ask(number, partial(next_after, number + 1))

    next_after(0)
    await until(lambda: len(asked.told) == 500)
    await asked.launches.close()
    assert asked.told == list(range(500))


async def test_with_nothing_to_do_the_thread_sleeps(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    driver.set("may_end", PLENTY)
    asked.ask(0)
    await until(lambda: asked.told)
    looks, spent_ns = driver.get("queries"), driver.thread_cpu_ns()
    await asyncio.sleep(0.2)
    assert driver.get("queries") == looks
    assert driver.thread_cpu_ns() - spent_ns < 2_000_000
    asked.ask(1)
    await until(lambda: asked.told == [0, 1])
    await asked.launches.close()


async def test_what_does_not_end_soon_is_looked_at_seldom(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    asked.ask(0)
    await driver.until("launched", 1)
    await asyncio.sleep(0.01)
    looks, spent_ns = driver.get("queries"), driver.thread_cpu_ns()
    await asyncio.sleep(0.2)
    assert 0 < driver.get("queries") - looks < 12_000
    assert driver.thread_cpu_ns() - spent_ns < 100_000_000
    driver.set("may_end", 1)
    await until(lambda: asked.told)
    await asked.launches.close()


async def test_a_gpu_that_breaks_ends_it_in_cudas_words_after_what_had_ended(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    driver.set("may_end", 2)
    driver.set("breaks", 700)
    for number in range(20):
        asked.ask(number)
    with pytest.raises(TransportError, match=r"an illegal memory access was encountered \(700\)"):
        await asyncio.wait_for(asyncio.shield(asked.launches.failure), 10)
    assert asked.told == [0, 1]
    asked.ask(20)
    await asked.launches.close()
    assert asked.told == [0, 1]


async def test_a_launch_that_the_driver_refuses_ends_it(driver: LaunchDriver) -> None:
    asked = Asked(driver)
    driver.set("refuses", 719)
    asked.ask(0)
    with pytest.raises(TransportError, match="unspecified launch failure"):
        await asyncio.wait_for(asyncio.shield(asked.launches.failure), 10)
    await asked.launches.close()


async def test_a_gpu_that_cannot_be_entered_ends_it(driver: LaunchDriver) -> None:
    asked = Asked(driver, answer=700)
    asked.ask(0)
    with pytest.raises(TransportError, match="illegal memory access"):
        await asyncio.wait_for(asyncio.shield(asked.launches.failure), 10)
    await asked.launches.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_what_cannot_be_begun_ends_it_whether_or_not_it_waited_for_a_place(
    driver: LaunchDriver, waits: bool
) -> None:
    asked = Asked(driver)
    for number in range(AT_ONCE if waits else 0):
        asked.ask(number)

    def cannot(place: int) -> Launch:
        raise AssertionError("a bug")

    asked.launches.ask(cannot, lambda place: lambda: None)
    assert asked.launches.failure.done() is not waits
    driver.set("may_end", PLENTY)
    with pytest.raises(AssertionError, match="a bug"):
        await asyncio.wait_for(asyncio.shield(asked.launches.failure), 10)
    await asked.launches.close()
    assert asked.told == list(range(AT_ONCE if waits else 0))


async def test_a_callback_that_raises_keeps_no_other_from_being_told_and_the_loop_hears_of_it(
    driver: LaunchDriver,
) -> None:
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context.get("exception")))
    asked, error = Asked(driver), ValueError("of one callback")

    def raises() -> None:
        raise error

    for number in range(3 * AT_ONCE):
        asked.ask(number, raises if number in (2, 3) else lambda: None)
    await driver.until("launched", AT_ONCE)
    driver.set("may_end", PLENTY)
    await until(lambda: len(asked.told) == 3 * AT_ONCE)
    await asked.launches.close()
    assert asked.told == list(range(3 * AT_ONCE))
    assert heard == [error, error]


async def test_closing_waits_for_what_is_on_its_way_or_waiting_without_holding_up_the_loop(
    driver: LaunchDriver,
) -> None:
    asked = Asked(driver)
    for number in range(2 * AT_ONCE):
        asked.ask(number)
    closing = asyncio.create_task(asked.launches.close())
    await driver.until("launched", AT_ONCE)
    assert not closing.done()
    driver.set("may_end", 2 * AT_ONCE - 1)
    await until(lambda: len(asked.told) == 2 * AT_ONCE - 1)
    assert not closing.done()
    driver.set("may_end", 2 * AT_ONCE)
    await asyncio.wait_for(closing, 10)
    assert asked.told == list(range(2 * AT_ONCE))
    await asked.launches.close()
    asked.ask(2 * AT_ONCE)
    assert len(asked.begun) == 2 * AT_ONCE, "nothing begins any more"


LEFT_BEHIND = """
import asyncio, sys
from pathlib import Path
from launch_driver import LaunchDriver
from test_device_launches import Asked

async def main() -> None:
    for _ in range(3):
        left = Asked(driver)
        for number in range(5):
            left.ask(number)
    await driver.until("launched", 15)

driver = LaunchDriver(Path(sys.argv[1]))
asyncio.run(main())
print("well")
"""


def test_a_process_may_end_with_kernels_on_their_way(driver: LaunchDriver) -> None:
    command = [sys.executable, "-c", LEFT_BEHIND, driver.library._name]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=paths)
    assert (ended.returncode, ended.stdout) == (0, "well\n"), ended.stderr


def test_without_a_compiler_a_start_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DECANT_CACHE", str(tmp_path))
    launch_libraries.cache_clear()
    with pytest.raises(SetupError, match="a C compiler"):
        launch_libraries()
