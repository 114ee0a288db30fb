"""The command line of a run: help at once, errors that name the mistake, exit codes."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from empax.core.config import ConfigError
from empax.planning import plan

TINY = "--config=configs/reg_transformer.py:tiny"


@pytest.mark.parametrize("module", ["empax.main", "empax.evaluate"])
def test_help_is_there_before_any_array_library(module, command):
    heavy = {"jax", "numpy", "flax", "nltk", "scann", "tensorflow_datasets"}
    result = command("-c", f"import sys, {module}; assert not {heavy} & set(sys.modules)")
    assert result.returncode == 0, result.stderr


def test_a_run_brings_tfds_only_where_it_prepares_a_corpus(command):
    stages = "index, prepare, swaps, train"
    result = command(
        "-c", f"import sys; from empax.pipeline import {stages}; assert 'tensorflow_datasets' not in sys.modules"
    )
    assert result.returncode == 0, result.stderr


def test_a_plan_says_in_words_of_the_settings_what_a_model_would_refuse(monkeypatch, capsys, tmp_path):
    said = ["generator.buckets = 320 are too many", "generator.buckets = 320 are too many"]

    def refuse(_):
        raise ConfigError("320 tokens, but max_positions = 64")

    monkeypatch.setattr(plan, "describe", refuse)
    monkeypatch.setattr(plan, "problems_of_plan", lambda *_: map(ConfigError, said))
    made: Any = None
    assert plan.show(made, tmp_path) == 2
    assert capsys.readouterr() == ("", f"error: {said[0]}\n")
    said.clear()
    with pytest.raises(ConfigError, match="320 tokens"):
        plan.show(made, tmp_path)
    monkeypatch.setattr(plan, "describe", str)
    assert plan.show(made, tmp_path) == 0


def test_what_the_user_can_fix_is_one_line_and_exit_code_2(command_lines, finished, tmp_path):
    here = f"--workdir={tmp_path / 'run'}"
    real = "--config=configs/reg_transformer.py"
    taken = tmp_path / "taken"
    taken.touch()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "empatheticdialogues.tar.gz").write_bytes(b"\x1f\x8b\x08\x00 not the whole archive")
    damaged = tmp_path / "damaged"
    shutil.copytree(finished, damaged)
    (damaged / "evaluate" / "DONE").unlink()
    best = max((damaged / "joint" / "best").iterdir(), key=lambda path: int(path.name))
    largest = max((file for file in best.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-5])
    cases = [
        ([here], "--config=FILE.py is needed"),
        ([TINY, here, "more"], "what is 'more'?"),
        ([TINY, here, "--mode=plan", "--reuse=runs/x"], "a plan copies no earlier stages; leave out --reuse"),
        ([f"{TINY}y", here], "'tinyy' is unknown; it takes no_retrieval, no_attributes, contrastive, reasons,"),
        (["--config=configs/reg_transfomer.py", here], "Did you mean 'configs/reg_transformer.py'?"),
        ([TINY, here, "--config.data.dri=x"], "config.data.dri is not a setting of DataSettings; did you mean 'dir'?"),
        ([TINY, here, "--config.joint.patience=soon"], "config.joint.patience = 'soon' is of type str; it must be int"),
        ([TINY, here, "--config.seed"], "--config.seed has no value"),
        ([real, here, f"--config.data.dir={tmp_path / 'nowhere'}"], f"{tmp_path / 'nowhere'}"),
        ([f"{real}:no_retrieval", f"{here}-2", f"--config.data.dir={broken}"], "empatheticdialogues.tar.gz"),
        ([TINY, f"--workdir={finished}", "--config.joint.steps=5"], "config.joint.steps: 4 there, 5 here"),
        ([TINY, f"--workdir={damaged}"], f"{largest} has {largest.stat().st_size} bytes instead of"),
        ([TINY, f"--workdir={taken}"], f"--workdir={taken} is not a folder"),
        ([TINY, f"--workdir={taken}/run"], f"--workdir={taken}/run: {taken} is not a folder"),
        ([TINY, here, "--reuse=~nobody-of-this-name/run"], "begins with the home folder of an unknown user"),
        ([TINY, here, "--reuse=~/no-run-of-this-name"], f"--reuse={Path.home() / 'no-run-of-this-name'}"),
    ]
    found = command_lines("empax.main", [words for words, _ in cases])
    for (words, message), (code, said) in zip(cases, found, strict=True):
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 2, (words, said)
        assert len(errors) == 1, (words, said)
        assert message in errors[0], (words, said)
        assert "Traceback" not in said
    assert (damaged / "predictions.jsonl").read_text() == (finished / "predictions.jsonl").read_text()


def test_on_a_gpu_the_recorded_command_names_another_recipe_and_the_same_folder(command, tmp_path):
    words = ["main", "--config=classic:moel", f"--workdir={tmp_path}/classic:moel"]
    program = (
        "import sys; from empax import main; from empax.core import recipe; from empax.pipeline import run\n"
        "recipe.has_gpu, main.check_gpu = lambda: True, print\n"
        "run.run = lambda *_, command, **__: print(command)\n"
        f"sys.argv = {words}\nmain.command_line()"
    )
    said = command("-c", program)
    expected = f"python -m empax.main --config=classic:moel,machine=gpu --workdir={tmp_path}/classic:moel"
    assert said.stdout.splitlines()[-1] == expected, said.stderr


def test_who_is_interrupted_in_a_redo_is_told_how_to_go_on(command, tmp_path):
    program = (
        "import sys; from empax import main; from empax.pipeline import run; from empax.training import loop\n"
        "def stop(*_, **__): raise loop.Interrupted('joint: stopped.', step=3)\n"
        f"run.run, sys.argv = stop, ['main', {TINY!r}, '--workdir={tmp_path}/run', '--redo=joint']\n"
        "main.command_line()"
    )
    result = command("-c", program)
    assert result.returncode == 130, result.stderr
    assert result.stderr.splitlines()[-1] == "joint: stopped. Leave out --redo=joint, which would begin anew."


@pytest.mark.parametrize("flag", ["--workdri=x", "--mode=pln"])
def test_a_mistyped_flag_fails_at_once(command, flag):
    result = command("-m", "empax.main", TINY, flag)
    assert result.returncode == 2
    assert flag.split("=")[0].lstrip("-") in result.stderr
