"""Runs all GPU benchmarks in one call of at most nine minutes.

    python -m benchmarks.gpu --output=results/benchmarks

First all benchmarks run once, a few in parallel, to fill the compilation caches. Then each runs alone. Benchmarks that
do not end in time are named and left out. Each writes a file to OUTPUT/CARD ("nvidia_h200").

To measure what was left out, name it with `--only` in another call. With JAX_COMPILATION_CACHE_DIR and
TORCHINDUCTOR_CACHE_DIR set to folders, it finds there what earlier calls compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import card
from empax.core.paths import expand

_HALF = ("--dtype", "bfloat16")
_SEARCH = ("--padded", "--batch=32", "--items=32", *_HALF)
_TRAIN = ("--batches=1", "--max-target=16", "--compile", *_HALF)
_SMALL = ("--batch=64", "--buckets", "144", "--max-passage=144", *_TRAIN)
_LARGE = (
    "--shape=t5-1.5b", "--batch=16", "--passages=1", "--unroll=12", "--buckets", "512", "--max-passage=512",
    "--batches=1", "--max-target=128", "--compile", *_HALF,
)  # fmt: skip
_FORWARD = ("--only", "t5-small", "roberta-base", "--batch=64", "--source=256", "--compile", *_HALF)

JOBS: dict[str, tuple[str, ...]] = {
    "train_step_small": ("train_step", *_SMALL),
    "train_step_base": (
        "train_step", "--shape=t5-base", "--batch=32", "--unroll=12", "--buckets", "144", "--max-passage=144", *_TRAIN,
    ),
    "generate_small": ("generate", *_SEARCH),
    "exact": ("exact", "--rows=1000000", "--store", "float32", "float16", "--calls=20"),
    "forward": ("forward", *_FORWARD),
    "train_step_1.5b": ("train_step", *_LARGE),
    "generate_base": ("generate", "--shape=t5-base", "--unroll=12", *_SEARCH),
    "ppo": ("ppo", "--shape", "t5-small", *_HALF),
    "encode": ("encode", "--their-batch=256", *_HALF),
    "bits": ("bits",),
    "bits_deterministic": ("bits", "--deterministic"),
    "real_tokens": ("real_tokens",),
    "encode_8192": ("encode", "--their-batch=256", "--tokens-per-batch=8192", *_HALF),
    "forward_plain": ("forward", "--attention=plain", *_FORWARD),
    "train_step_1.5b_fused": ("train_step", "--dropout=0", *_LARGE),
    "train_step_1.5b_plain": ("train_step", "--dropout=0", "--attention=plain", *_LARGE),
    "train_step_small_fused": ("train_step", "--dropout=0", "--attention=fused", *_SMALL),
    "train_step_small_plain": ("train_step", "--dropout=0", "--attention=plain", *_SMALL),
}  # fmt: skip
"""Benchmarks of this folder and their options, by name of the result file; in the order in which they are measured."""

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Peak dense bfloat16 arithmetic, by a part of the card's name. Source: NVIDIA's data sheets of the SXM cards."""

PEAK_TB = {"H100": 3.35, "H200": 4.8, "A100": 2.04}
"""Peak memory bandwidth in terabytes per second, by a part of the card's name. Source: as above; A100 with 80 GB."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks"), help="folder of the results")
    parser.add_argument("--only", nargs="*", choices=JOBS, default=list(JOBS), help="jobs to run (all)")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit for all jobs together (540)")
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=270.0,
        help="part of it for compiling, before each job runs alone (270)",
    )
    parser.add_argument("--parallel", type=int, default=5, help="jobs that compile at once; they share the card (5)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu", help="device of both sides (gpu)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    options = parser.parse_args(argv)
    about = card() if options.device == "gpu" else {}
    folder = expand(options.output) / re.sub(r"\W+", "_", " ".join(about.get("gpu", "cpu").split()[:2]).lower())
    begin = time.monotonic()
    more = [f"--device={options.device}", *(["--smoke"] if options.smoke else [])]
    with tempfile.TemporaryDirectory() as kept:
        commands = {name: command(JOBS[name], more) for name in options.only}
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": f"{kept}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            "TORCHINDUCTOR_CACHE_DIR": f"{kept}/torch",
            **os.environ,
        }
        if not options.smoke:
            warm(commands, environment, begin + options.compile_seconds, options.parallel)
        done, left_out = {}, {}
        for name, words in commands.items():
            left = begin + options.seconds - time.monotonic()
            result, why = alone(words, environment, left)
            if result is None:
                left_out[name] = why
                continue
            done[name] = with_shares(result, about)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(done[name], indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {folder / name}.json, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    said = {"measured": sorted(done), "left_out": left_out, "seconds": round(time.monotonic() - begin), **about}
    print(json.dumps(said), flush=True)
    return said


def command(job: Sequence[str], more: Sequence[str]) -> list[str]:
    """Returns the command of a benchmark in a separate process, free of other benchmarks' memory and kernels."""
    module, *rest = job
    return [sys.executable, "-m", f"benchmarks.{module}", *rest, *more]


def warm(commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], until: float, parallel: int) -> None:
    """Runs all once, in order and a few in parallel; at the time `until`, kills those that have not ended."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": dict(environment)}
    waiting = list(commands.values())
    running: list[subprocess.Popen[bytes]] = []
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < parallel:
            running.append(subprocess.Popen([*waiting.pop(0), "--rounds=1"], **quiet))
        time.sleep(0.1)
        running = [process for process in running if process.poll() is None]
    for process in running:
        process.kill()
        process.wait()


def alone(words: Sequence[str], environment: Mapping[str, str], left: float) -> tuple[dict[str, Any] | None, str]:
    """Returns the result of a benchmark, or None and the reason."""
    if left < 10.0:
        return None, "no time was left"
    try:
        ended = subprocess.run(words, env=dict(environment), capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return None, f"it took more than the {left:.0f} s that were left"
    if ended.returncode:
        return None, (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return json.loads(ended.stdout.splitlines()[-1]), ""


def with_shares(result: dict[str, Any], about: Mapping[str, str]) -> dict[str, Any]:
    """Adds the shares of the card's peaks, if they are known.

    These are the model FLOPs utilisation of training steps, and the bandwidth of reading all rows of an index once.
    """

    def peak(of: Mapping[str, float]) -> float:
        return 1e12 * next((value for part, value in of.items() if part in about.get("gpu", "")), float("inf"))

    flops, bandwidth = peak(PEAK_TFLOPS), peak(PEAK_TB)
    for row in result["rows"].values():
        for side in ("ours", "theirs"):
            if "flops" in row and flops < float("inf"):
                row[f"mfu_{side}"] = round(row["flops"] * row[side] / flops, 4)
            if "bytes" in row and bandwidth < float("inf"):
                row[f"bandwidth_{side}"] = round(row["bytes"] / row[side] / bandwidth, 4)
    return result


if __name__ == "__main__":
    main()
