"""Stands in for the CUDA driver where a thread of C launches kernels: it notes launches, and ends them when it is told to."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import until

from kv_transfer.device_launches import ARGUMENT_BYTES, Launch

PLENTY = 1 << 30

SOURCE = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct noted {
    uint64_t function, programs, threads, shared, stream, size;
    unsigned char arguments[ARGUMENT_BYTES];
} noted[4096];
atomic_int launched, ended, may_end, most_open, queries, events, refuses, breaks;
static pthread_t thread;

int cuCtxSetCurrent(void *context)
{
    thread = pthread_self();
    return (int)(intptr_t)context;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    if (refuses)
        return refuses;
    if (parameters || (uintptr_t)extra[0] != 1 || (uintptr_t)extra[2] != 2 || extra[4] || y * z * threads_y * threads_z != 1)
        return 1;
    struct noted *it = &noted[launched % 4096];
    *it = (struct noted){(uintptr_t)function, x, threads, shared, (uintptr_t)stream, *(size_t *)extra[3], {0}};
    memcpy(it->arguments, extra[1], it->size);
    int open = ++launched - ended;
    if (open > most_open)
        most_open = open;
    return 0;
}

int cuEventCreate(void **event, unsigned flags) { events++; *event = calloc(1, sizeof(int)); return flags != 2; }
int cuEventDestroy_v2(void *event) { events--; free(event); return 0; }
int cuEventRecord(void *event, void *stream) { *(int *)event = launched; return stream ? 0 : 1; }

/* A kernel copies as many words as its first argument says, from where the second says to where the third does. */
int cuEventQuery(void *event)
{
    int number = *(int *)event;
    queries++;
    if (number > may_end)
        return breaks ? breaks : 600;
    if (number > ended) {
        uint64_t told[3];
        memcpy(told, noted[(number - 1) % 4096].arguments, sizeof told);
        memcpy((void *)told[2], (void *)told[1], 8 * told[0]);
        ended = number;
    }
    return 0;
}

int cuGetErrorString(int error, const char **words)
{
    *words = error == 700 ? "an illegal memory access was encountered" : "unspecified launch failure";
    return 0;
}

/* Whether so many have been launched, for which it waits without letting go of anything. */
int launched_within_10_s(int count)
{
    for (int turn = 0; turn < 10000 && launched < count; turn++)
        usleep(1000);
    return launched >= count;
}

long long thread_cpu_ns(void)
{
    clockid_t clock;
    struct timespec spent;
    if (pthread_getcpuclockid(thread, &clock) || clock_gettime(clock, &spent))
        return -1;
    return spent.tv_sec * 1000000000LL + spent.tv_nsec;
}
"""


class Noted(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("programs", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("arguments", ctypes.c_ubyte * ARGUMENT_BYTES),
    )


class LaunchDriver:
    """The library, freshly loaded, with its knobs and what it has noted."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.keeping_the_interpreter = ctypes.PyDLL(str(path))
        self.library.thread_cpu_ns.restype = ctypes.c_longlong

    def entering(self, answer: int = 0) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """`answer`: what comes of it."""
        return ctypes.cast(self.library.cuCtxSetCurrent, ctypes.c_void_p), ctypes.c_void_p(answer)

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    async def until(self, name: str, value: int) -> None:
        await until(lambda: self.get(name) == value)

    @property
    def launches(self) -> list[tuple[Launch, int]]:
        """What was launched, and on which stream."""
        noted = (Noted * 4096).in_dll(self.library, "noted")
        return [
            (
                Launch(it.function, it.programs, it.threads, it.shared_bytes, bytes(it.arguments[: it.size])),
                it.stream,
            )
            for it in noted[: self.get("launched")]
        ]

    def thread_cpu_ns(self) -> int:
        return int(self.library.thread_cpu_ns())


def compiled_driver(folder: Path) -> Callable[[], LaunchDriver]:
    """Each call gives one of its own. Skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(SOURCE)
    flags = ("-shared", "-fPIC", f"-DARGUMENT_BYTES={ARGUMENT_BYTES}")
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-lpthread"], check=True)
    copies = iter(range(1000))

    def fresh() -> LaunchDriver:
        own = folder / f"driver-{next(copies)}.so"
        shutil.copy(library, own)
        return LaunchDriver(own)

    return fresh
