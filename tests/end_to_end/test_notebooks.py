"""Every notebook runs from its first cell to its last, in seconds, on small models."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
SMALL = {
    "lora_t5": {"MODEL": "{t5}", "EPOCHS": 1},
    "own_reward": {},
    "compare_outputs": {},
    "reg_exemplars": {"RECIPE": "quickstart:tiny"},
}


def test_each_is_listed():
    assert set(SMALL) == {path.stem for path in FOLDER.glob("*.py")}
    assert set(re.findall(r"\[(\w+)\.py\]", (FOLDER / "README.md").read_text())) == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs(name, t5, tmp_path, command):
    program = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for constant, value in SMALL[name].items():
        value = value.format(t5=t5) if isinstance(value, str) else value
        program, found = re.subn(rf"^{constant} = .*$", f"{constant} = {value!r}", program, flags=re.MULTILINE)
        assert found == 1, constant
    cells = re.split(r"^# %%(?: \[markdown\])?\n", program, flags=re.MULTILINE)
    assert len(cells) > 4
    file = tmp_path / "cells.py"
    file.write_text(f"import os; os.chdir({str(tmp_path)!r})\nimport sys; sys.path.insert(0, '.')\n{program}")
    ran = command(str(file))
    assert ran.returncode == 0, ran.stderr[-3000:]
