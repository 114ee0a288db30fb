"""What `finetune` takes and refuses, and what it says when it ends early; a model of one random layer."""

import dataclasses
import json
import logging
import os
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import empax
from empax.core.tree import named_leaves
from empax.data.batches import SequenceExamples
from empax.models.lora import LoraSettings, init_adapters
from empax.serving.finetuning import FinetuneSettings, lora_settings, working_folder
from empax.training import loop
from empax.training.accumulation import NonFiniteError
from empax.training.interruption import Interrupted
from tests.serving.models import KINDS, PAIRS, saved


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return empax.load(saved(tmp_path_factory.mktemp("llama"), "llama"))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", [kind if kind in ("llama", "t5") else pytest.param(kind, marks=slow) for kind in KINDS]
)
def test_the_first_loss_is_that_of_the_model_without_dropout(kind, tmp_path):
    model = empax.load(saved(tmp_path / "model", kind, **KINDS[kind][2]))
    found = model.nll(*zip(*PAIRS, strict=True))
    tuned = model.finetune(PAIRS, epochs=1, learning_rate=0.0, workdir=tmp_path / "run")
    assert rows_of(tmp_path / "run")[0]["nll"] == pytest.approx(np.log(found.perplexity), rel=1e-5)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), tuned.params, model.params)
    assert all(jax.tree.leaves(same)), "a learning rate of zero changes nothing"


@pytest.mark.slow
def test_dropout_that_a_checkpoint_asks_for_is_there(tmp_path):
    model = empax.load(saved(tmp_path / "model", "llama", attention_dropout=0.5))
    found = model.nll(*zip(*PAIRS, strict=True))
    model.finetune(PAIRS, epochs=1, learning_rate=0.0, workdir=tmp_path / "run")
    assert abs(rows_of(tmp_path / "run")[0]["nll"] - np.log(found.perplexity)) > 0.01


def test_rows_may_be_mappings_lists_and_what_iterates_over_them(model, tmp_path):
    """The work directory would be refused if other pairs were learnt from; numbers may be numpy's."""
    settings = {"epochs": np.int64(1), "learning_rate": np.float64(1e-3), "workdir": tmp_path}
    first = model.finetune(PAIRS, **settings).nll(*zip(*PAIRS, strict=True)).nll
    for rows in (
        [{"source": source, "target": target, "id": 3} for source, target in PAIRS],
        [[np.str_(source), target] for source, target in PAIRS],
        (pair for pair in PAIRS),
        np.array(PAIRS),
    ):
        again = model.finetune(rows, **settings).nll(*zip(*PAIRS, strict=True)).nll
        np.testing.assert_array_equal(first, again)
    other = dataclasses.replace(
        model, model=model.model.clone(config=dataclasses.replace(model.model.config, dtype="bfloat16"))
    )
    with pytest.raises(empax.ConfigError, match="holds a fine-tuning on other pairs, weights"):
        other.finetune(PAIRS, **settings)


def test_targets_that_begin_with_another_forced_token_are_another_fine_tuning(tmp_path, monkeypatch):
    bart = empax.load(saved(tmp_path / "bart", "bart", **KINDS["bart"][2]))
    monkeypatch.setattr(loop, "fit", lambda *_, **__: SimpleNamespace(params={"model": bart.params}))
    free, forced = (
        dataclasses.replace(bart, decoding={**bart.decoding, "forced_bos_token_id": first}) for first in (None, 5)
    )
    for _ in range(2):
        free.finetune(PAIRS, workdir=tmp_path / "run")
    with pytest.raises(empax.ConfigError, match="holds a fine-tuning on other pairs, weights"):
        forced.finetune(PAIRS, workdir=tmp_path / "run")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "pairs is empty"),
        ("ab", "pairs is 'ab', a str; give a list"),
        ({"source": ["a"], "target": ["b"]}, "pairs is {.*, a dict; give a list"),
        (None, "pairs is None, a NoneType"),
        (["ab"], r"pairs\[0\] is 'ab', a str; a pair is \(source, target\)"),
        ([("a", "b"), {"a", "b"}], r"pairs\[1\] is .* a set; a pair is"),
        ([3], r"pairs\[0\] is 3, a int"),
        ([{"prompt": "a", "target": "b"}], r"pairs\[0\] has 'prompt', 'target', but no 'source'"),
        ([{}], r"pairs\[0\] has no keys, but no 'source'"),
        ([("a", "b", "c")], r"pairs\[0\] has 3 items"),
        ([("a",)], r"pairs\[0\] has 1 items"),
        ([("a", None)], r"pairs\[0\]: the target is None, a NoneType; it must be a text"),
        ([{"source": 3, "target": "b"}], r"pairs\[0\]: the source is 3, a int"),
    ],
)
def test_what_is_no_pair_is_named(model, pairs, message):
    with pytest.raises(empax.ConfigError, match=message):
        model.finetune(pairs)
    if len(pairs or ()):
        with pytest.raises(empax.ConfigError, match=message.replace("pairs", "validation", 1)):
            model.finetune(PAIRS, validation=pairs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
        ({"batch_size": "8"}, "batch_size = '8' is of type str"),
        ({"batch_size": 12}, "batch_size = 12 must be a multiple of 8, the number of devices"),
        ({"epochs": 0}, "epochs = 0 must be at least 1"),
        ({"epochs": 1.5}, "epochs = 1.5 is of type float"),
        ({"epochs": True}, "epochs = True is of type bool"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0 must be at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate = nan must be"),
        ({"max_source_tokens": 1}, "max_source_tokens = 1 must be at least 2"),
        ({"max_target_tokens": -3}, "max_target_tokens = -3 must be at least 2"),
        ({"seed": -1}, "seed = -1 must be at least 0"),
        ({"lora": 0}, "lora = 0 must be True, False, a rank"),
        ({"lora": np.float64(8)}, r"lora = np.float64\(8.0\) must be True, False, a rank"),
        ({"workdir": ""}, "workdir = '' must be the path of a folder"),
        ({"workdir": 3}, "workdir = 3 must be the path of a folder"),
        ({"lora": np.int64(1000)}, "lora = 1000 is more than 16, the width of the model"),
    ],
)
def test_what_is_no_setting_is_named_as_the_caller_does(model, settings, message):
    with pytest.raises(empax.ConfigError, match=message) as refused:
        model.finetune(PAIRS, **settings)
    assert "config." not in str(refused.value)


@pytest.mark.parametrize(
    ("epochs", "pairs", "expected"),
    [(3, 17, (9, 3, 3, 1, 0)), (2, 400, (100, 50, 50, 12, 10)), (2, 8000, (2000, 1000, 1000, 250, 100))],
)
def test_an_epoch_reads_every_pair_and_a_tenth_of_the_updates_warms_up(epochs, pairs, expected):
    train = SequenceExamples([[3] * 5] * pairs, [[1]] * pairs, pad_id=0, max_target_tokens=1)
    settings = FinetuneSettings(epochs, 8, None, 512, 128, seed=4)
    made = settings.loop(train, None, adapters=True, most_tokens=None)
    every = (made.eval_every_steps, made.checkpoint_every_steps, made.log_every_steps)
    assert (made.steps, *every, made.optimizer.warmup_steps) == expected
    assert (made.optimizer.learning_rate, made.best_metric, made.seed) == (1e-3, None, 4)
    whole = settings.loop(train, train, adapters=False, most_tokens=None)
    assert (whole.optimizer.learning_rate, whole.best_metric) == (1e-4, "nll")


def test_adapters_may_be_as_wide_as_the_model():
    assert lora_settings(True, width=16) == lora_settings(8, width=8) == LoraSettings(rank=8, alpha=16.0)
    assert lora_settings(False, width=16) is None


def test_a_rank_adapts_all_linear_layers(model):
    adapters = init_adapters(jax.random.key(0), model.params, LoraSettings(rank=2))
    found = {name.rpartition("/")[0].split("layers/")[1] for name in named_leaves(adapters)}
    assert found == {
        *(f"attention/{name}" for name in ("query", "key", "value", "out")),
        *(f"feed_forward/{name}" for name in ("gate", "wi", "wo")),
    }


def test_a_workdir_that_the_system_refuses_is_named(model, tmp_path):
    folder = tmp_path / ("x" * 300)
    with pytest.raises(empax.DataError, match=r"x cannot be written \(File name too long\)"):
        model.finetune(PAIRS, workdir=folder)


def test_it_says_how_many_targets_are_cut(model, monkeypatch, caplog):
    def begun(*_, **__):
        raise Interrupted("begun", step=0)

    monkeypatch.setattr(loop, "fit", begun)
    for most, warns in ((2, True), (128, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="empax"), pytest.raises(Interrupted):
            model.finetune(PAIRS, max_target_tokens=most)
        assert ("finetune: 8 of 8 responses are longer than max_target_tokens = 2, " in caplog.text) == warns


def stop(step):
    """A progress bar that sends a signal at one step."""

    class Bar(loop.ProgressBar):
        steps = 0

        def advance(self):
            super().advance()
            self.steps += 1
            if self.steps == step:
                os.kill(os.getpid(), signal.SIGINT)

    return Bar


def test_two_at_once_do_not_write_in_one_folder(tmp_path):
    again = working_folder(tmp_path, "hash", learning_rate=1.0)
    in_use = pytest.raises(empax.ConfigError, match=r"is in use: .* or choose another workdir\.")
    with working_folder(tmp_path, "hash", learning_rate=1.0), in_use, again:
        raise AssertionError
    with working_folder(tmp_path, "hash", learning_rate=1.0):
        pass


def test_interrupted_it_says_what_is_kept(model, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "ProgressBar", stop(1))
    with pytest.raises(Interrupted, match=r"after step 1; nothing was kept, .* finetune\(\.\.\., workdir=FOLDER\)"):
        model.finetune(PAIRS)
    with pytest.raises(Interrupted, match="stopped and saved after step 1; run again"):
        model.finetune(PAIRS, workdir=tmp_path / "run")
    assert (tmp_path / "run" / "finetune" / "checkpoints" / "1").is_dir()


def test_where_it_diverges_the_advice_has_the_callers_names(model, tmp_path):
    broken = dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf * np.inf, model.params))
    with pytest.raises(NonFiniteError, match=r"at step 1\. Lower learning_rate = 0\.001; nothing was kept") as error:
        broken.finetune(PAIRS, epochs=1, lora=2)
    assert "optimizer" not in str(error.value)
    with (
        pytest.raises(NonFiniteError, match=r"Lower learning_rate = 0\.1, and name another workdir for it"),
        working_folder(tmp_path, "", learning_rate=0.1),
    ):
        raise NonFiniteError("not finite")


def test_a_home_folder_is_found(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model.finetune(PAIRS, epochs=1, learning_rate=0.0, workdir="~/run").save("~/model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
    again = empax.load("~/model")
    assert again.source == str(tmp_path / "model")
    np.testing.assert_allclose(*(m.nll(["a"], ["b"]).nll for m in (model, again)), rtol=1e-6)
    with pytest.raises(
        empax.ConfigError, match=r"is not empty: it holds .*; give another folder, or empty it first"
    ) as e:
        again.save("~/model")
    assert "--" not in str(e.value)
