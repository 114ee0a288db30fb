"""The page on which people rate: one HTML file that needs no network and keeps its answers."""

from __future__ import annotations

import csv
import io
import json
import string
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from empax.core.files import json_text, write_together
from empax.core.text_files import visible
from empax.rating.study import Study


def page(shown: Mapping[str, Any]) -> str:
    """The page of what `Study.shown` gives."""
    template = string.Template((files("empax.rating") / "page.html").read_text(encoding="utf-8"))
    # Inside a script element: no "<" may stand there.
    return template.substitute(study=json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c"))


def sheet(shown: Mapping[str, Any]) -> str:
    """The same items as CSV, with an empty cell for each aspect."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    replies = [f"reply_{i + 1}" for i in range(len(shown["items"][0]["replies"]))]
    writer.writerow(["number", "context", *replies, *shown["aspects"]])
    for item in shown["items"]:
        turns = item["context"]
        context = "\n".join(f"{'SL'[(len(turns) - 1 - i) % 2]}: {turn}" for i, turn in enumerate(turns))
        writer.writerow([item["number"], context, *item["replies"], *("" for _ in shown["aspects"])])
    return visible(table.getvalue())


def write_study(study: Study, folder: Path) -> None:
    """Writes rate.html and sheet.csv for raters, and key.json for whoever counts: all or none."""
    shown = study.shown()
    folder.mkdir(parents=True, exist_ok=True)
    write_together(folder, {"rate.html": page(shown), "sheet.csv": sheet(shown), "key.json": json_text(study.key())})
