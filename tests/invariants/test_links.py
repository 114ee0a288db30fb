"""Links of every document lead somewhere, and the modules that documents name are there."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *(ROOT, *(ROOT / name for name in ("docs", "docs/results", "launch", "notebooks", "results", "results/plan"))),
    *sorted((ROOT / "weights").iterdir()),
)
DOCUMENTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.md"))]

_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_MODULE = re.compile(r"\bempax(?:\.[a-z_][a-z0-9_]*)+(?![\w(-])")
_IMPORT = re.compile(r"^ *from (empax[\w.]*) import ([\w, ]+)", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name(path):
    return str(path.relative_to(ROOT))


def anchors(path):
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_relative_links_lead_to_files_and_headings(path):
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = unquote(link).partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{name(path)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(path)}: {link}"


def is_there(dotted):
    """Whether the longest beginning of a dotted path is a module that has the rest."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            rest = parts[length:]
            if not rest:
                return True
            source = file.read_text(encoding="utf-8")
            return bool(
                re.search(rf"(def|class) {rest[0]}\b|^{rest[0]}\b|import .*\b{rest[0]}\b", source, re.MULTILINE)
            )
    return False


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_modules_are_where_documents_say(path):
    text = path.read_text(encoding="utf-8")
    imported = {f"{module}.{one}" for module, names in _IMPORT.findall(text) for one in names.split(", ")}
    for dotted in sorted({*_MODULE.findall(text), *imported}):
        assert is_there(dotted), f"{name(path)}: {dotted}"


def test_what_is_not_there_is_noticed():
    assert is_there("empax.core.files")
    assert is_there("empax.core.files.DataError")
    assert not is_there("empax.core.no_such_module")
    assert not is_there("empax.core.files.no_such_name")


def test_there_are_documents():
    assert len(DOCUMENTS) > 10
