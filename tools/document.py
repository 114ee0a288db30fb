r"""Fills the tables of documents from a folder of results.

  python -m tools.document README.md docs/benchmarks.md docs/metrics.md docs/results/*.md

A table is between `<!-- table: NAME -->` and `<!-- end -->`; RESULTS/tables.json defines its contents. A figure is an
entry there like a table, and becomes an SVG beside the document. Nothing is scored here: the numbers are those of
`tools.rescore`, of benchmarks and of published tables.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.command import in_one_line
from empax.core.files import DataError, read_json, write_text
from empax.core.paths import expand
from empax.core.text_files import read_text
from empax.core.types import LEVELS, MECHANISMS
from empax.evaluation.human_ratings import PARTS
from empax.evaluation.published import TABLES
from empax.reporting import swaps
from empax.reporting.comparisons import family
from empax.reporting.content import recipe_of
from empax.reporting.tables import (
    cell,
    describe,
    format_difference,
    format_value,
    intervals,
    markdown_table,
    metric_title,
    text_note,
)

_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_NO_RECIPE = re.compile(r"(data\.dir|seed|report\.peers|.*\.path)$")
"""Settings that every run has of its own: they say nothing about its recipe."""

Table = Mapping[str, Any]
"""An entry of tables.json: its `kind` and the arguments of that kind's function."""


def fill(text: str, results: Path) -> str:
    """Returns the document with regenerated tables.

    Raises:
      DataError: a table is missing in tables.json, its results are missing, or its runs answered different test rows.
    """
    tables = read_json(results / "tables.json")

    def made(found: re.Match[str]) -> str:
        start, name, end = found.groups()
        if name not in tables:
            raise DataError(f"{results / 'tables.json'} has no table {name!r}; it has {', '.join(sorted(tables))}.")
        lines = _KINDS[tables[name]["kind"]](tables[name], results)
        return "\n".join([start, *lines, "", end])

    return _MARKED.sub(made, text)


@functools.cache
def _read(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"there is no {path}; make it with python -m tools.rescore.")
    return read_json(path)


def _scores(table: Table, results: Path) -> list[str]:
    """Returns a table with systems as rows and `metrics` as columns.

    A row is a `run`, a recipe's `seeds`, a `control`, `released` or a `published` row; ‡ marks those with a degenerate
    verdict. A column may also be "head:HEAD", the accuracy of one emotion head, or "kappa:JUDGE", the kappa of that
    judge's levels in replies and references. With `recipes` the last column is the recipe of a run.
    """
    names, head, notes = table["metrics"], _head(table), []
    rows = [[row["name"], *(_cell(row, name, results) for name in names)] for row in table["rows"]]
    if table.get("recipes"):
        head = [*head, "recipe"]
        recipes = [_recipe(row, results) for row in table["rows"]]
        rows = [[*cells, recipe] for cells, recipe in zip(rows, recipes, strict=True)]
        if any(recipe.endswith("…") for recipe in recipes):
            notes.append("…: with further settings, see `run.command` in the run's `report.json`.")
    broken = [_broken(row, results) for row in table["rows"]]
    for cells, found in zip(rows, broken, strict=True):
        cells[0] += " ‡" if found else ""
    if any(broken):
        notes.append(f"‡ Degenerate by the verdict: {' '.join(filter(None, broken))}")
    about = _about(table, results, [n for n in names if not n.startswith(("head:", "kappa:"))], notes)
    return [*markdown_table(head, rows), *about]


def _scored(table: Table, results: Path) -> list[Any]:
    """Returns the scores of rows that are runs or seeds; raises DataError unless all answered the same test rows."""
    own = [row for row in table["rows"] if "run" in row or "seeds" in row]
    found = [_read(_path(row, results)) for row in own]
    for row, one in zip(own, found, strict=True):
        if one["rows"]["sha256"] != found[0]["rows"]["sha256"]:
            raise DataError(
                f"{results / 'tables.json'}: {own[0]['name']!r} answered {found[0]['rows']['rows']:,} test rows and "
                f"{row['name']!r} {one['rows']['rows']:,} others; runs in one table must have answered the same."
            )
    return found


def _about(table: Table, results: Path, names: Sequence[str], notes: Sequence[str] = ()) -> list[str]:
    """Returns a note on the corpus, the rows, the meaning of ± and brackets, the text normalisation, and `notes`."""
    if other := next((row for row in table["rows"] if "evaluation" in row), None):
        found = _read(_path(other, results))["evaluations"][other["evaluation"]]
        where = f"Corpus: {found['corpus']}, {found['split']} split"
        return ["", " ".join([f"{where}. Text: {text_note(names)}. ±: standard deviation over seeds.", *notes])]
    scored = _scored(table, results)
    if not scored:
        return []
    last = scored[0]["first_row"] + scored[0]["rows"]["rows"] - 1
    note = describe(scored[0]["rows"], names, corpus=scored[0]["corpus"])
    if all("run" not in row or "control" in row for row in table["rows"]) or not names:
        note = re.sub(r"; 95% intervals over \w+", "", note)
    if any("seeds" in row for row in table["rows"]):
        note += " ±: standard deviation over seeds." if names else " Means over seeds."
    if scored[0]["first_row"] > 1:
        note += f" Test rows {scored[0]['first_row']:,} to {last:,}."
    return ["", " ".join([note if names else note.replace(" Text: not used.", ""), *notes])]


def _recipe(row: Mapping[str, Any], results: Path) -> str:
    """Returns the recipe of a run or of the first of several seeds, from its command; empty for other rows.

    "…" says that the command has further settings, other than places and the seed.
    """
    runs = _runs(row, results)
    if not runs:
        return ""
    report = _read(runs[0] / "report.json")
    changed = re.findall(r"--config\.([\w.]+)", report["run"].get("command", ""))
    return f"`{recipe_of(report)}`" + (" …" if any(not _NO_RECIPE.match(name) for name in changed) else "")


def _broken(row: Mapping[str, Any], results: Path) -> str:
    """Returns what the verdicts on a run, or on each of several seeds, find broken; empty if nothing."""
    told = []
    for run in [] if "evaluation" in row else _runs(row, results):
        found = _read(run / "scores.json")["verdict"]
        name = f"{row['name']} (seed {run.name})" if "seeds" in row else row["name"]
        told += [found["line"].replace("Degenerate", name, 1)] if found["degenerate"] else []
    return " ".join(told)


def _runs(row: Mapping[str, Any], results: Path) -> list[Path]:
    """Returns the folder of a run, or those of several seeds; empty for other rows."""
    if "control" in row:
        return []
    if "seeds" in row:
        return [_path(row, results).with_name(seed) for seed in _read(_path(row, results))["seeds"]]
    return [_path(row, results).parent] if "run" in row else []


def _path(row: Mapping[str, Any], results: Path) -> Path:
    if "seeds" in row:
        return results / "runs" / row["seeds"] / "seeds.json"
    return results / "runs" / row["run"] / "scores.json"


def _cell(row: Mapping[str, Any], name: str, results: Path) -> str:
    if "published" in row:
        table, label = row["published"]
        value = next((part[label][name] for part in TABLES[table] if name in part.get(label, {})), None)
        return row.get("cells", {}).get(name) or ("" if value is None else format_value(name, value))
    if name.startswith("kappa:") and "control" not in row and "released" not in row:
        found = _read(_path(row, results))["empathy"].get(name.removeprefix("kappa:"))
        return "" if found is None else f"{found['kappa']:.3f}"
    if "seeds" in row:
        found = _read(_path(row, results))
        part = found["evaluations"][row["evaluation"]] if "evaluation" in row else found
        over = {**part["metrics"], **part["variants"]}.get(name)
        return f"{format_value(name, over['mean'])} ± {format_value(name, over['std'])}" if over else ""
    if "released" in row:
        group, label = row["released"]
        return _interval(name, _read(results / "comparisons.json")[group]["systems"][label]["metrics"].get(name))
    scores = _read(_path(row, results))
    if "control" in row:
        controls = scores["controls"]["controls"]
        value = controls[row["control"]]["metrics"].get(name)
        return "" if value is None else format_value(name, value)
    if name.startswith("head:"):
        value = scores["emotion_by_head"].get(name.removeprefix("head:"))
        return "" if value is None else f"{value:.2f}"
    return _interval(name, {**scores["metrics"], **scores["variants"]}.get(name))


def _interval(name: str, found: Mapping[str, float] | None) -> str:
    return "" if found is None else cell(intervals({name: found}), name)


def _pairs(table: Table, results: Path) -> list[str]:
    """Returns differences, first minus second, of pairs in `group`; bold if the corrected p-value is below .05."""
    found = _read(results / "comparisons.json")[table["group"]]
    tested = {(pair["first"], pair["second"]): pair for pair in found["pairs"]}
    names = table["metrics"]
    pairs = [tested[tuple(row["pair"])] for row in table["rows"]]
    rows = [
        [row["name"], *(_difference(name, pair["metrics"].get(name)) for name in names)]
        for row, pair in zip(table["rows"], pairs, strict=True)
    ]
    made, sizes = found["correction"], sorted({pair["rows"] for pair in pairs})  # released outputs may lack rows
    test = f" ({made['test']})" if "test" in made else ""
    note = (
        f"Differences with 95% intervals over {found['rows']['resampled']}, "
        f"{' to '.join(f'{size:,}' for size in dict.fromkeys((sizes[0], sizes[-1])))} rows. Bold: p < .05{test} after "
        f"Holm's correction over {family(made)}."
    )
    equal = [name for name in names if any("equal" in pair["metrics"].get(name, {}) for pair in pairs)]
    if equal:
        note += f" At equal length: {', '.join(metric_title(name).removesuffix(' ↑') for name in equal)}."
    return [*markdown_table(_head(table), rows), "", note]


def _head(table: Table) -> list[str]:
    return ["", *(table.get("titles", {}).get(name) or metric_title(name) for name in table["metrics"])]


def _difference(name: str, cell: Mapping[str, float] | None) -> str:
    if cell is None:
        return ""
    shown = re.sub(r"\[(\S+), (\S+)\]", r"(\1 to \2)", format_difference(name, cell)).replace("-", "−")
    return f"**{shown}**" if cell["p_holm"] < 0.05 else shown


def _agreement(table: Table, results: Path) -> list[str]:
    """Returns the empathy of runs by one `judge`, beside controls that ignore the context."""
    rows = []
    for row in table["rows"]:
        found = _read(_path(row, results))["empathy"][table["judge"]]
        weighted = [f"{part['weighted_f1']:.2f}" for part in (found, found["shuffled"], found["majority"])]
        rows.append([row["name"], *weighted, f"{found['macro_f1']:.2f}", f"{found['kappa']:.3f}"])
    head = ["", "Weighted F1 ↑", "replies shuffled", "majority level", "Macro F1 ↑", "Kappa ↑"]
    return [*markdown_table(head, rows), *_about(table, results, ())]


def _shares(table: Table, results: Path) -> list[str]:
    """Returns the shares of each mechanism's levels in percent, for the references and the runs' replies."""
    titles = ("none", "weak", "strong")
    head = ["", *(f"{name.replace('_', ' ')}: {title}" for name in MECHANISMS for title in titles)]
    found = [one["empathy"][table["judge"]] for one in _scored(table, results)]
    named = [("references", found[0], "references")]
    named += [(row["name"], one, "replies") for row, one in zip(table["rows"], found, strict=True)]
    rows = [
        [name, *(f"{one['mechanisms'][m][whose][level]:.1f}" for m in MECHANISMS for level in LEVELS)]
        for name, one, whose in named
    ]
    return markdown_table(head, rows)


def _ratings(table: Table, results: Path) -> list[str]:
    """Returns the rank correlation of `judges`, or of metrics with `references`, with human ratings."""
    found = _read(results / "judges" / "report.json")[table["of"]]
    parts = {part: title for part, title in PARTS.items() if any(part in one for one in found.values())}
    rows = []
    for name, one in found.items():
        cells = [
            f"{one[p]['spearman']:+.3f} ({one[p]['spearman_low']:+.3f} to {one[p]['spearman_high']:+.3f})"
            for p in parts
        ]
        rows.append([name, *(cell.replace("-", "−") for cell in cells)])
    return markdown_table(["Spearman", *parts.values()], rows)


def _benchmark(table: Table, results: Path) -> list[str]:
    """Returns ours beside theirs on one `machine`; a row is `[file, row of the file, title]`."""
    found = {name: _read(results / "benchmarks" / table["machine"] / f"{name}.json") for name, *_ in table["rows"]}
    rows = []
    for name, key, title in table["rows"]:
        one = found[name]["rows"][key]
        unit = f" {one['unit']}".replace(" seconds", " s")
        spread = f"{one['ratio']:.2f} ({one['lowest_ratio']:.2f}–{one['highest_ratio']:.2f})"
        # 999.5 with three digits is 1e+03
        ours, theirs = (f"{value:.3g}" if value < 999.5 else f"{value:,.0f}" for value in (one["ours"], one["theirs"]))
        rows.append([title, ours + unit, theirs + unit, spread])
    command = ", ".join(f"`{one['command']}`" for one in found.values())
    return [*markdown_table(["", "empax", table["other"], "ratio"], rows), "", f"Command: {command}"]


def figures(text: str, results: Path) -> dict[str, str]:
    """Returns names and contents of the document's SVG files."""
    tables = read_json(results / "tables.json")
    names = [name for _, name, _ in _MARKED.findall(text) if tables[name]["kind"] == "figure"]
    found = {}
    for table in (tables[name] for name in names):
        swapped = _read(results / "runs" / table["run"] / "report.json")["swaps"]
        found[table["file"]] = as_file(swaps.chart(next(iter(swapped.values()))))
    return found


def _figure(table: Table, results: Path) -> list[str]:
    """Returns a link with text `alt` to the SVG `file` of the exemplars' effects on a `run`'s likelihood."""
    del results  # the numbers are in the file
    return [f"![{table['alt']}]({table['file']})"]


def _swaps(table: Table, results: Path) -> list[str]:
    """Returns one table of the effect of exemplars in a `run`: "likelihoods", "parts", "replies" or "recall".

    With several `runs` by name instead: their effects in each, against no exemplars.
    """
    if "runs" in table:
        made = swaps.beside_none({n: _read(results / "runs" / r / "report.json") for n, r in table["runs"].items()})
        return [*markdown_table(made.head, made.rows), "", made.note]
    path = results / "runs" / table["run"] / "report.json"
    parts = next((swaps.by_part(found) for found in _read(path)["swaps"].values()), {})
    if not (made := parts.get(table["part"])):
        raise DataError(f"{path} has no {table['part']} of swapped exemplars; its recipe needs a stage 'swaps'.")
    return [*markdown_table(made.head, made.rows), "", made.note]


def _weights(table: Table, results: Path) -> list[str]:
    """Returns the results of `tools.neighbours`: likelihoods by weight and temperature; the best one is bold."""
    found = _read(results / "neighbours" / f"{table['of']}.json")
    by_temperature = found["nats_a_token"]
    best = min(nll for row in by_temperature.values() for nll in row.values())
    rows = [
        [temperature, *(f"**{nll:.4f}**" if nll == best else f"{nll:.4f}" for nll in row.values())]
        for temperature, row in by_temperature.items()
    ]
    head = ["temperature \\ weight", *next(iter(by_temperature.values()))]
    note = f"Nats a token, over {found['tokens']:,} tokens of {found['rows']:,} validation replies, of one seed."
    return [*markdown_table(head, rows), "", note]


_KINDS: Mapping[str, Callable[[Table, Path], list[str]]] = {
    "scores": _scores,
    "pairs": _pairs,
    "agreement": _agreement,
    "shares": _shares,
    "ratings": _ratings,
    "benchmark": _benchmark,
    "swaps": _swaps,
    "weights": _weights,
    "figure": _figure,
}


_ALONE = (
    "text { font: 12px system-ui, sans-serif; fill: #5d6670 } .grid { stroke: #d5d2ca } .zero { stroke: #5d6670 } "
    ".line { stroke-width: 2; stroke: #1f5fa8 } .dot { fill: #1f5fa8 }"
)
"""Styles of a standalone chart, readable on white and on black."""


def as_file(svg: str) -> str:
    """Returns a chart as the text of an SVG file."""
    named = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return named.replace(">", f"><style>{_ALONE}</style>", 1) + "\n"


@in_one_line
def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 if a table cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m tools.document", description="Fills tables.")
    parser.add_argument("documents", type=Path, nargs="+", help="Markdown files")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with runs/, tables.json, ...")
    given = parser.parse_args(argv)
    for path in map(expand, given.documents):
        text = fill(read_text(path), expand(given.results))
        write_text(path, text)
        for name, content in figures(text, expand(given.results)).items():
            write_text(path.with_name(name), content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
