"""A training stage on a corpus of somebody's own: as many steps as its rows allow."""

import importlib.util
import logging
import types
from pathlib import Path

import pytest

from empax.core.config import ConfigError
from empax.core.settings import DataSettings, RunOptions
from empax.pipeline import train
from empax.training.settings import LoopSettings

LOOP = LoopSettings(steps=1000, batch_size=16, buckets=(32,))


class ReachedError(Exception):
    """Raised in the place of training, with its settings."""


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (DataSettings(name="jsonl"), 250),
        (DataSettings(name="jsonl", most_passes=2), 50),
        (DataSettings(name="jsonl", most_passes=0), 1000),
        (DataSettings(name="sample"), 1000),
    ],
)
def test_steps_follow_the_size_of_an_own_corpus_and_a_line_says_so(data, steps, monkeypatch, caplog):
    def fit(*args, settings, **options):
        raise ReachedError(settings)

    assembly = types.SimpleNamespace(
        task=None, train=range(400), validation=None, frozen={}, initial=None, on_refresh=None, on_end=None
    )
    options = types.SimpleNamespace(mesh=types.SimpleNamespace(logical={}), profile=False, sinks=())
    stage = types.SimpleNamespace(
        plan=types.SimpleNamespace(data=data, options=options), stage="generator", seed=3, directory=Path("none"),
        files=types.SimpleNamespace(metrics=Path("none")),
    )  # fmt: skip
    spec = types.SimpleNamespace(build=lambda settings, run: assembly)
    monkeypatch.setattr(train, "fit", fit)
    monkeypatch.setattr(train, "make_mesh", lambda settings: None)
    monkeypatch.setattr(train, "spec_of", lambda run: (spec, LOOP))
    with caplog.at_level(logging.WARNING, "empax"), pytest.raises(ReachedError) as reached:
        train.run(None, stage)
    (found,) = reached.value.args
    assert (found.steps, found.seed) == (steps, 3)
    said = "generator: 1000 steps would pass 40 times over 400 rows"
    assert (said in caplog.text) == (steps < 1000)


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
    with pytest.raises(ConfigError, match=r"config\.sinks\[0\] = 'wandbe' is not allowed; it takes one of"):
        RunOptions.of({"sinks": ["wandbe"]})
