"""The library that stands before the driver, with a stand-in for the driver, and one for UCX's module, which is linked to it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
typedef struct { char reserved[64]; } Handle;
int opened, closed;
int cuIpcOpenMemHandle_v2(unsigned long long *address, Handle handle, unsigned flags)
{ opened++; *address = 0x1000 * handle.reserved[0] + flags; return 0; }
int cuIpcCloseMemHandle(unsigned long long address) { closed++; return (int)(address % 7); }
"""
MODULE = """
typedef struct { char reserved[64]; } Handle;
int cuIpcOpenMemHandle_v2(unsigned long long *, Handle, unsigned);
int cuIpcCloseMemHandle(unsigned long long);
unsigned long long module_open(char first)
{ Handle handle = {{0}}; unsigned long long address = 0; handle.reserved[0] = first;
  return cuIpcOpenMemHandle_v2(&address, handle, 1) ? 0 : address; }
int module_close(unsigned long long address) { return cuIpcCloseMemHandle(address); }
"""
SCRIPT = """
import ctypes, sys
from pathlib import Path
from foundation.native_library import native_library
from kv_transfer.transport.peer_mappings import SOURCE, PeerMappings

folder = Path(sys.argv[1])
driver = ctypes.CDLL(str(folder / "libstandin.so"))
library = native_library(SOURCE, ("-O2",), ("-lpthread",), ctypes.RTLD_GLOBAL)
assert library is not None
mappings = PeerMappings(library, driver)
module = ctypes.CDLL(str(folder / "module.so"))
module.module_open.restype = ctypes.c_uint64
asked = lambda: (ctypes.c_int.in_dll(driver, "opened").value, ctypes.c_int.in_dll(driver, "closed").value)
close = lambda address: module.module_close(ctypes.c_uint64(address))
handle = lambda first: bytes([first]) + bytes(63)

assert module.module_open(5) == 0x5001 and close(0x5001) == 0x5001 % 7 and asked() == (1, 1), "the driver's own"
mappings.keep(handle(5), 0x7F0000000000)
assert [module.module_open(5) for _ in range(3)] == [0x7F0000000000] * 3 and close(0x7F0000000000) == 0
assert asked() == (1, 1) and mappings.answered == 3, "what is kept costs the driver nothing"
assert module.module_open(6) == 0x6001 and close(0x6001) == 0x6001 % 7 and asked() == (2, 2), "others' is not kept"
mappings.keep(handle(5), 0x7F0000000000)
mappings.drop(0x7F0000000000)
assert module.module_open(5) == 0x7F0000000000, "another session keeps it"
mappings.drop(0x7F0000000000)
mappings.drop(0x7F0000000000)
assert module.module_open(5) == 0x5001 and close(0x7F0000000000) == 0x7F0000000000 % 7 and asked() == (3, 3)
mappings.keep(handle(5), 0x5001)
assert close(0x5001) == 0x5001 % 7 and asked() == (3, 4), "what the driver mapped before it was kept goes back to the driver"
assert module.module_open(5) == 0x5001 and close(0x5001) == 0 and asked() == (3, 4)
mappings.keep(handle(5), 0x5001)
assert module.module_open(5) == 0x5001
mappings.drop(0x5001)
assert close(0x5001) == 0 and asked() == (3, 4), "one session's end takes nothing from what another keeps"
mappings.drop(0x5001)
for first in range(5000):
    mappings.keep(first.to_bytes(2, "little") + bytes(62), first + 1)
assert module.module_open(5) == 6, "beyond its room nothing is kept, and what is kept stays"
print("well")
"""


def test_what_a_session_keeps_mapped_costs_the_driver_nothing_and_all_else_reaches_it(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    for name, source, linked in (
        ("libstandin.so", DRIVER, ()),
        ("module.so", MODULE, (f"-L{tmp_path}", "-lstandin", f"-Wl,-rpath,{tmp_path}")),
    ):
        (tmp_path / "source.c").write_text(source)
        command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / name), str(tmp_path / "source.c"), *linked]
        subprocess.run(command, check=True)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "well\n"
