"""A run that is watched while it trains: curves, time left, memory; read-only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json
from empax.core.lock import holder
from empax.reporting.charts import line_chart
from empax.reporting.report import collect_curves

_SHOWN = ("loss", "nll", "perplexity", "emotion_accuracy", "reward", "learning_rate")
"""Curves that come first."""


def check_run(workdir: Path) -> None:
    """Raises ConfigError where there is no run, finished or not."""
    if not WorkDir(workdir).config.exists():
        raise ConfigError(f"{workdir} holds no run; give the work directory of one that has begun.")


def watch_page(workdir: Path) -> str:
    """The page as the run's files are now; it loads itself again every ten seconds."""
    files = WorkDir(workdir)
    config, rows = read_json(files.config), _rows(workdir / "metrics.jsonl")
    running, stages = holder(files), list(dict.fromkeys(row["stage"] for row in rows))
    parts = [f"<h1>{escape(workdir.name)}</h1>", f'<p class="quiet">{escape(running or "Nobody runs it now.")}</p>']
    parts += [f"<p>{escape(line)}</p>" for line in (left(config, rows), memory()) if line]
    curves = collect_curves(rows)
    for stage in reversed(stages):
        names = sorted(curves[stage], key=lambda name: (_SHOWN.index(name) if name in _SHOWN else len(_SHOWN), name))
        parts.append(f"<h2>{escape(stage)}</h2><div class='charts'>")
        for name in names:
            if name != "seconds":
                series = {s: [(x, y) for x, y in points] for s, points in curves[stage][name].items()}
                parts.append(f"<figure>{line_chart(series, x_label='step', y_label=name)}</figure>")
        parts.append("</div>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += (
        '<meta http-equiv="refresh" content="10"><link rel="icon" href="data:,"><link rel="stylesheet" href="page.css">'
    )
    return f'<!doctype html><html lang="en"><head>{head}<title>empax</title></head><body>{"".join(parts)}</body></html>'


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that somebody may be writing to."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # half a line
            continue
        if isinstance(row, dict) and {"stage", "step"} <= row.keys():
            found.append(row)
    return found


def left(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """How far the newest stage is, and how long it goes on at the speed that it had so far."""
    row = next((row for row in reversed(rows) if row.get("split") == "train" and "seconds" in row), None)
    if row is None:
        return "No step is logged yet."
    section = config.get(row["stage"])
    steps = section.get("steps") if isinstance(section, Mapping) else None
    if not steps or not row["step"]:
        return f"{row['stage']}: step {row['step']}."
    seconds = row["seconds"] / row["step"] * max(steps - row["step"], 0)
    return f"{row['stage']}: step {row['step']} of {steps}, about {_duration(seconds)} left in this stage."


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def memory() -> str:
    """How much of this machine's memory is in use; empty where it does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return ""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in path.read_text().splitlines() if ":" in line}
    total, free = kib.get("MemTotal", 0) / 2**20, kib.get("MemAvailable", 0) / 2**20
    return f"Memory of this machine: {total - free:.1f} of {total:.1f} GiB are in use."
