"""How this process keeps the memory that it frees, when it gives it back, and how much it held at most."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import time

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_TOP_PAD = 1 << 28

_MADV_HUGEPAGE = 14  # of Linux' mman.h


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed for the next step, in one arena, in place of giving it back to the system.

    XLA takes and frees its buffers in every step, on threads of its own; given back, each page is fetched and cleared
    again by the kernel. Settings count for threads that have not allocated yet, so call this before JAX is used. Does
    nothing where there is no glibc, or where the user has chosen by a variable MALLOC_..._ or GLIBC_TUNABLES.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    libc = _glibc()
    if chosen or libc is None:
        return
    never = -1
    for parameter, value in (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, never),
        (_M_TOP_PAD, _TOP_PAD),
        (_M_ARENA_MAX, 1),
    ):
        libc.mallopt(parameter, value)


def give_back_freed_memory(*, collect: bool = True) -> None:
    """Gives the system what this process has freed: before work that needs buffers of other sizes.

    Small blocks that live longer come to lie in freed buffers, which are then too small for their like. The kernel is
    asked for huge pages, by which it fetches the heap again in less time.

    With `collect` it first looks for cycles of garbage, which takes longer than the rest. Does nothing where there is
    no glibc.
    """
    if collect:
        gc.collect()
    if (libc := _glibc()) is not None:
        _ask_for_huge_pages(libc)
        libc.malloc_trim(0)


class HostMemory:
    """Gives freed memory back while work of several shapes repeats: what a compiler leaves lies in freed buffers."""

    _TIDY_SECONDS = 30.0
    """How often it is given back at least."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._last, self._compiled, self._tidied = "", False, 0.0

    def before(self, shapes: str, *, on_host: bool, freed: bool) -> None:
        """To be called before each piece of work.

        Args:
          shapes: of its inputs: new ones are compiled, and others than the last take buffers of another size.
          on_host: its buffers are in this memory.
          freed: much of it has just become free.
        """
        now, new = time.monotonic(), shapes not in self._seen
        collect = new or self._compiled or now - self._tidied > self._TIDY_SECONDS
        if collect or freed or (on_host and shapes != self._last):
            give_back_freed_memory(collect=collect)
        if collect:
            self._tidied = now
        self._seen.add(shapes)
        self._last, self._compiled = shapes, new


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Asks for the heap as it is now; what it grows by later is asked for the next time. A refusal changes nothing."""
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found = False  # lines are in the order of addresses: the heap's are among the first of thousands
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                found = True
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                libc.madvise(start, end - start, _MADV_HUGEPAGE)
            elif found:
                return


def peak_memory() -> int:
    """The most bytes of main memory that this process has held at once."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
