r"""Makes the .ipynb beside each notebooks/*.py: the same cells with their outputs.

  python -m tools.notebooks [NAME ...]
  python -m tools.notebooks --repository=https://github.com/OWNER/NAME     # once the repository has an address

The second writes the address into first cells and makes the links of notebooks/README.md open in Colab; nothing runs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
_COLAB = "https://colab.research.google.com/github"


def read(path: Path) -> nbformat.NotebookNode:
    """Reads the cells of a .py, numbered and paired with it."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(
        {
            "jupytext": {"formats": "ipynb,py:percent"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs all cells in `folder` with this copy of empax; keeps their outputs except times and the log.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
    NotebookClient(notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]


def write(path: Path) -> None:
    """Runs NAME.py and writes NAME.ipynb."""
    notebook = read(path)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def fill_in(repository: str, folder: Path = FOLDER) -> None:
    """Writes the address of the repository into first cells, and Colab links into README.md."""
    owner = repository.removeprefix("https://github.com/").removesuffix(".git").rstrip("/")
    readme = folder / "README.md"
    link = rf"[\1.ipynb]({_COLAB}/{owner}/blob/main/notebooks/\1.ipynb)"
    readme.write_text(re.sub(r"\[(\w+)\.ipynb\]\([^)]*\)", link, readme.read_text()))
    for path in sorted(folder.glob("*.py")):
        line = f'REPOSITORY = "https://github.com/{owner}"'
        path.write_text(re.sub(r'^REPOSITORY = "[^"]*"', line, path.read_text(), flags=re.MULTILINE))
        notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
        for cell, changed in zip(notebook.cells, read(path).cells, strict=True):
            cell.source = changed.source
        nbformat.write(notebook, path.with_suffix(".ipynb"))


def main(argv: Sequence[str]) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description="Makes the .ipynb of notebooks/.")
    parser.add_argument("names", nargs="*", help="notebooks to make; default all")
    parser.add_argument("--repository", default="", help="https://github.com/OWNER/NAME")
    given = parser.parse_args(argv)
    if given.repository:
        fill_in(given.repository)
        return 0
    there = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
    if unknown := [name for name in given.names if name not in there]:
        parser.error(f"there is no notebook {unknown[0]}; there are {', '.join(there)}")
    for name in given.names or there:
        write(there[name])
        print(f"wrote {there[name].with_suffix('.ipynb').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
