"""The rating page: one HTML file that needs no network and keeps its answers."""

from __future__ import annotations

import csv
import io
import json
import string
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from empax.core.files import DataError, json_text, read_json, write_together
from empax.core.text_files import visible
from empax.rating.study import STUDY_COLUMN, Study


def page(shown: Mapping[str, Any]) -> str:
    """Returns the page for the result of `Study.shown`."""
    template = string.Template((files("empax.rating") / "page.html").read_text(encoding="utf-8"))
    # A script element may not contain "<".
    return template.substitute(study=json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c"))


def sheet(shown: Mapping[str, Any]) -> str:
    """Returns the same items as CSV, with an empty cell for each aspect; the last column's header names the study."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    replies = [f"reply_{i + 1}" for i in range(len(shown["items"][0]["replies"]))]
    writer.writerow(["number", "context", *replies, *shown["aspects"], STUDY_COLUMN + shown["study"]])
    for item in shown["items"]:
        turns = item["context"]
        context = "\n".join(f"{'SL'[(len(turns) - 1 - i) % 2]}: {turn}" for i, turn in enumerate(turns))
        said = [f"L: {reply}" for reply in item["replies"]]  # not "=" or "-" first, which begin a formula
        writer.writerow([item["number"], context, *said, *("" for _ in shown["aspects"]), ""])
    return visible(table.getvalue())


def write_study(study: Study, folder: Path) -> None:
    """Writes rate.html and sheet.csv for raters, and key.json for the analysis: all or none.

    Raises:
      DataError: the folder holds another study, whose answers would lose their key.
    """
    shown, key = study.shown(), study.key()
    path = folder / "key.json"
    if path.exists() and read_json(path) != key:
        raise DataError(
            f"{folder} holds another study, whose answers cannot be counted without its {path.name}; give --output "
            "another folder, or move that study away."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_together(folder, {"rate.html": page(shown), "sheet.csv": sheet(shown), path.name: json_text(key)})
