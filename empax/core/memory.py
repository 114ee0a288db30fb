"""How this process keeps the memory that it frees, when it gives it back, and how much it held at most."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_TOP_PAD = 1 << 28


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


def give_back_freed_memory() -> None:
    """Gives the system what this process has freed: before work that needs buffers of other sizes.

    What is compiled in between comes to lie in freed buffers, which are then too small for their like.

    Does nothing where there is no glibc.
    """
    gc.collect()
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def peak_memory() -> int:
    """The most bytes of main memory that this process has held at once."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
