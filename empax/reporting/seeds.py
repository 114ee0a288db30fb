"""One recipe with several seeds: mean, standard deviation and t-interval of every metric over the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import DataError, json_text, read_json, write_together
from empax.evaluation.significance import mean_interval
from empax.pipeline.records import difference, differences
from empax.reporting.tables import aligned, describe, format_value, markdown_table, text_note

Summary = dict[str, Any]

_PARTS = ("metrics", "variants")


def summarize(paths: Sequence[Path]) -> Summary:
    """Summarises the reports of several runs.

    Args:
      paths: `report.json` of each run, or the work directories that hold them; at least two.

    Returns:
      `system`; `corpus`, empty if unknown; `rows`, the test rows, as from `pairing.describe_rows`; `runs`, for each its
      `name` (the folder's), `seed` and `commit`; and by name `metrics` and `variants`, each with `mean`, `std`, `low`,
      `high` (see `significance.mean_interval`) and `values` in the order of the runs; `evaluations`, by stage the same
      two; `left_out`, metrics that not every run has.

    Raises:
      DataError: there are fewer than two reports, a file is not a report, a run is given twice, or test rows differ.
      ConfigError: the systems or the recipes differ.
    """
    files = [path / "report.json" if path.is_dir() else path for path in paths]
    if len(files) < 2:
        raise DataError(f"{len(files)} reports given; an interval over seeds needs at least two.")
    reports = [_read(path) for path in files]
    _check_one_recipe(files, reports)
    left_out: list[str] = []
    summary: Summary = {
        "system": reports[0]["system"],
        "corpus": reports[0].get("test_set", {}).get("corpus", ""),
        "rows": reports[0].get("rows", {}),
        "runs": [
            {
                "name": path.parent.name,
                **{key: report["run"][key] for key in ("seed", "commit") if key in report["run"]},
            }
            for path, report in zip(files, reports, strict=True)
        ],
        **{part: over_runs([report[part] for report in reports], "", left_out) for part in _PARTS},
        "evaluations": {},
    }
    for stage in dict.fromkeys(stage for report in reports for stage in report["evaluations"]):
        found = [report["evaluations"][stage] for report in reports if stage in report["evaluations"]]
        if len(found) < len(reports):
            left_out.append(stage)
            continue
        scores = {part: over_runs([one[part] for one in found], f"{stage}: ", left_out) for part in _PARTS}
        about = {key: found[0][key] for key in ("stage", "corpus", "split")}
        summary["evaluations"][stage] = {**about, **scores}
    return {**summary, "left_out": left_out}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the report.json of finished runs.")
    report = read_json(path)
    needed = ("system", "config", "run", *_PARTS)
    missing = [key for key in needed if not isinstance(report, dict) or key not in report]
    if missing:
        raise DataError(f"{path} is not the report of a run: it lacks {', '.join(missing)}.")
    return {"evaluations": {}, **report}  # older reports lack them


def _check_one_recipe(files: Sequence[Path], reports: Sequence[Mapping[str, Any]]) -> None:
    for i, (path, report) in enumerate(zip(files, reports, strict=True)):
        for earlier, other in zip(files[:i], reports[:i], strict=True):
            where = f"{earlier} and {path}"
            if other["system"] != report["system"]:
                raise ConfigError(
                    f"{where} are from different systems ({other['system']!r} there, {report['system']!r} here); only "
                    "runs of one system are averaged."
                )
            parts = {"": (other, report)}
            for stage in filter(report["evaluations"].get, other["evaluations"]):
                parts[f"{stage}: "] = (other["evaluations"][stage], report["evaluations"][stage])
            for name, (one, two) in parts.items():
                if rows := other_rows(one, two):
                    raise DataError(f"{where} are over different test rows ({name}{rows}); give runs on the same rows.")
            found = list(differences(other["config"], report["config"]))
            recipe = [difference(*one) for one in found if not one[0].endswith("seed")]
            if recipe:
                raise ConfigError(
                    f"{where} are from different recipes ({'; '.join(recipe[:5])}); only seeds may differ."
                )
            # A scored file without its run has no config; then its hash identifies it.
            scored = [one["run"].get("predictions_sha256") for one in (other, report)]
            if not found and (report["config"] or scored[0] == scored[1]):
                raise DataError(f"{where} are from the same run: no seed differs. Each run counts once.")


def other_rows(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    """Describes the difference between the test rows of two reports, as far as known; empty if they are equal."""
    facts = [
        {
            "rows": report.get("counts", {}).get("rows"),
            "rows.sha256": report.get("rows", {}).get("sha256"),
            "data.source_hash": report.get("data", {}).get("source_hash"),
        }
        for report in (one, two)
    ]
    pairs = [(name, facts[0][name], facts[1][name]) for name in facts[0]]
    return "; ".join(difference(*one) for one in pairs if one[1] and one[2] and one[1] != one[2])


def over_runs(
    found: Sequence[Mapping[str, Mapping[str, Any]]], where: str, left_out: list[str]
) -> dict[str, dict[str, Any]]:
    """Summarises the metrics that every run has; appends the names of the others to `left_out`."""
    over: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for scores in found for name in scores):
        # null represents a number that is not finite
        values = [scores[name]["value"] for scores in found if name in scores and scores[name]["value"] is not None]
        if len(values) < len(found):
            left_out.append(f"{where}{name}")
        else:
            over[name] = {**mean_interval(values), "values": values}
    return over


def tables(summary: Summary, *, variants: bool = False) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Returns title, description, header and rows of a table for the main metrics and each of the other evaluations."""
    runs = [f"seed {run['seed']}" if "seed" in run else run["name"] for run in summary["runs"]]
    head = ["metric", "mean", "std", "95% interval", *runs]
    groups = {f"{summary['system']}, {len(summary['runs'])} runs": summary, **summary["evaluations"]}
    made = []
    for title, group in groups.items():
        shown = {**group["metrics"], **(group["variants"] if variants else {})}
        about = f"Text: {text_note(shown)}."
        if group.get("rows"):
            about = describe(group["rows"], shown, corpus=group["corpus"], over="seeds")
        elif "split" in group:
            corpus = group["corpus"] or "the run's own"
            about = f"Corpus: {corpus}, {group['split']} split. {about}"
        made.append((title, about, head, [_row(name, over) for name, over in shown.items()]))
    return made


def _row(name: str, over: Mapping[str, Any]) -> list[str]:
    mean, std, low, high, *values = [
        format_value(name, value) for value in (over["mean"], over["std"], over["low"], over["high"], *over["values"])
    ]
    return [name, mean, std, f"[{low}, {high}]", *values]


def text(summary: Summary, *, variants: bool = False) -> str:
    """Formats the tables for a terminal."""
    parts = []
    for title, about, head, rows in tables(summary, variants=variants):
        parts.append("\n".join([title, about, *aligned(head, rows)]))
    if summary["left_out"]:
        parts.append(f"not in every run, so left out: {', '.join(summary['left_out'])}")
    return "\n\n".join(parts)


def write(summary: Summary, folder: Path) -> None:
    """Writes seeds.json and seeds.md to `folder`."""
    lines: list[str] = []
    for title, about, head, rows in tables(summary, variants=True):
        lines += [f"## {title}", "", about, "", *markdown_table(head, rows), ""]
    lines.append(
        "Mean, standard deviation (n - 1) and 95% t-interval of the mean over runs that differ in their seeds."
    )
    write_together(folder, {"seeds.json": json_text(summary), "seeds.md": "\n".join(lines) + "\n"})
