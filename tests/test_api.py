"""Scores, comparisons and runs from Python."""

import contextlib
import json
import re
import shlex
import sys

import jax
import numpy as np
import pandas as pd
import pytest

import empax
from empax import api
from empax.core.recipe import load_recipe, split_overrides
from empax.evaluation.scoring import ScoringSettings

ROWS = [
    {"id": f"d{i}#2", "context": ["my dog died"], "response": said, "reference": "i am so sorry to hear that"}
    for i, said in enumerate(["i am sorry", "that is great", "so sorry to hear that", "oh no"] * 5)
]


def test_rows_are_scored_from_mappings_predictions_and_files(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    one, two = (empax.score(rows, settings=ScoringSettings(bootstrap_samples=20)) for rows in (ROWS, str(file)))
    assert one == two
    assert one.counts["rows"] == 20
    with pytest.raises(empax.DataError, match="row 1: lacks 'response'"):
        empax.score([ROWS[0], {"context": ["a"], "reference": "b"}])
    file.write_text(file.read_text() + "{}\n")
    with pytest.raises(empax.DataError, match="line 21: lacks"):
        empax.score(file)


def test_rows_may_be_a_table_a_generator_and_turns_a_tuple():
    settings = ScoringSettings(bootstrap_samples=20)
    wanted = empax.score(ROWS, settings=settings)
    table = pd.DataFrame(ROWS)
    table["emotion"] = [None, *["sad"] * 19]
    arrays = [row | {"context": np.array(row["context"])} for row in ROWS]
    for rows in (table, (row for row in ROWS), [row | {"context": tuple(row["context"])} for row in ROWS], arrays):
        assert empax.score(rows, settings=settings).metrics["bleu_2"] == wanted.metrics["bleu_2"]


def test_rows_may_have_numbers_of_numpy():
    """As `TextModel.nll` returns them."""
    settings = ScoringSettings(bootstrap_samples=20)
    nll, num_tokens = np.arange(20) + 0.5, np.arange(1, 21)
    exemplar = {"text": "i lost my cat", "score": 0.5}
    plain = [
        row | {"nll": a, "num_tokens": b, "exemplars": [exemplar]}
        for row, a, b in zip(ROWS, nll.tolist(), num_tokens.tolist(), strict=True)
    ]
    wanted = empax.score(plain, settings=settings)
    assert "perplexity" in wanted.metrics
    exemplar = exemplar | {"score": np.float32(0.5)}
    arrays = [
        row | {"nll": a, "num_tokens": b, "exemplars": [exemplar]}
        for row, a, b in zip(ROWS, nll.astype(np.float32), num_tokens, strict=True)
    ]
    noted = [row | {"notes": {name: row[name] for name in ("nll", "num_tokens")}} for row in arrays]
    noted = [{name: value for name, value in row.items() if name not in ("nll", "num_tokens")} for row in noted]
    for rows in (arrays, noted):
        assert empax.score(rows, settings=settings).metrics == wanted.metrics
    assert empax.compare({"a": arrays, "b": plain}, metrics=("perplexity",), settings=settings)["pairs"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "row 1 is a str; it must be a mapping or a Prediction"),
        (None, "row 1 is a NoneType; it must be"),
        (ROWS[0] | {"response": None}, "row 1: lacks 'response'"),
        (ROWS[0] | {"response": float("nan")}, "row 1: 'response' is of type float, must be a string"),
        (ROWS[0] | {"response": "a \ud800 b"}, "row 1: 'response' has half of a surrogate pair"),
        (ROWS[0] | {"context": ["\udc80"]}, "row 1: 'context' has half of a surrogate pair"),
    ],
)
def test_what_is_no_row_is_named(row, message):
    with pytest.raises(empax.DataError, match=message):
        empax.score([ROWS[0], row])


def test_every_two_systems_are_compared():
    other = [row | {"response": "i am so sorry"} for row in ROWS]
    found = empax.compare({"a": ROWS, "b": other, "c": ROWS[::-1]}, metrics=("bleu_2", "token_f1"))
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["pairs"][1]["metrics"]["bleu_2"]["difference"] == pytest.approx(0.0)
    assert found["pairs"][0]["metrics"]["bleu_2"]["difference"] < 0
    with pytest.raises(empax.DataError, match="at least two"):
        empax.compare({"a": ROWS})


@pytest.mark.slow
def test_a_recipe_runs_with_settings_by_path(tmp_path):
    recipe = load_recipe("reg_transformer:tiny")
    with recipe.unlocked():
        for stage in set(recipe.run) - {"prepare"}:
            del recipe[stage]
        recipe.run = ("prepare",)
    workdir = empax.run(recipe, tmp_path / "run", settings={"seed": 3})
    assert json.loads((workdir / "config.json").read_text())["seed"] == 3
    assert recipe.seed == 0
    assert (workdir / "prepare" / "DONE").is_file()
    with pytest.raises(empax.ConfigError, match="Did you mean 'prepare'"):
        empax.run(recipe, tmp_path / "other", settings={"prepar.tokenizer": 3})


def test_a_run_is_described_by_a_command_that_makes_it_whatever_script_calls(tmp_path, monkeypatch, asked):
    """Of a ConfigDict there is none."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "3"])
    monkeypatch.chdir(tmp_path)
    settings = {"seed": 3, "data.dir": "my data", "reg.passages": 2}
    empax.run("reg_transformer:tiny", "runs/a b", settings=settings, reuse="other")
    module, *words = shlex.split(asked[0][1].removeprefix("python -m "))
    assert module == "empax.main"
    rest, changes = split_overrides(words)
    assert rest == ["--config=reg_transformer:tiny", "--workdir=runs/a b", "--reuse=other"]
    assert changes == {"seed": "3", "data.dir": "my data", "reg.passages": "2"}
    empax.run(load_recipe("reg_transformer:tiny"), "runs/a")
    assert asked[1][1] == ""


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Run again with --redo=joint, which makes it anew.", 'Run again with redo=["joint"], which makes it anew.'),
        ("choose another --workdir, with --reuse=runs/a to", "choose another workdir, with reuse=runs/a to"),
        ("set --config.data.dir or EMPAX_DATA_DIR to it", 'set settings["data.dir"] or EMPAX_DATA_DIR to it'),
        ("name it with --config.data.dir=FOLDER or", 'name it with settings={"data.dir": "FOLDER"} or'),
    ],
)
def test_what_a_run_refuses_is_said_in_arguments_of_python(said, meant, tmp_path, monkeypatch):
    def refuse(*_, **more):
        raise empax.DataError(said)

    monkeypatch.setattr(api, "run_recipe", refuse)
    with pytest.raises(empax.DataError, match=re.escape(meant)):
        empax.run("reg_transformer:tiny", tmp_path / "run")


def test_a_recipe_that_is_missing_is_named_in_the_same_way_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("empax.core.recipe.has_gpu", lambda: True)
    with pytest.raises(empax.ConfigError, match=r"^recipe nowhere: there is no file nowhere\."):
        empax.run("nowhere", tmp_path / "run")


TWO = {"a": ROWS, "b": ROWS}
TINY = "reg_transformer:tiny"
REFUSED = [
    *((lambda rows=rows: empax.score(rows), "is neither a file of predictions nor") for rows in (3, None, ROWS[0])),
    (lambda: empax.compare(TWO, metrics=["nope"]), "'nope' is not one of .*bleu_1"),
    (lambda: empax.compare(TWO, metrics="bleu_2"), r"metrics is one text \('bleu_2'\)"),
    (lambda: empax.compare([ROWS, ROWS]), "systems is a list; it must map the name of each system to its rows"),
    (lambda: empax.score(ROWS, own="a:b"), r"own is one text \('a:b'\); it must be a list of names"),
    (lambda: empax.run(TINY, "run", redo="joint"), r"redo is one text \('joint'\)"),
    *((lambda wrong=wrong: empax.run(TINY, "run", settings=wrong), r"settings = .* must map paths, such as 'gen")
      for wrong in ("seed=1", [("seed", 1)], {1: 2})),
    *((lambda wrong=wrong: empax.run(wrong, "run"), r"recipe = .* must be a text or a ConfigDict")
      for wrong in (3, None, ["configs/classic.py"])),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_wrong_arguments_are_named(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(empax.ConfigError, match=message):
        call()


@pytest.fixture
def asked(monkeypatch):
    """Configs and commands of the runs that are asked for; none is made."""
    made = []
    monkeypatch.setattr(api, "run_recipe", lambda config, *_, command, **__: made.append((config, command)))
    return made


def test_a_gpu_gets_its_form_of_a_recipe_as_from_the_command_line(tmp_path, monkeypatch, asked):
    monkeypatch.setattr("empax.core.recipe.has_gpu", lambda: True)
    monkeypatch.setattr(api, "check_gpu", lambda recipe: None)
    empax.run("reg_transformer:apart", tmp_path / "run")
    (config, command), wanted = asked[0], load_recipe("reg_transformer:apart,machine=gpu")
    assert config["generator"] == api.plain(wanted)["generator"]
    assert "--config=reg_transformer:apart,machine=gpu" in command


def test_a_gpu_that_jax_passes_over_is_named_before_anything_runs(tmp_path, monkeypatch, asked):
    monkeypatch.setattr("empax.core.recipe.has_gpu", lambda: True)
    with pytest.raises(empax.ConfigError, match=r"^recipe classic:moel,machine=gpu was chosen .* computes on cpu"):
        empax.run("classic:moel", tmp_path / "run")
    assert asked == []
    empax.run("classic:moel,machine=gpu", tmp_path / "run")  # asked for by name
    assert len(asked) == 1


@pytest.mark.parametrize("begin", ["run", "Session"])
def test_programs_are_kept_for_other_processes_unless_the_user_keeps_them_elsewhere(
    begin, tmp_path, monkeypatch, asked
):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path))
    try:
        for own, kept in ((None, str(tmp_path / "xla")), ("elsewhere", "elsewhere")):
            jax.config.update(names[0], own)
            if begin == "run":
                empax.run(TINY, tmp_path / "run")
            else:
                with contextlib.suppress(empax.ConfigError):  # there is no run
                    empax.Session.load(tmp_path / "nowhere")
            assert getattr(jax.config, names[0]) == kept
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


def test_a_recipe_may_be_a_plain_mapping(tmp_path, asked):
    recipe = load_recipe("configs/reg_transformer.py:tiny")
    for one in (recipe, api.plain(recipe)):
        empax.run(one, tmp_path / "run", settings={"generator.steps": 3})
    assert asked[0] == asked[1]
    assert asked[0][0]["generator"]["steps"] == 3
    assert recipe.generator.steps != 3
