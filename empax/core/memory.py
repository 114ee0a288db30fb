"""Freed memory of this process: keeping it, returning it to the system, and the peak usage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import time

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_TOP_PAD = 1 << 28

_MADV_HUGEPAGE = 14  # from Linux's mman.h


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step, in one arena, instead of returning it to the system.

    XLA allocates and frees its buffers in every step, on its own threads. The kernel must map and clear each returned
    page again. The settings affect threads that have not allocated yet, so call this before JAX is used. Does
    nothing without glibc, or if the user has set a variable MALLOC_..._ or GLIBC_TUNABLES.
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
    """Returns freed memory to the system, before work that needs buffers of other sizes.

    Small long-lived blocks end up in freed buffers, which are then too small for buffers of the same size. Huge pages,
    requested from the kernel, reduce the time to map the heap again.

    With `collect`, first collects cyclic garbage, which takes longer than the rest. Does nothing without glibc.
    """
    if collect:
        gc.collect()
    if (libc := _glibc()) is not None:
        _ask_for_huge_pages(libc)
        libc.malloc_trim(0)


class HostMemory:
    """Returns freed memory during repeated work of several shapes, since a compiler's data fragments freed buffers."""

    _TIDY_SECONDS = 30.0
    """Longest time between two returns."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._last, self._compiled, self._tidied = "", False, 0.0

    def before(self, shapes: str, *, on_host: bool, freed: bool) -> None:
        """Prepares memory; call it before each piece of work.

        Args:
          shapes: shapes of the inputs; new ones are compiled, changed ones need buffers of other sizes.
          on_host: whether the buffers are in host memory.
          freed: whether much memory has just been freed.
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
    """Requests huge pages for the current heap; later growth needs another call. A refusal has no effect."""
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found = False  # lines are sorted by address: the heap's are among the first of thousands
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                found = True
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                libc.madvise(start, end - start, _MADV_HUGEPAGE)
            elif found:
                return


def peak_memory() -> int:
    """Returns the peak memory use of this process in bytes."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
