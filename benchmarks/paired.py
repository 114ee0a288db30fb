"""What all measurements share: ours and theirs in turns, and the object of JSON that is printed last.

Nothing heavy is imported here: `benchmarks.load` measures imports.
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
    """Both sides were to compute the same and did not: there is nothing to compare."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was measured on both sides, once a round.

    Attributes:
      ours, theirs: values, in the order of the rounds.
      unit: of the values.
      more_is_better: True of rates, False of seconds and bytes.
      facts: what else is worth saying about it.
    """

    ours: Sequence[float]
    theirs: Sequence[float]
    unit: str
    more_is_better: bool = False
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_rates(cls, took: tuple[Sequence[float], Sequence[float]], count: int, unit: str, **facts: Any) -> Row:
        """How many a second of both, from the seconds (`timed`) of `count` of them."""
        return cls(*([count / one for one in side] for side in took), unit, more_is_better=True, facts=facts)

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1 = we are ahead."""
        return ours / theirs if self.more_is_better else theirs / ours

    def summary(self) -> dict[str, Any]:
        """Medians, the ratio of the medians, and the smallest and the largest ratio of one round."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        rounds = [self.ratio(*pair) for pair in zip(self.ours, self.theirs, strict=True)]
        numbers = {"ours": ours, "theirs": theirs, "ratio": self.ratio(ours, theirs)}
        numbers |= {"lowest_ratio": min(rounds), "highest_ratio": max(rounds)}
        rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
        return {**rounded, "unit": self.unit, "rounds": len(rounds), **self.facts}


def in_turns(ours: Callable[[int], T], theirs: Callable[[int], T], rounds: int) -> list[tuple[T, T]]:
    """Calls both with the number of the round; who begins changes every round, so that a drift hits both alike.

    Says on standard error how long each took.
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
    """How long `work` takes; it must wait for its own results."""
    gc.collect()
    time.sleep(0.05)  # threads of the other side may still be spinning
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def timed(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, *, warm: bool = False, pieces: int = 1
) -> tuple[list[float], list[float]]:
    """Seconds of both in each round, after one call of each that does not count, unless both are `warm`.

    Of a call that does so many `pieces` of work, the seconds of one.
    """
    if not warm:
        ours()
        theirs()
    pairs = in_turns(lambda _: seconds(ours) / pieces, lambda _: seconds(theirs) / pieces, rounds)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


class _Thorough(argparse.Action):
    """Sets several options at once, those of `const`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        for name, value in self.const.items():
            setattr(namespace, name, value)


def arguments(
    doc: str, held_equal: Sequence[str], *, rounds: int, devices: bool = False, **thorough: Any
) -> argparse.ArgumentParser:
    """A parser with what every measurement takes; `--help` says what is held equal.

    Args:
      doc: what is measured.
      held_equal: what is the same on both sides.
      rounds: how often each side is measured; the default of a benchmark ends within ten minutes on two cores.
      devices: whether both sides can compute on a GPU, too: `--device`, for `benchmarks.sides.use`.
      thorough: options that `--thorough` sets, beside three times as many rounds.
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
        parser.add_argument("--device", choices=("cpu", "gpu"), default=here, help=f"of both sides (here {here})")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    return parser


def report(name: str, rows: Mapping[str, Row], held_equal: Sequence[str], **facts: Any) -> dict[str, Any]:
    """Prints a table and, as the last line, everything as one object of JSON.

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
    """What a number depends on, without the names of hosts, users and folders."""
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
    """The first GPU, its driver and its clocks, as `nvidia-smi` says; nothing where that is not there."""
    words = ["nvidia-smi", f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = [value.strip() for value in said.splitlines()[0].split(",")]
    return dict(zip(_ASKED, found, strict=True))


def _vectors(flags: str) -> str:
    """What of the processor's flags products are made with: names alone do not tell generations apart."""
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join(flag for flag in known if flag in flags.split())


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first(file: str, field: str) -> str:
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
