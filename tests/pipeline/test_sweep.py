"""Sweeps: which runs there are, what is refused before any, and what they say together."""

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy import stats

from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, write_json
from empax.core.manifest import read_done, write_config, write_sealed
from empax.pipeline import sweep
from empax.reporting import sweeps
from tests.own_corpus import write_own_corpus

RECIPE = "classic:transformer,tiny"
STEPS = {"generator.steps": ["2", "3"]}


def made(tmp_path, grid=STEPS, seeds=2, **overrides):
    return sweep.make_runs(RECIPE, grid, seeds, overrides, tmp_path)


def pretend(runs, calls, fails=()):
    """In place of a run: leaves what the table reads, a BLEU-1 that seed and steps tell, or fails."""
    by_folder = {str(run.folder): run for run in runs}

    def execute(flags):
        calls.append(list(flags))
        run = by_folder[next(flag for flag in flags if flag.startswith("--workdir=")).removeprefix("--workdir=")]
        if run.folder.parent.name + f"/{run.seed}" in fails:
            return 2
        files, steps = WorkDir(run.folder), run.plan.stages["generator"].loop.steps
        for name in run.plan.stages:
            write_sealed(files.done(name), {"files": {}, "best_value": 3.0 / steps})
        write_config(files, run.plan.config, {})
        value = 10.0 + run.seed + steps * (1.0 + 0.5 * run.seed)
        write_json(run.folder / "report.json", {"metrics": {"bleu_1": {"value": value, "low": 1.0, "high": 30.0}}})
        return 0

    return execute


def folders(runs):
    arms = {}
    for run in runs:
        if run.is_finished():
            arms.setdefault(run.arm, {})[run.seed] = run.folder
    return arms


def test_a_grid_is_read_and_its_mistakes_are_named():
    assert sweep.read_grid(["a.b=1,2", "config.c=[1,2],(3, 4),x"]) == {"a.b": ["1", "2"], "c": ["[1,2]", "(3, 4)", "x"]}
    for words, said in [
        (["steps"], "--grid=steps: write --grid SETTING=VALUE"),
        (["a.b=1,,2"], "--grid=a.b=1,,2: write --grid SETTING=VALUE"),
        (["a.b=1", "a.b=2"], "a.b is also in another --grid"),
        (["a.b=1,2,1"], "1 is listed twice; leave one out"),
        (["seed=1,2"], "write --seeds=NUMBER"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(said)):
            sweep.read_grid(words)


def test_every_run_has_its_settings_its_seed_and_a_folder(tmp_path):
    runs = made(tmp_path, {**STEPS, "data.dir": ["", "a b/c"][1:]})
    assert [(run.seed, run.plan.seed, run.plan.stages["generator"].loop.steps) for run in runs] == [
        (0, 0, 2), (1, 1, 2), (0, 0, 3), (1, 1, 3),
    ]  # fmt: skip
    assert len({run.folder for run in runs}) == 4
    assert all(run.folder.parent.parent == tmp_path and run.plan.data.dir == "a b/c" for run in runs)
    assert "--config.generator.steps=3" in runs[2].flags
    assert "--config.seed=1" in runs[1].flags
    assert [run.seed for run in made(tmp_path, {}, 3, seed="5")] == [5, 6, 7]
    assert {run.arm for run in made(tmp_path, {}, 3)} == {"recipe"}
    alike = made(tmp_path, {"data.dir": ["a b", "a-b", "x" * 300, "x" * 301]}, 1)
    assert len({run.folder for run in alike}) == 4
    assert max(len(run.folder.parent.name) for run in alike) < 150


@pytest.mark.parametrize(
    ("grid", "overrides", "said"),
    [
        ({"generator.stps": ["2"]}, {}, "config.generator.stps is not a setting"),
        ({"genrator.steps": ["2"]}, {}, "config.genrator is not a section of this recipe. Did you mean 'generator'?"),
        ({"generator.steps": ["2", "x"]}, {}, "config.generator.steps = 'x' does not fit: it must be int"),
        (STEPS, {"generator.steps": "4"}, "--config.generator.steps=4 and --grid set the same path; leave one out."),
        (
            {"generator.steps": ["2", "0x2"]},
            {},
            "generator.steps=2 and generator.steps=0x2 are the same run; leave one out",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name_before_any_run(grid, overrides, said, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        made(tmp_path, grid, 1, **overrides)
    assert not list(tmp_path.iterdir())


def test_what_a_stage_knows_to_be_wrong_is_found_once_an_arm(tmp_path):
    runs = made(tmp_path, {"report.peers": ["nowhere"]})
    (problem,) = sweep.problems(runs)
    assert "nowhere" in str(problem)
    assert not list(sweep.problems(made(tmp_path)))
    sweep.make(runs[:1], pretend(runs, []))  # the other seed is checked all the same
    assert list(map(str, sweep.problems(runs))) == [str(problem)]


def test_finished_runs_are_not_made_again_and_a_failed_one_is(tmp_path):
    runs, calls = made(tmp_path), []
    failed = sweep.make(runs, pretend(runs, calls, fails=["generator.steps=2/1"]))
    assert (list(failed), list(failed.values())) == ([str(runs[1].folder)], [2])
    assert len(calls) == 4
    assert "0 (finished), 1; " in sweep.describe(runs, tmp_path)
    more = made(tmp_path, {"generator.steps": ["2", "3", "4"]})
    calls.clear()
    assert not sweep.make(more, pretend(more, calls))
    assert [f"{call[1]}" for call in calls] == [f"--workdir={more[i].folder}" for i in (1, 4, 5)]
    other = made(tmp_path, **{"generator.batch_size": "4"})
    assert not any(run.is_finished() for run in other)
    refused = list(map(str, sweep.problems(other)))  # before any of them runs
    assert len(refused) == len(other)
    for run, said in zip(other, refused, strict=True):
        assert f"{run.folder} was made with another config (config.generator.batch_size: " in said
        assert "A sweep takes no --redo" in said
    assert not list(sweep.problems(made(tmp_path, {"generator.steps": ["4", "5"]})))


def test_a_run_on_another_corpus_is_not_finished_and_two_corpora_are_two_arms(tmp_path):
    places = [write_own_corpus(tmp_path / name, every) for name, every in (("a", 1), ("b", 2), ("copy", 1))]
    a, b, copy = map(str, places)

    def arms(*folders, **values):
        grid = {"data.dir": folders} if folders else {}
        return sweep.make_runs(RECIPE, grid, 1, {"data.name": "jsonl", **values}, tmp_path / "sweep")

    assert len({run.folder for run in arms(a, b)}) == 2
    (run,) = arms(**{"data.dir": a})
    sweep.make([run], pretend([run], []))
    done = read_done(run.folder / "prepare")
    inputs = {what: dataclasses.asdict(one) for what, one in run.inputs["prepare"].items()}
    write_sealed(WorkDir(run.folder).done("prepare"), {**done, "inputs": inputs})
    assert run.is_finished()
    assert arms(**{"data.dir": copy})[0].is_finished()
    assert not arms(**{"data.dir": b})[0].is_finished()


def test_a_sweep_ends_where_somebody_stops_it(tmp_path):
    runs, calls = made(tmp_path), []
    assert sweep.make(runs, lambda flags: calls.append(flags) or 130) == {str(runs[0].folder): 130}
    assert len(calls) == 1


def test_the_table_has_means_over_seeds_and_differences_seed_by_seed(tmp_path):
    runs = made(tmp_path, seeds=3)
    sweep.make(runs, pretend(runs, []))
    found = sweeps.summarize(folders(runs))
    two, three = (found["arms"][f"generator.steps={n}"]["metrics"]["bleu_1"] for n in (2, 3))
    assert two["values"] == [12.0, 14.0, 16.0]
    low, high = stats.t.interval(0.95, df=2, loc=14.0, scale=stats.sem(two["values"]))
    assert (two["mean"], two["low"], two["high"]) == pytest.approx((14.0, low, high))
    gained = np.subtract(three["values"], two["values"])
    low, high = stats.t.interval(0.95, df=2, loc=gained.mean(), scale=stats.sem(gained))
    difference = found["differences"]["generator.steps=3"]["bleu_1"]
    assert (difference["mean"], difference["low"], difference["high"]) == pytest.approx((1.5, low, high))
    assert found["arms"]["generator.steps=2"]["metrics"]["generator: nll"]["mean"] == 1.5
    sweeps.write(found, tmp_path)
    assert read_json(tmp_path / "sweep.json") == json.loads(json.dumps(found))
    page, said = (tmp_path / "sweep.md").read_text(), sweeps.text(found)
    assert "| bleu_1 | 14.00 ± 2.00 [9.03, 18.97] | 15.50 ± 2.50 [9.29, 21.71] |" in page
    assert "| bleu_1 | +1.50 [+0.26, +2.74] |" in page
    assert "14.00 ± 2.00 [9.03, 18.97]" in said
    one = sweeps.summarize({arm: {0: by_seed[0]} for arm, by_seed in folders(runs).items()})
    assert not one["differences"]
    assert "12.00 [1.00, 30.00]" in sweeps.text(one)


def test_a_pattern_in_the_name_of_an_arm_is_one_cell_of_the_table(tmp_path):
    metrics = {"bleu_1": {"mean": 1.0, "values": [1.0]}}
    arms = {arm: {"workdirs": {"0": ""}, "metrics": metrics, "left_out": []} for arm in ("p=a|b", "p=c")}
    sweeps.write({"arms": arms, "differences": {}, "other_rows": {}}, tmp_path)
    page = (tmp_path / "sweep.md").read_text()
    assert r"|  | p=a\|b (1 seed) | p=c (1 seed) |" in page


def test_arms_over_other_test_rows_are_not_subtracted(tmp_path):
    runs = made(tmp_path)
    sweep.make(runs, pretend(runs, []))
    for run in runs:
        report = read_json(run.folder / "report.json")
        steps = run.plan.stages["generator"].loop.steps
        write_json(run.folder / "report.json", {**report, "rows": {"rows": 9, "sha256": f"{steps}a"}})
    found = sweeps.summarize(folders(runs))
    assert set(found["differences"]["generator.steps=3"]) == {"generator: nll"}  # of validation rows
    said = "generator.steps=3 is over other test rows than generator.steps=2 (rows.sha256: '2a' there, '3a' here), so"
    assert said in sweeps.text(found)
    one = sweeps.summarize({arm: {0: by_seed[0]} for arm, by_seed in folders(runs).items()})
    assert said in sweeps.text(one)


def test_the_command_refuses_before_any_run(command, tmp_path):
    here = (RECIPE, "--seeds", "2", f"--workdir={tmp_path / 'sweep'}")
    wrong = command("-m", "empax", "sweep", *here, "--grid=generator.stps=2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: config.generator.stps is not a setting")
    assert not (tmp_path / "sweep").exists()


def test_with_a_gpu_all_runs_are_sized_for_it(command, tmp_path):
    words = ["empax", "sweep", "classic:cem", "--mode=plan", f"--workdir={tmp_path}"]
    program = "import os, sys; os.environ['JAX_PLATFORMS'] = 'cuda'; from empax import __main__"
    planned = command("-c", f"{program}; sys.argv = {words}; __main__.main()")
    assert planned.stdout.startswith(f"classic:cem,machine=gpu: 1 run (1 arm, 1 seed) in {tmp_path}"), planned.stderr


@pytest.mark.slow
def test_a_sweep_runs_shares_what_is_alike_and_is_not_made_again(command, tmp_path):
    words = (RECIPE, "--grid", "generator.steps=1,2", "--seeds=2", f"--workdir={tmp_path}")
    words = ("-m", "empax", "sweep", *words, "--config.report.bootstrap_samples=20")
    planned = command(*words, "--mode=plan")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith(f"{RECIPE}: 4 runs (2 arms, 2 seeds) in {tmp_path}, 0 finished:")
    assert not list(tmp_path.iterdir())
    ran = command(*words)
    assert ran.returncode == 0, ran.stderr[-3000:]
    runs = [read_json(path) for path in sorted(tmp_path.glob("*/*/run.json"))]
    assert [run["seed"] for run in runs] == [0, 1, 0, 1]
    assert ["prepare" in run.get("reused", {}).get("stages", ()) for run in runs] == [False, True, True, True]
    assert "± " in (tmp_path / "sweep.md").read_text()
    again = command(*words)
    assert "4 finished:" in again.stdout
    assert "[1 of 4]" in ran.stdout
    assert "[1 of 4]" not in again.stdout
    assert again.stdout.splitlines()[-40:-2] == ran.stdout.splitlines()[-40:-2]
