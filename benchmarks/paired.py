"""Shared code of all benchmarks: alternating measurements of ours and theirs, and the JSON object printed last.

Imports nothing heavy, since `benchmarks.load` measures imports.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from empax.core.machine import has_gpu

T = TypeVar("T")

_PACKAGES = (
    "jax", "flax", "torch", "transformers", "sentence-transformers", "safetensors", "nltk", "rouge-score", "sacrebleu",
    "scann", "faiss-cpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip


class DisagreementError(RuntimeError):
    """The results of both sides differ, so that their comparison is invalid."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity, measured on both sides once per round.

    Attributes:
      ours, theirs: values in the order of the rounds.
      unit: unit of the values.
      more_is_better: True of rates, False of seconds and bytes.
      facts: further information.
    """

    ours: Sequence[float]
    theirs: Sequence[float]
    unit: str
    more_is_better: bool = False
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_rates(cls, took: tuple[Sequence[float], Sequence[float]], count: int, unit: str, **facts: Any) -> Row:
        """Builds a row of rates per second from the seconds (`timed`) of `count` items."""
        return cls(*([count / one for one in side] for side in took), unit, more_is_better=True, facts=facts)

    def ratio(self, ours: float, theirs: float) -> float:
        """Returns a ratio above 1 if ours is better."""
        return ours / theirs if self.more_is_better else theirs / ours

    def summary(self) -> dict[str, Any]:
        """Returns medians, the ratio of the medians, and the smallest and the largest ratio of one round."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        rounds = [self.ratio(*pair) for pair in zip(self.ours, self.theirs, strict=True)]
        numbers = {"ours": ours, "theirs": theirs, "ratio": self.ratio(ours, theirs)}
        numbers |= {"lowest_ratio": min(rounds), "highest_ratio": max(rounds)}
        rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
        return {**rounded, "unit": self.unit, "rounds": len(rounds), **self.facts}


def in_turns(ours: Callable[[int], T], theirs: Callable[[int], T], rounds: int) -> list[tuple[T, T]]:
    """Calls both with the number of the round, in alternating order, so that a drift affects both equally.

    Prints the duration of each to standard error.
    """
    pairs = []
    for number in range(rounds):
        begin = time.perf_counter()
        first = (theirs if number % 2 else ours)(number)
        between = time.perf_counter()
        second = (ours if number % 2 else theirs)(number)
        took = [between - begin, time.perf_counter() - between]
        pair: Any = (first, second)
        if number % 2:
            pair, took = pair[::-1], took[::-1]
        pairs.append(pair)
        print(
            f"round {number + 1} of {rounds}: ours {took[0]:.4g} s, theirs {took[1]:.4g} s", file=sys.stderr, flush=True
        )
    return pairs


def seconds(work: Callable[[], Any]) -> float:
    """Returns the duration of `work`, which must wait for its results."""
    gc.collect()
    time.sleep(0.05)  # threads of the other side may still be spinning
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def timed(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, *, warm: bool = False, pieces: int = 1
) -> tuple[list[float], list[float]]:
    """Returns the seconds of both in each round, after one discarded call of each unless both are `warm`.

    For a call that does several `pieces` of work, returns the seconds per piece.
    """
    if not warm:
        ours()
        theirs()
    pairs = in_turns(lambda _: seconds(ours) / pieces, lambda _: seconds(theirs) / pieces, rounds)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


class _Thorough(argparse.Action):
    """Sets all options of `const` at once."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        for name, value in self.const.items():
            setattr(namespace, name, value)


def arguments(
    doc: str, held_equal: Sequence[str], *, rounds: int, devices: bool = False, **thorough: Any
) -> argparse.ArgumentParser:
    """Builds a parser with the common options of the benchmarks; `--help` lists what is held equal.

    Args:
      doc: description of the benchmark.
      held_equal: conditions that are equal on both sides.
      rounds: measurements of each side; a benchmark's default ends within ten minutes on two cores.
      devices: whether both sides also support a GPU: `--device`, for `benchmarks.sides.use`. If not, JAX computes on
        the CPU, unless JAX_PLATFORMS says otherwise.
      thorough: options that `--thorough` sets, besides three times as many rounds.
    """
    thorough = {"rounds": 3 * rounds, **thorough}
    parser = argparse.ArgumentParser(
        description=doc,
        epilog="Held equal:\n" + "\n".join(f"  - {line}" for line in held_equal),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each side is measured ({rounds})")
    told = " ".join(f"--{name}={value}" for name, value in thorough.items())
    parser.add_argument("--thorough", action=_Thorough, nargs=0, const=thorough, help=f"the same as {told}")
    if devices:
        here = "gpu" if has_gpu() else "cpu"
        parser.add_argument(
            "--device", choices=("cpu", "gpu"), default=here, help=f"device of both sides (here {here})"
        )
    else:
        _compute_on_cpu()
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    return parser


def _compute_on_cpu() -> None:
    """Makes JAX compute on the CPU, also in processes started later, unless JAX_PLATFORMS is set.

    The baselines run on the CPU; an accelerator on one side alone would make the comparison unfair.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if jax := sys.modules.get("jax"):  # imported before, so it has read the variable already
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def report(name: str, rows: Mapping[str, Row], held_equal: Sequence[str], **facts: Any) -> dict[str, Any]:
    """Prints a table and, as the last line, everything as one JSON object.

    Its `ours`, `theirs`, `unit` and `ratio` are those of the row with the smallest ratio, which `row` names.
    """
    summaries = {key: row.summary() for key, row in rows.items()}
    for key, one in summaries.items():
        print(f"{key:32} ours {one['ours']:<10.4g} theirs {one['theirs']:<10.4g} {one['unit']:14} x {one['ratio']:.2f}")
    worst = min(summaries, key=lambda key: summaries[key]["ratio"])
    headline = {key: summaries[worst][key] for key in ("ours", "theirs", "unit", "ratio")}
    result = {
        "benchmark": name, **headline, "row": worst, "rows": summaries, "work": list(held_equal), **facts,
        "machine": machine() | (card() if facts.get("device") == "gpu" else {}),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


def machine() -> dict[str, Any]:
    """Describes the machine, without the names of hosts, users and folders."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "vectors": _vectors(_first("/proc/cpuinfo", "flags")),
        "cores": cores(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


_ASKED = {
    "gpu": "name", "driver": "driver_version", "gpu_memory": "memory.total", "clock": "clocks.sm",
    "clock_most": "clocks.max.sm", "memory_clock": "clocks.mem", "power_limit": "power.limit",
}  # fmt: skip


def card() -> dict[str, str]:
    """Returns the first GPU, its driver and its clocks from `nvidia-smi`; empty without `nvidia-smi`."""
    words = ["nvidia-smi", f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = [value.strip() for value in said.splitlines()[0].split(",")]
    return dict(zip(_ASKED, found, strict=True))


def _vectors(flags: str) -> str:
    """Returns the processor's vector flags, since its name alone does not identify the generation."""
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join(flag for flag in known if flag in flags.split())


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first(file: str, field: str) -> str:
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
