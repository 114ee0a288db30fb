from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from empax.core import memory
from empax.core.config import ConfigError, to_settings
from empax.core.files import read_json, read_jsonl
from empax.core.manifest import read_sealed
from empax.core.tree import hash_tree, named_leaves
from empax.core.types import Mean
from empax.training import loop
from empax.training.checkpoint import Checkpointer, load_params
from empax.training.loop import Interrupted, LoopSettings, NonFiniteError
from empax.training.settings import kept_steps

TIMINGS = ("seconds", "examples_per_second", "logged_seconds")


def without_timings(row):
    return {name: value for name, value in row.items() if name not in TIMINGS}


def remains(workdir):
    """Everything a finished run leaves that does not depend on the clock."""
    stage = workdir / "tiny"
    (last,) = [path for path in (stage / "checkpoints").iterdir() if path.name == "14"]
    record = read_json(last / "COMPLETE")
    orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler(rest=ocp.PyTreeCheckpointHandler()))
    plain = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), orbax.metadata(last).item_metadata["rest"].tree
    )
    rest = orbax.restore(last, args=ocp.args.Composite(rest=ocp.args.PyTreeRestore(restore_args=plain)))["rest"]
    orbax.close()
    rows = [json.loads(line) for line in record["extra"].pop("rows")]
    return {
        "params": hash_tree(load_params(stage, "last")),
        "best": hash_tree(load_params(stage, "best")),
        "best_steps": sorted(path.name for path in (stage / "best").iterdir()),
        "rest": hash_tree(rest),
        "opt_state_leaves": len(rest["opt_state"]),
        "extra": without_timings(record["extra"]),
        "rows": [without_timings(row) for row in rows],
        "done": without_timings(read_sealed(stage / "result.json")),  # its checksum is checked; it depends on the times
        "metrics": [without_timings(row) for row in read_jsonl(workdir / "metrics.jsonl")],
    }


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    """A run that nobody stopped: (result, remains, work directory)."""
    workdir = tmp_path_factory.mktemp("unbroken")
    result = tiny.train(workdir)
    return result, remains(workdir), workdir


def test_a_run_leaves_what_it_should(unbroken, tiny):
    result, left, _ = unbroken
    assert result.step == 14
    rows = left["metrics"]
    assert [row["step"] for row in rows if row["split"] == "train"] == [4, 8, 12, 14]
    assert [row["step"] for row in rows if row["split"] == "validation"] == [2, 4, 6, 8, 10, 12, 14]
    assert {"stage", "step", "split", "loss", "accuracy", "grad_norm", "learning_rate"} == set(rows[-2])
    rates = {row["step"]: row["learning_rate"] for row in rows if row["split"] == "train"}
    assert rates[8] == pytest.approx(3e-2 * 0.5 * (1 + np.cos(np.pi * 4 / 11)))  # of the latest update, the 8th
    assert result.examples_per_second * result.seconds == pytest.approx(14 * 8)
    values = {row["step"]: row["loss"] for row in rows if row["split"] == "validation"}
    assert result.best_step == min(values, key=values.__getitem__)
    assert result.best_value == values[result.best_step]
    assert left["best"] == hash_tree(result.params)
    assert left["opt_state_leaves"] > 2 * len(named_leaves(result.params))


def test_kept_parameters_are_those_that_are_evaluated_and_change_nothing(tiny, unbroken, tmp_path):
    settings = tiny.settings(keep_every_steps=2)
    result = tiny.train(tmp_path, settings=settings)
    assert remains(tmp_path) == unbroken[1]
    kept = {int(path.name) for path in (tmp_path / "tiny" / "kept").iterdir()}
    assert kept == set(kept_steps(settings)) == {2, 4, 6, 8, 10, 12, 14}
    assert hash_tree(load_params(tmp_path / "tiny", result.best_step)) == hash_tree(result.params)
    assert len({hash_tree(load_params(tmp_path / "tiny", step)) for step in kept}) == 7
    assert list(kept_steps(tiny.settings())) == []


def test_killed_with_sigkill_and_restarted_ends_bit_identical(tiny, tmp_path):
    """Two real kills (the second just after a save began, so that it may be half-written), then a restart."""

    def run(workdir, *step):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
        return subprocess.Popen(
            [sys.executable, tiny.__file__, str(workdir), *map(str, step)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    whole = run(tmp_path / "whole")
    for step in (8, 10):
        broken = run(tmp_path / "broken", step)
        broken.communicate(timeout=300)
        assert broken.returncode == -signal.SIGKILL
        assert not (tmp_path / "broken" / "tiny" / "result.json").exists()
    for process in (run(tmp_path / "broken"), whole):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert remains(tmp_path / "broken") == remains(tmp_path / "whole")


class Stopped(BaseException):
    pass


@pytest.fixture
def train_to(tiny, monkeypatch):
    """`tiny.train` that ends as by a kill once so many updates have been made."""

    def stop():
        raise Stopped

    def train(step, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "ProgressBar", tiny.stop_at(step, stop))
            with pytest.raises(Stopped):
                tiny.train(*args, **options)

    return train


def test_damaged_newest_checkpoint_falls_back_and_ends_bit_identical(tiny, train_to, tmp_path, unbroken, caplog):
    train_to(10, tmp_path)
    newest = tmp_path / "tiny" / "checkpoints" / "9"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    with caplog.at_level("WARNING"):
        tiny.train(tmp_path)
    assert "checkpoints/9 is damaged" in caplog.text
    assert remains(tmp_path) == unbroken[1]


def test_interrupted_run_saves_leaves_and_goes_on(tiny, tmp_path, monkeypatch, unbroken):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(loop, "ProgressBar", tiny.stop_at(7, lambda: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(Interrupted, match="after step 7") as stopped:
        tiny.train(tmp_path)
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "tiny" / "checkpoints" / "7" / "COMPLETE").exists()
    monkeypatch.undo()
    tiny.train(tmp_path)
    assert remains(tmp_path) == unbroken[1]


def test_a_signal_in_the_last_step_ends_the_run_before_the_next_stage(tiny, tmp_path, monkeypatch, unbroken):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(loop, "ProgressBar", tiny.stop_at(14, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Interrupted, match="saved after its last step; run again"):
        tiny.train(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "tiny" / "result.json").exists()
    monkeypatch.undo()
    tiny.train(tmp_path)
    assert remains(tmp_path) == unbroken[1]


def test_finished_stage_is_read_from_disk(tiny, unbroken):
    first, _, workdir = unbroken

    class Refusing(tiny.TinyTask):
        def init(self, rng, batch):
            raise AssertionError("a finished stage must not start again")

    again = tiny.train(workdir, task=Refusing())
    assert hash_tree(again.params) == hash_tree(first.params)
    assert dataclasses.replace(again, params=None) == dataclasses.replace(first, params=None)


def test_early_stopping_counts_evaluations_without_improvement(tiny, tmp_path):
    # accuracy "min" cannot keep improving while the task is learned
    settings = tiny.settings(steps=40, patience=2, best_metric="accuracy", eval_every_steps=1, refresh_every_steps=0)
    result = tiny.train(tmp_path, settings=settings)
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    values = [row["accuracy"] for row in rows if row["split"] == "validation"]
    assert result.step < 40
    assert max(row["step"] for row in rows if row["split"] == "train") == result.step  # also between two rows
    assert result.best_value == min(values)
    assert result.best_step == 1 + values.index(min(values))
    assert result.step == result.best_step + 2
    assert len(values) == result.step


def test_best_mode_max(tiny, tmp_path):
    result = tiny.train(tmp_path, settings=tiny.settings(steps=6, best_metric="accuracy", best_mode="max"))
    values = [row["accuracy"] for row in read_jsonl(tmp_path / "metrics.jsonl") if row["split"] == "validation"]
    assert result.best_value == max(values)


@pytest.mark.parametrize("changes", [{"validation": None}, {"settings": {"best_metric": None, "patience": None}}])
def test_unjudged_the_last_parameters_count_and_the_end_comes_before_the_stage_is_done(tiny, tmp_path, changes):
    calls = []

    def on_end(step, params):
        assert not (tmp_path / "tiny" / "result.json").exists()
        calls.append((step, hash_tree(params)))

    plain = dataclasses.replace(tiny.settings().optimizer, ema_decay=0.0)
    settings = tiny.settings(steps=4, optimizer=plain, **changes.get("settings", {}))
    result = tiny.train(tmp_path, **{**changes, "settings": settings}, on_end=on_end)
    assert calls == [(4, hash_tree(result.params))]
    assert result.best_value is None
    assert result.best_step == 4
    assert hash_tree(result.params) == hash_tree(load_params(tmp_path / "tiny", "last"))


def watch_updates(monkeypatch, events, event):
    """Notes `event(batch)` of every update."""
    make = loop.make_programs

    def watched(*args, **options):
        programs = make(*args, **options)

        class Watched:
            def __call__(self, state, frozen, batch):
                events.append(event(batch))
                return programs.train(state, frozen, batch)

            def __getattr__(self, name):
                return getattr(programs.train, name)

        return dataclasses.replace(programs, train=Watched())

    monkeypatch.setattr(loop, "make_programs", watched)


@pytest.mark.parametrize("buckets", [(6,), (4, 6)])
def test_freed_memory_is_given_back_around_compiling_and_where_the_shape_changes(tiny, tmp_path, monkeypatch, buckets):
    events: list[int | str] = []
    watch_updates(monkeypatch, events, lambda batch: batch.source.shape[1])
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda **_: events.append("given back"))
    monkeypatch.setattr(memory.HostMemory, "_TIDY_SECONDS", 1e9)
    settings = tiny.settings(steps=12, buckets=buckets, patience=None, refresh_every_steps=0, checkpoint_every_steps=12)
    tiny.train(tmp_path, validation=None, settings=settings)
    lengths = [event for event in events if event != "given back"]
    assert set(lengths) == set(buckets)
    expected, seen, compiled = [], set(), False
    for last, length in zip([None, *lengths], lengths, strict=False):
        new = length not in seen
        expected += ["given back"] * (new or compiled or length != last) + [length]
        compiled = new
        seen.add(length)
    assert events == expected


def test_no_update_runs_beside_a_save_in_main_memory(tiny, tmp_path, monkeypatch):
    events: list[str] = []
    save, finish = Checkpointer.save, Checkpointer._finish

    def saves(*args):
        events.append("save")
        save(*args)

    def finishes(*args):
        time.sleep(0.1)
        finish(*args)
        events.append("saved")

    watch_updates(monkeypatch, events, lambda batch: "update")
    monkeypatch.setattr(Checkpointer, "save", saves)
    monkeypatch.setattr(Checkpointer, "_finish", finishes)
    settings = tiny.settings(steps=4, checkpoint_every_steps=1, patience=None, refresh_every_steps=0)
    tiny.train(tmp_path, validation=None, settings=settings)
    assert events[:12] == ["update", "save", "saved"] * 4


def test_the_running_mean_is_what_counts(tiny, tmp_path):
    constant = dataclasses.replace(tiny.settings().optimizer, schedule="constant")
    runs = [
        tiny.train(tmp_path / str(steps), validation=None, settings=tiny.settings(steps=steps, optimizer=constant))
        for steps in (1, 2)
    ]
    first, last = (named_leaves(load_params(tmp_path / str(steps) / "tiny", "last")) for steps in (1, 2))
    for name, mean in named_leaves(runs[1].params).items():
        np.testing.assert_allclose(named_leaves(runs[0].params)[name], first[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(mean, (0.7 * first[name] + last[name]) / 1.7, rtol=1e-5, atol=1e-7)


@dataclasses.dataclass(frozen=True)
class GoesWrong:
    """Delegates to `task`; the loss is NaN once the learned table has moved far enough."""

    task: object
    limit: float

    def init(self, rng, batch):
        return {**self.task.init(rng, batch), "counter": jnp.zeros(1)}

    def loss(self, params, frozen, batch, rng, *, train):
        loss, metrics = self.task.loss(params, frozen, batch, rng, train=train)
        # The counter's gradient is the constant 1, so Adam moves it by one learning rate per update.
        wrong = jnp.where(params["counter"][0] < -self.limit, jnp.nan, 0.0)
        total = loss.total + loss.weight * (params["counter"][0] + wrong)
        return Mean(total=total, weight=loss.weight), metrics


def test_non_finite_loss_stops_names_step_and_metric_and_keeps_the_good_checkpoint(tiny, tmp_path):
    optimizer = dataclasses.replace(tiny.settings().optimizer, learning_rate=0.1, warmup_steps=0, schedule="constant",
                                    groups=(), weight_decay=0.0)  # fmt: skip
    settings = tiny.settings(eval_every_steps=100, optimizer=optimizer, log_every_steps=100)
    with pytest.raises(NonFiniteError, match=r"tiny: loss is not finite at step 6; .* again with --redo=tiny,"):
        # after 5 updates the counter stands at -0.5
        tiny.train(tmp_path, task=GoesWrong(tiny.TinyTask(), limit=0.45), settings=settings)
    assert [path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()] == ["3"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(load_params(tmp_path / "tiny", "last")))


@pytest.mark.multidevice
def test_eight_devices_give_the_loss_curve_of_one(tiny, tmp_path):
    curves = []
    for count in (1, 8):
        workdir = tmp_path / str(count)
        mesh = loop.make_mesh(devices=jax.devices()[:count])
        tiny.train(
            workdir,
            task=tiny.TinyTask(),
            mesh=mesh,
            settings=tiny.settings(steps=8, eval_batch_size=8, log_every_steps=1, refresh_every_steps=0),
        )
        curves.append([row["loss"] for row in read_jsonl(workdir / "metrics.jsonl") if row["split"] == "train"])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    assert curves[0][-1] < curves[0][0]


def test_evaluation_is_the_mean_over_all_examples_whatever_the_filler(tiny, tmp_path):
    """10 examples in batches of 4 leave filler rows; one batch of 10 leaves none."""
    losses = []
    for size in (4, 10):
        settings = tiny.settings(steps=1, eval_batch_size=size, max_eval_examples=None)
        losses.append(tiny.train(tmp_path / str(size), settings=settings).best_value)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_initial_parameters_are_loaded(tiny, tmp_path):
    settings = tiny.settings(steps=1, optimizer=dataclasses.replace(tiny.settings().optimizer, learning_rate=0.0))

    def initial(params):
        return jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), params)

    result = tiny.train(tmp_path, settings=settings, initial=initial)
    assert all((leaf == 0.5).all() for leaf in jax.tree.leaves(result.params))
    with pytest.raises(ValueError, match="in names, shapes or types"):
        tiny.train(tmp_path / "other", settings=settings, initial=lambda params: {**params, "more": np.zeros(1)})


@pytest.mark.slow
def test_a_profile_is_a_trace_and_changes_nothing(tiny, tmp_path, caplog, unbroken):
    caplog.set_level(logging.INFO, logger="empax")
    found = tiny.train(tmp_path, profile=tmp_path / "profile")
    assert hash_tree(found.params) == hash_tree(unbroken[0].params)
    assert list((tmp_path / "profile").rglob("*.trace.json.gz"))
    assert f"a trace of some updates is in {tmp_path / 'profile'}" in caplog.text


def test_refresh_is_called_before_its_step_and_replayed_between(tiny, train_to, tmp_path):
    calls = []

    def on_refresh(step, params):
        calls.append((step, params is not None))

    options = {"on_refresh": on_refresh, "settings": tiny.settings(steps=11)}
    train_to(8, tmp_path, **options)
    assert calls == [(5, True)]
    calls.clear()
    tiny.train(tmp_path, **options)  # from the checkpoint after update 6
    assert calls == [(5, False), (10, True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 3}, r"batch_size = 8 is not divisible by accumulate \* minibatches = 3 \* 1"),
        ({"accumulate": 4, "minibatches": 4}, r"is not divisible by accumulate \* minibatches = 4 \* 4"),
        ({"patience": 3, "best_metric": None}, "patience needs a best_metric to judge by"),
    ],
)
def test_settings_refuse(changes, message):
    values = {"steps": 3, "batch_size": 8, "buckets": [8], **changes}
    with pytest.raises(ConfigError, match=message):
        to_settings(LoopSettings, values, where="config.loop")


def test_settings_that_do_not_fit(tiny, tmp_path):
    with pytest.raises(ConfigError, match="best_metric = 'bleu' is not a metric of tiny; it has accuracy, loss"):
        tiny.train(tmp_path / "a", settings=tiny.settings(best_metric="bleu"))
    assert not (tmp_path / "metrics.jsonl").exists()  # before the first update
    with pytest.raises(ConfigError, match="eval_batch_size = 4 cannot be split over 8 devices"):
        tiny.train(tmp_path / "b", mesh=loop.make_mesh())
    with pytest.raises(ConfigError, match="nothing to refresh"):
        tiny.train(tmp_path / "c", on_refresh=None)
    with pytest.raises(ConfigError, match="there are no examples"):
        tiny.train(tmp_path / "d", validation=tiny.TinyExamples(0))
