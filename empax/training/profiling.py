"""Profiles a few training steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger("empax")


class Profiler:
    """Traces steps `first` (from 0 in this process; earlier ones may compile) to `first + updates - 1`.

    The trace goes to `directory`, for TensorBoard or Perfetto. Failures are logged as warnings.
    """

    def __init__(self, directory: Path, *, first: int = 8, updates: int = 4) -> None:
        self.directory, self.first, self.last = directory, first, first + updates - 1
        self.seen, self.tracing = 0, False

    def watch(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a step function to trace the chosen steps, including computations between two calls."""

        def watched(*args: Any) -> Any:
            if self.seen == self.first:
                self.tracing = _softly(lambda: jax.profiler.start_trace(self.directory))
            results = step(*args)
            if self.seen == self.last:
                jax.block_until_ready(results)
                self.close()
            self.seen += 1
            return results

        return watched

    def close(self) -> None:
        """Ends the trace, even one cut short by the end of training; warns if training ended before it began."""
        if self.tracing:
            self.tracing = False
            if _softly(jax.profiler.stop_trace):
                log.info("a trace of some updates is in %s.", self.directory)
        elif self.seen <= self.first:
            log.warning("no profile: the trace begins after %d steps; this process made %d.", self.first, self.seen)


def _softly(do: Callable[[], None]) -> bool:
    """Whether the call succeeded."""
    try:
        do()
    except Exception as error:  # the profiler and the disk may raise anything; training goes on
        log.warning("no profile: %s: %s", type(error).__name__, error)
        return False
    return True
