"""Comparison of the arms of a sweep: every metric over an arm's seeds, and against the first arm, paired by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.files import WorkDir, json_text, read_json, write_together
from empax.core.manifest import read_done
from empax.evaluation.significance import mean_interval
from empax.pipeline.plan import read_plan
from empax.reporting.seeds import other_rows, over_runs
from empax.reporting.tables import aligned, format_value, markdown_table

Summary = dict[str, Any]
Scores = Mapping[str, Mapping[str, Any]]
"""Metric → `value`, None if it is not a number, and its interval if it has one."""

_ACROSS = 3  # arms side by side in a terminal

_ABOUT = (
    "Of several seeds: mean ± standard deviation (n - 1) [95% t-interval of the mean]. Of one seed: the value, and for "
    "metrics of the report its 95% interval over test rows."
)
_ABOUT_PAIRS = (
    "Mean difference between runs with the same seed [95% t-interval], not corrected for multiple testing. An arm that "
    "is chosen by its test metrics looks better than it is: choose by a validation metric, or with "
    "evaluate.split=validation."
)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The results of a finished run: its report, and the best metric of each training stage."""

    report: Mapping[str, Any]
    trained: Scores

    @property
    def scores(self) -> Scores:
        return {**self.report.get("metrics", {}), **self.trained}


def summarize(arms: Mapping[str, Mapping[int, Path]]) -> Summary:
    """Summarises finished runs by arm.

    Args:
      arms: name → seed → work directory of a finished run; the first arm is the baseline.

    Returns:
      `arms`, by name `workdirs` (by seed), `metrics` (each `mean`, `low`, `high`, `values` in the order of the seeds,
      and for several seeds `std`) and `left_out`, metrics that not every seed has; `differences`, by name of the other
      arms the `mean_interval` of each metric's differences over the shared seeds, if there are at least two;
      `other_rows`, by name of the arms whose test rows differ from the first arm's, how they differ: these arms have no
      differences of the report's metrics. Metrics are those of the report, and the best value of each training stage's
      selection metric ("STAGE: METRIC").
    """
    found = {arm: {seed: _read(folder) for seed, folder in folders.items()} for arm, folders in arms.items() if folders}
    summary: Summary = {"arms": {}, "differences": {}, "other_rows": {}}
    for arm, runs in found.items():
        left_out: list[str] = []
        if len(runs) > 1:
            metrics = over_runs([run.scores for run in runs.values()], "", left_out)
        else:
            (run,) = runs.values()
            metrics = {
                name: {
                    "mean": one["value"],
                    "values": [one["value"]],
                    **{k: one[k] for k in ("low", "high") if k in one},
                }
                for name, one in run.scores.items()
                if one["value"] is not None
            }
        workdirs = {str(seed): str(folder) for seed, folder in arms[arm].items()}
        summary["arms"][arm] = {"workdirs": workdirs, "metrics": metrics, "left_out": left_out}
    first = next(iter(found), "")
    for arm in list(found)[1:]:
        pairs = [(run, found[arm][seed]) for seed, run in found[first].items() if seed in found[arm]]
        apart = next(filter(None, (other_rows(one.report, two.report) for one, two in pairs)), "")
        if apart:
            summary["other_rows"][arm] = apart
        if len(pairs) > 1:
            sides = [[run.trained if apart else run.scores for run in side] for side in zip(*pairs, strict=True)]
            summary["differences"][arm] = _differences(*sides)
    return summary


def _read(workdir: Path) -> _Run:
    trained: dict[str, dict[str, Any]] = {}
    files = WorkDir(workdir)
    for stage in read_plan(files).stages.values():
        done = read_done(files.stage(stage.name)) if stage.kind == "train" else {}
        if done.get("best_value") is not None:
            trained[f"{stage.name}: {stage.loop.best_metric}"] = {"value": done["best_value"]}
    report = workdir / "report.json"
    return _Run(read_json(report) if report.is_file() else {}, trained)


def _differences(first: Sequence[Scores], other: Sequence[Scores]) -> dict[str, dict[str, float]]:
    found = {}
    for name in first[0]:
        values = [(scores.get(name) or {}).get("value") for scores in (*first, *other)]
        numbers = [value for value in values if value is not None]
        if len(numbers) == len(values):
            count = len(first)
            found[name] = mean_interval([b - a for a, b in zip(numbers[:count], numbers[count:], strict=True)])
    return found


def tables(summary: Summary) -> list[tuple[str, list[str], list[list[str]]]]:
    """Returns description, header and rows of each table: all arms, then the differences from the first."""
    arms = summary["arms"]
    sizes = {arm: len(one["workdirs"]) for arm, one in arms.items()}
    head = ["", *(f"{arm} ({size} seed{'s' if size > 1 else ''})" for arm, size in sizes.items())]
    apart = [
        f"{arm} is over other test rows than {next(iter(arms))} ({how}), so metrics of the report are not compared."
        for arm, how in summary["other_rows"].items()
    ]
    made = [(" ".join([_ABOUT, *apart]), head, _rows([one["metrics"] for one in arms.values()], signed=False))]
    if differences := summary["differences"]:
        head = [f"against {next(iter(arms))}", *differences]
        made.append((_ABOUT_PAIRS, head, _rows(list(differences.values()), signed=True)))
    return made


def _rows(columns: Sequence[Mapping[str, Mapping[str, Any]]], *, signed: bool) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(_cell(name, column.get(name), signed) for column in columns)] for name in names]


def _cell(name: str, over: Mapping[str, Any] | None, signed: bool) -> str:
    if over is None:
        return "–"

    def text(value: float) -> str:
        written = f"{value:.4g}" if ": " in name else format_value(name, value)
        return f"+{written}" if signed and value > 0 else written

    std = f" ± {text(over['std'])}" if "std" in over and not signed else ""
    return f"{text(over['mean'])}{std}" + (f" [{text(over['low'])}, {text(over['high'])}]" if "low" in over else "")


def text(summary: Summary) -> str:
    """Formats the tables for a terminal, a few arms side by side."""
    parts = []
    for about, head, rows in tables(summary):
        parts.append(about)
        for start in range(1, len(head), _ACROSS):
            places = [0, *range(start, min(start + _ACROSS, len(head)))]
            shown = [[row[i] for i in places] for row in (head, *rows)]
            parts.append("\n".join(aligned(shown[0], shown[1:])))
    return "\n\n".join(parts)


def write(summary: Summary, folder: Path) -> None:
    """Writes sweep.json and sweep.md to `folder`."""
    lines: list[str] = []
    for about, head, rows in tables(summary):
        head = [arm.replace("|", r"\|") for arm in head]  # a pattern: "lora.pattern=query|value"
        lines += [about, "", *markdown_table(head, rows), ""]
    write_together(folder, {"sweep.json": json_text(summary), "sweep.md": "\n".join(lines)})
