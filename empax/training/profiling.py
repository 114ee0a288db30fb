"""Where a training step spends its time: a trace of a few updates, and its most expensive operations."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger("empax")

_OPERATION = re.compile(r"%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"")


@dataclasses.dataclass(frozen=True)
class Operation:
    """A compiled operation over a whole trace.

    Attributes:
      name: as the compiler calls it, "fusion.12".
      source: the module and function that it comes from, as far as the program says.
      milliseconds: in all, over all cores of a CPU or of the first device.
      calls: how often it ran.
    """

    name: str
    source: str
    milliseconds: float
    calls: int


class Profiler:
    """Traces the updates `first` (from 0 in this process; those before may compile) to `first + updates - 1`.

    The trace goes to `directory`, for TensorBoard or Perfetto; what it says in short, to the log. What fails of that is
    a warning there.
    """

    def __init__(self, directory: Path, *, first: int = 8, updates: int = 4) -> None:
        self.directory, self.first, self.last = directory, first, first + updates - 1
        self.seen, self.tracing = 0, False

    def watch(self, step: Any) -> Callable[..., Any]:
        """A jitted step that is traced when its turn has come; what is computed between two calls is traced too."""

        def watched(*args: Any) -> Any:
            if self.seen == self.first:
                with _failing_softly():
                    jax.profiler.start_trace(self.directory)
                    self.tracing = True
            # The arguments may be donated: only their shapes and places are left afterwards.
            shapes = jax.tree.map(_shape, args)
            results = step(*args)
            if self.seen == self.last and self.tracing:
                jax.block_until_ready(results)
                with _failing_softly():
                    self._stop()
                    found = expensive_operations(self.directory, step.lower(*shapes).compile().as_text())
                    log.info("%d updates, see %s:\n%s", self.last - self.first + 1, self.directory, table(found))
            self.seen += 1
            return results

        return watched

    def close(self) -> None:
        """Ends the trace, also one that the end of training cuts short."""
        if self.tracing:
            with _failing_softly():
                self._stop()

    def _stop(self) -> None:
        self.tracing = False
        jax.profiler.stop_trace()


@contextlib.contextmanager
def _failing_softly() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the profiler, the compiler and the disk may raise anything; training goes on
        log.warning("no profile: %s: %s", type(error).__name__, error)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """What the compiler knows of an argument, its place among it where it has one of its own."""
    place = leaf.sharding if getattr(leaf, "committed", False) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=getattr(leaf, "weak_type", False))


def expensive_operations(directory: Path, program: str = "", *, most: int = 10) -> list[Operation]:
    """The operations of the newest trace under `directory` that took longest together, longest first.

    Args:
      directory: what was given to `jax.profiler.start_trace`.
      program: compiled programs as text, in which operations say where they come from.
      most: how many.

    Raises:
      FileNotFoundError: there is no trace.
    """
    traces = sorted(directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"there is no trace in {directory}.")
    with gzip.open(traces[-1], "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    # A TPU's operations have a line of their own; those of CPUs and GPUs name themselves.
    lines = {
        (event["pid"], event.get("tid"))
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"] == "XLA Ops"
    }
    first = min((pid for pid, _ in lines), default=None)  # one device: the others do the same
    microseconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    sources = dict(_OPERATION.findall(program))
    for event in events:
        if event.get("ph") != "X":
            continue
        args = event.get("args", {})
        if "hlo_op" in args if not lines else (event["pid"], event.get("tid")) in lines and event["pid"] == first:
            name = args.get("hlo_op", event["name"])
            microseconds[name] = microseconds.get(name, 0.0) + event["dur"]
            calls[name] = calls.get(name, 0) + 1
            sources.setdefault(name, args.get("tf_op", ""))
    order = sorted(microseconds, key=lambda name: -microseconds[name])[:most]
    return [Operation(name, sources[name], microseconds[name] / 1000, calls[name]) for name in order]


def table(operations: list[Operation]) -> str:
    """The operations as lines of text."""
    lines = [f"{'ms':>9} {'calls':>6}  operation"]
    for one in operations:
        source = "/".join(one.source.split("/")[-3:])
        lines.append(f"{one.milliseconds:9.1f} {one.calls:6d}  {one.name}  {source}".rstrip())
    return "\n".join(lines)
