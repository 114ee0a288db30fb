"""Freed memory is kept, so that no page is fetched twice, until it is given back."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from empax.core.memory import peak_memory

_BEGIN = """
import ctypes, resource, sys, threading
from empax.core.memory import give_back_freed_memory, keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
"""

# A thread takes, touches and frees a block of 64 MB again and again; page faults of all but the first time.
_PROGRAM = f"""{_BEGIN}
size = 64 << 20

def touch():
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    libc.free(block)

def work():
    touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        touch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def _faults(how: str, **variables: str) -> int:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], env={**plain, **variables}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_what_a_thread_frees_it_gets_again_without_page_faults():
    pages = (64 << 20) // os.sysconf("SC_PAGESIZE")
    assert _faults("keep") < pages / 8
    assert _faults("leave") > pages
    assert _faults("keep", MALLOC_MMAP_THRESHOLD_="1048576") > pages  # the user's choice is left alone


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="compares with Linux's /proc/self/status")
def test_the_peak_is_in_bytes():
    highest = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert 0.5 < peak_memory() / (1024 * int(highest[1])) < 100


_GIVEN_BACK = f"""{_BEGIN}
def resident():
    return int(open("/proc/self/statm").read().split()[1])

size, before = 256 << 20, resident()
block = libc.malloc(ctypes.c_size_t(size))
ctypes.memset(block, 1, size)
behind = libc.malloc(ctypes.c_size_t(1 << 20))  # what is freed is not the end of the heap
libc.free(block)
kept = resident()
give_back_freed_memory()
heap = open("/proc/self/smaps").read().split("[heap]")[1]
flags = heap.split("VmFlags:")[1].splitlines()[0].split()
print(kept - before, resident() - before, "hg" in flags)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_between_stages_it_is_given_back():
    done = subprocess.run([sys.executable, "-c", _GIVEN_BACK, "keep"], capture_output=True, text=True, check=True)
    kept, left = (int(pages) for pages in done.stdout.split()[:2])
    assert kept > (200 << 20) / os.sysconf("SC_PAGESIZE")
    assert left < kept / 8
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert done.stdout.split()[2] == "True"  # fetched again by huge pages
