"""The compiler's own analysis of a program, without the machine code: the input of plans for TPUs.

Most of the compile time goes into machine code, which a plan does not need. So another process compiles, and is ended
as soon as it has written the program and its buffer assignment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from empax.core.config import ConfigError
from empax.planning.hlo import Program

_PROGRAM = "*after_optimizations.txt"
_BUFFERS = "*after_optimizations-buffer-assignment.txt"
_WRITTEN = "*after_optimizations_after_buffer_assignment.txt"  # the file written after both
_WRITTEN_BY_CPU = "*after_optimizations-memory-usage-report.txt"  # the same for CPUs
_ERROR = "error"
_TEMPORARY = re.compile(r"^allocation \d+: size (\d+), (?:page \d+, )?preallocated-temp", re.MULTILINE)


class CompiledProgram(Program):
    """A partitioned program, and the bytes of main memory that it needs at its peak in addition to its arguments."""

    def __init__(self, text: str, buffers: str):
        super().__init__(text)
        self.temporary_bytes = temporary_bytes(buffers)


def temporary_bytes(buffers: str) -> int:
    """Sums temporary bytes of main memory in the text of a buffer assignment; other memories have a color."""
    return sum(int(size) for size in _TEMPORARY.findall(buffers))


@contextlib.contextmanager
def libtpu_environment() -> Iterator[None]:
    """Sets the environment for libtpu without a TPU: no metadata server, no lock on the library, no CPU flags."""
    before = dict(os.environ)
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ.pop("XLA_FLAGS", None)  # libtpu ends the process on an unknown flag
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def compile_into(lowered: Any, folder: str) -> None:
    """Compiles, and makes the compiler write the files for `compile_elsewhere` into `folder`."""
    # A hit in JAX's persistent cache would write no files.
    jax.config.update("jax_enable_compilation_cache", False)
    lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})


def compile_elsewhere(work: Callable[[str], None], *, by_cpu: bool = False) -> CompiledProgram:
    """Runs `work(folder)` in another process and reads the compiler's output; see `compile_into`.

    `work` must be picklable; `by_cpu` means that it compiles for a CPU. The program is read from files because
    `as_text()` of an executable cannot read back some programs for v5p.

    Raises:
      ConfigError: `work` failed, for example because a program needs more memory than a chip has.
    """
    written = _WRITTEN_BY_CPU if by_cpu else _WRITTEN
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=_guarded, args=(work, folder), daemon=True)
        process.start()
        try:
            while process.is_alive() and not any(Path(folder).glob(written)):
                time.sleep(0.1)
        finally:
            process.kill()
            process.join()
        return _read(Path(folder))


def _guarded(work: Callable[[str], None], folder: str) -> None:
    try:
        with libtpu_environment():
            work(folder)
    except Exception as error:
        Path(folder, _ERROR).write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def _read(folder: Path) -> CompiledProgram:
    if (error := folder / _ERROR).exists():
        raise ConfigError(
            f"the step could not be compiled ({error.read_text()[:500].strip()}). If it needs more memory than a chip "
            "has: fewer rows per chip (batch_size), more chips per copy (config.mesh.fsdp), or remat = full."
        )
    found = [list(folder.glob(pattern)) for pattern in (_PROGRAM, _BUFFERS)]
    if not all(found):
        raise ConfigError(
            "the process that compiles the step ended without an error message; did it run out of memory?"
        )
    program, buffers = (one[0].read_text() for one in found)
    return CompiledProgram(program, buffers)
