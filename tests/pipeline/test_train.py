"""A training stage on a corpus of somebody's own: as many steps as its rows allow."""

import importlib.util
import logging
import types

import pytest

from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.settings import RunOptions
from empax.core.system import Assembly, RunContext
from empax.pipeline import train
from empax.training.settings import LoopSettings
from tests.plans import plan_of

LOOP = LoopSettings(steps=1000, batch_size=16, buckets=(32,))


class ReachedError(Exception):
    """Raised in the place of training, with its settings."""


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        ({"name": "jsonl"}, 250),
        ({"name": "jsonl", "most_passes": 2}, 50),
        ({"name": "jsonl", "most_passes": 0}, 1000),
        ({"name": "sample"}, 1000),
    ],
)
def test_steps_follow_the_size_of_an_own_corpus_and_a_line_says_so(data, steps, monkeypatch, caplog, tmp_path):
    def fit(*args, settings, **options):
        raise ReachedError(settings)

    stage = RunContext(WorkDir(tmp_path), plan_of({"seed": 3, "data": data}), "generator")
    spec = types.SimpleNamespace(build=lambda settings, run: Assembly(None, range(400), None))
    told = []
    monkeypatch.setattr(train, "fit", fit)
    monkeypatch.setattr(train, "spec_of", lambda run: (spec, LOOP))
    monkeypatch.setattr(train, "warn_of_cut", lambda *args: told.append(args))
    with caplog.at_level(logging.WARNING, "empax"), pytest.raises(ReachedError) as reached:
        train.run(None, stage)
    (found,) = reached.value.args
    assert (found.steps, found.seed) == (steps, 3)
    said = "generator: 1000 steps would pass 40 times over 400 rows"
    assert (said in caplog.text) == (steps < 1000)
    assert told == ([(range(400), "generator")] if data["name"] == "jsonl" else [])


def test_a_tracker_without_its_package_is_refused_before_any_work(monkeypatch):
    options = RunOptions.of({"sinks": ["wandb"]})
    stage = types.SimpleNamespace(plan=types.SimpleNamespace(options=options), stage="generator")
    spec = types.SimpleNamespace(check=lambda settings, run: None)
    monkeypatch.setattr(train, "spec_of", lambda run: (spec, LOOP))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        train.check(None, stage)
    stage.plan.options = RunOptions.of({})
    train.check(None, stage)


@pytest.mark.parametrize(("rows", "says"), [(16_000, False), (20_000, True)])
def test_a_line_says_how_much_of_a_large_corpus_is_read(rows, says, caplog, tmp_path):
    stage = RunContext(WorkDir(tmp_path), plan_of({"data": {"name": "jsonl"}}), "generator")
    with caplog.at_level(logging.INFO, "empax"):
        assert train._of_own_size(LOOP, rows, stage) == LOOP
    said = "generator: 1000 steps read 16000 of 20000 rows; --config.generator.steps=1250 reads all of them once."
    assert (said in caplog.text) == says
