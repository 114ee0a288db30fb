"""Trackers beside metrics.jsonl: the same keys, no step twice, and none of them ends a training.

A stand-in takes the place of a package that is not installed; it has the calls that we make, as the package has them.
"""

import importlib.util
import itertools
import json
import sys
import types

import pytest

from empax.core.config import ConfigError
from empax.core.files import read_json
from empax.training.metrics_log import MetricsLog
from empax.training.sinks import check_sinks, open_sinks

LOGGED = [
    (2, "train", {"loss": 3.0, "mine:polite": 0.5}),
    (2, "validation", {"loss": 2.5}),
    (4, "train", {"loss": 2.0}),
    (4, "validation", {"loss": float("nan")}),
]


class Wandb:
    """Offline runs: as `wandb.init` gives them."""

    def __init__(self):
        self.points, self.finished = [], 0

    Settings = staticmethod(lambda **given: given)

    def init(self, *, project, group, name, id, resume, dir, config, settings):
        assert (project, resume, settings) == ("empax", "allow", {"console": "off"})
        assert config["steps"] == 9
        self.points.append([])
        return types.SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, values, step):
        self.points[-1].append((step, values))

    def finish(self):
        self.finished += 1


class Mlflow:
    def __init__(self):
        self.points, self.finished, self.experiments = [], 0, {}
        self.entities = types.SimpleNamespace(Metric=lambda *found: found, Param=lambda *found: found)

    def MlflowClient(self):  # noqa: N802
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = types.SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment, *, run_name, tags):
        assert (experiment, tags) == ("7", {"group": "run"})
        assert not self.points  # a stage that goes on takes the run that it has
        self.points.append([])
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="number 1"))

    def log_batch(self, run, metrics=(), params=()):
        assert run == "number 1"
        assert ("steps", "9") in params or metrics
        for name, value, milliseconds, step in metrics:
            assert milliseconds > 1e12
            self.points[-1].append((step, {name: value}))

    def set_terminated(self, run):
        self.finished += 1


class Trackio(Wandb):
    def init(self, *, project, group, name, resume, config, embed):
        assert (project, group, resume, embed) == ("empax", "run", "allow", False)
        self.points.append([])
        return types.SimpleNamespace(log=self.log, finish=self.finish)


@pytest.fixture
def stand_ins(monkeypatch):
    made = {"wandb": Wandb(), "mlflow": Mlflow(), "trackio": Trackio()}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", made["mlflow"].entities)
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return made


def train(workdir, names, *, resume_step=0, rows=LOGGED):
    stage = workdir / "generator"
    with MetricsLog(
        workdir / "metrics.jsonl", stage="generator", resume_step=resume_step,
        tensorboard=workdir / "board", trackers=open_sinks(names, stage, {"steps": 9}),
    ) as log:  # fmt: skip
        for step, split, values in rows:
            log.write(step, split, values)


def flat(points):
    return [(step, name, value) for step, values in itertools.chain(*points) for name, value in values.items()]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_gets_the_keys_of_tensorboard_and_after_a_resume_no_step_twice(name, stand_ins, tmp_path):
    tracker, workdir = stand_ins[name], tmp_path / "run"
    train(workdir, [name], rows=LOGGED[:3])  # stopped after step 4 was logged; the checkpoint is of step 2
    known = read_json(workdir / "generator" / "sinks" / "runs.json")
    train(workdir, [name], resume_step=2, rows=LOGGED[2:])
    assert read_json(workdir / "generator" / "sinks" / "runs.json") == known
    expected = [(step, f"{split}/{key}", value) for step, split, row in LOGGED for key, value in row.items()]
    assert str(flat(tracker.points)) == str(expected)  # nan is not nan
    assert tracker.finished == 2
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["split"]) for row in rows] == [(step, split) for step, split, _ in LOGGED]


@pytest.mark.parametrize("content", ["[1, 2]", "3", '{"id": ', "null"])
def test_ids_that_cannot_be_read_begin_new_runs_of_trackers(content, stand_ins, tmp_path):
    names = tmp_path / "run" / "generator" / "sinks" / "runs.json"
    names.parent.mkdir(parents=True)
    names.write_text(content)
    train(tmp_path / "run", ["wandb"])
    assert read_json(names)["id"]
    assert flat(stand_ins["wandb"].points)


def test_without_trackers_nothing_is_left_of_them(tmp_path):
    train(tmp_path / "run", [])
    assert not (tmp_path / "run" / "generator").exists()


def test_a_tracker_that_fails_ends_no_training(stand_ins, tmp_path, caplog):
    def refuse(*args, **more):
        raise OSError("no route to host")

    stand_ins["wandb"].log = refuse
    stand_ins["trackio"].init = refuse
    train(tmp_path / "run", ["wandb", "trackio", "mlflow"])
    said = [record.message for record in caplog.records if "no more metrics" in record.message]
    assert said == [
        f"{name} gets no more metrics of this stage (no route to host); they are in metrics.jsonl."
        for name in ("trackio", "wandb")
    ]
    assert len(flat(stand_ins["mlflow"].points)) == 5
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else object())
    check_sinks(["wandb", "mlflow"])
    with pytest.raises(ConfigError, match=r"trackio is not installed; pip install 'empax\[trackio\]' brings it"):
        check_sinks(["wandb", "trackio"])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_packages_themselves_take_it_offline(name, tmp_path, monkeypatch):
    """Where they are installed: they are large, and no part of what the tests need."""
    pytest.importorskip(name, exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    workdir = tmp_path / "run"
    train(workdir, [name], rows=LOGGED[:3])
    train(workdir, [name], resume_step=2, rows=LOGGED[2:])
    read = {"wandb": _of_wandb, "mlflow": _of_mlflow, "trackio": _of_trackio}[name]
    assert read(tmp_path) == [(2, 3.0), (4, 2.0)]


def _of_wandb(tmp_path):
    """Reads what `wandb sync` would send: whole records of a LevelDB log that is smaller than one of its blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((tmp_path / "run" / "generator" / "sinks").rglob("*.wandb")):
        data = path.read_bytes()
        assert len(data) < 1 << 15
        place = 7  # behind the head
        while place < len(data):
            size = int.from_bytes(data[place + 4 : place + 6], "little")
            record = Record.FromString(data[place + 7 : place + 7 + size])
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in items:
                found.append((record.history.step.num or int(items["_step"]), float(items["train/loss"])))
            place += 7 + size
    return found


def _of_mlflow(tmp_path):
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("empax").experiment_id])
    assert run.data.params["steps"] == "9"
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]


def _of_trackio(tmp_path):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("empax")
    points = SQLiteStorage.get_logs("empax", run.name)
    return [(point["step"], point["train/loss"]) for point in points if "train/loss" in point]
