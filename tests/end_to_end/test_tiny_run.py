"""One run of the tiny recipe, every stage of it: what it leaves behind, and that it is what it should be."""

import time

import jax
import numpy as np
import pytest

import empax
from empax.core.config import ConfigError
from empax.core.files import read_json, read_jsonl
from empax.core.system import AnswerOptions, load_encoder_of
from empax.core.tree import named_leaves
from empax.core.types import ATTRIBUTES, EMOTIONS, LEVELS
from empax.data.store import load_candidates, load_instances
from empax.evaluation.scoring import METRICS
from empax.models.heads import EMOTION_HEAD
from empax.parts.generator.stages import answerer_of, context_examples
from empax.parts.generator.task import Generator
from empax.pipeline import evaluate, run, swaps
from empax.retrieval.index import load_index
from empax.systems.reg.parts import RegParts
from empax.training.checkpoint import load_params
from tests.plans import context_of

STAGES = ("prepare", "generator", "index", "attributes", "annotate", "exemplars", "emotions", "retriever", "reindex",
          "joint", "evaluate", "swaps", "report")  # fmt: skip
TRAINED = ("generator", "attributes", "exemplars", "emotions", "retriever", "joint")


@pytest.fixture(scope="module")
def config(finished):
    return read_json(finished / "config.json")


@pytest.fixture(scope="module")
def predictions(finished):
    return list(read_jsonl(finished / "predictions.jsonl"))


def test_every_stage_is_done_and_lies_where_it_should(finished, config):
    assert tuple(config["run"]) == STAGES
    for stage in STAGES:
        assert (finished / stage / "DONE").is_file()
    for name in ("config.json", "run.json", "metrics.jsonl", "predictions.jsonl", "report.json", "report.md",
                 "report.html", "prepare/counts.json", "annotate/classifiers.json"):  # fmt: skip
        assert (finished / name).is_file(), name
    for stage in TRAINED:
        assert sorted(path.name for path in (finished / stage / "checkpoints").iterdir()) == ["2", "4"]
        assert (finished / stage / "best").is_dir()
        assert any((finished / "tensorboard" / stage).iterdir())


def test_run_json_says_what_made_the_run(finished):
    about = read_json(finished / "run.json")
    assert about["seed"] == 0
    assert about["versions"]["jax"] == jax.__version__
    assert about["devices"] == ["cpu cpu"]
    assert "--config=configs/reg_transformer.py:tiny" in about["command"]


def test_metrics_cover_every_stage_and_split(finished):
    rows = list(read_jsonl(finished / "metrics.jsonl"))
    found = {(row["stage"], row["split"], row["step"]) for row in rows}
    assert found == {(stage, split, step) for stage in TRAINED for split in ("train", "validation") for step in (2, 4)}
    assert len(rows) == len(found)
    assert all(np.isfinite(value) for row in rows for value in row.values() if not isinstance(value, str))
    logged = {row["stage"]: set(row) for row in rows if row["split"] == "train"}
    assert {"loss", "grad_norm", "learning_rate", "examples_per_second"} <= set.intersection(*logged.values())
    assert {"nll", "retriever_loss", "utility", "utility_gain", "emotion_accuracy"} <= logged["joint"]
    measured = read_json(finished / "retriever" / "utility.json")
    assert read_json(finished / "report.json")["notes"]["utility"] == {"retriever": measured}
    assert {"value", "low", "high"} == set(measured["utility_gain"])


def test_predictions_are_the_test_split_in_id_order(finished, predictions):
    instances = load_instances(context_of(finished), "test")
    assert [(row["id"], row["reference"], tuple(row["context"]), row["emotion"]) for row in predictions] == [
        (i.id, i.response, i.context, i.emotion) for i in instances
    ]
    assert [i.id for i in instances] == sorted(i.id for i in instances)
    for row in predictions:
        assert row["emotion_prediction"] in EMOTIONS
        assert tuple(row["attributes"]) == ATTRIBUTES
        assert set(row["attributes"].values()) <= set(LEVELS)
        assert row["notes"]["num_tokens"] >= 2
        assert row["notes"]["nll"] > 0
        head = read_json(finished / "evaluate" / "evaluate.json")["emotion_head"]
        assert row["emotion_prediction"] == row["notes"]["emotion_by_head"][head]


def test_exemplars_are_training_pairs_with_attributes_and_a_score(finished, predictions):
    train = {i.id: i for i in load_instances(context_of(finished), "train")}
    for row in predictions:
        assert len(row["exemplars"]) == 2
        assert row["exemplars"][0]["score"] >= row["exemplars"][1]["score"]
        for exemplar in row["exemplars"]:
            instance = train[exemplar["id"]]
            assert (exemplar["response"], exemplar["emotion"]) == (instance.response, instance.emotion)
            assert exemplar["attributes"] == instance.notes["response_attributes"]


def test_no_held_out_instance_carries_attributes_of_its_response(finished):
    for split in ("train", "validation", "test"):
        notes = {name for i in load_instances(context_of(finished), split) for name in i.notes}
        expected = {"context_attributes", "situation", *(["response_attributes"] if split == "train" else [])}
        assert notes == expected


@pytest.mark.parametrize("stage", ["index", "reindex"])
def test_no_candidate_is_of_the_own_dialogue(finished, stage):
    train = load_instances(context_of(finished), "train")
    for split in ("train", "validation"):
        positions, ids = load_candidates(context_of(finished), stage, split)
        instances = load_instances(context_of(finished), split)
        assert sorted(positions) == list(range(len(instances)))
        assert ids.shape == (len(instances), 4)
        assert ids.min() >= 0
        for position, row in zip(positions, ids, strict=True):
            assert instances[position].dialogue_id not in {train[i].dialogue_id for i in row}
            assert len(set(row)) == 4
    about = read_json(finished / stage / "index.json")
    assert about["method"] == "scann"
    assert about["recall_at_10"] >= 0.95


def test_the_refresh_of_joint_training_keeps_out_the_own_dialogue(finished):
    train = load_instances(context_of(finished), "train")
    positions, before = load_candidates(context_of(finished), "reindex", "train")
    found = np.load(finished / "joint" / "refresh" / "00000002.npy")
    assert found.shape == before.shape
    for position, row in zip(positions, found, strict=True):
        assert train[position].dialogue_id not in {train[i].dialogue_id for i in row}


def changed(before, after):
    """Whether each leaf is another one, by name."""
    before, after = named_leaves(before), named_leaves(after)
    assert before.keys() == after.keys()
    return {name: not np.array_equal(before[name], after[name]) for name in before}


def is_frozen(name, stage):
    """By the recipe: word embeddings of encoders, and after its own stage what reads emotions."""
    own = {"retriever": "emotion", "exemplars": "retriever", "joint": "retriever/emotion"}.get(stage)
    return name.endswith("encoder/token_embedding") or (own is not None and name.startswith(own))


def at_step(stage, step, folder):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / str(step)).symlink_to(stage / "checkpoints" / str(step))
    return load_params(folder, "last")


@pytest.mark.parametrize("stage", TRAINED)
def test_training_changes_every_leaf_but_the_frozen_ones(finished, tmp_path, stage):
    found = changed(*(at_step(finished / stage, step, tmp_path / str(step)) for step in (2, 4)))
    assert found == {name: not is_frozen(name, stage) for name in found}
    assert all(found.values()) == (stage == "generator")


def test_stages_begin_with_what_the_stages_before_them_made(finished):
    """So what they freeze is what those made, and what they train is not."""
    began = RegParts.of(context_of(finished)).retriever_params(context_of(finished), "")
    emotions, retriever, joint = (load_params(finished / s, "last") for s in ("emotions", "retriever", "joint"))
    assert set(emotions) == {"emotion", "emotion_encoder"}
    chosen = load_params(finished / "emotions")
    for before, after, stage in (
        ({"encoder": began["emotion_encoder"]}, {"encoder": emotions["emotion_encoder"]}, "emotions"),
        ({**chosen, "encoder": began["encoder"]}, retriever, "retriever"),
        ({"model": load_params(finished / "generator")}, {"model": joint["generator"]}, "generator"),
        ({"retriever": load_params(finished / "retriever")}, {"retriever": joint["retriever"]}, "joint"),
    ):
        found = changed(before, after)
        assert found == {name: not is_frozen(name, stage) for name in found}


def test_a_swap_of_all_exemplars_for_none_leaves_the_plain_generator(finished):
    at = context_of(finished)
    settings = at.plan.stages["evaluate"].settings
    answerer = evaluate.load_answerer(settings, at, settings.buckets)
    instances = load_instances(at, "test")[:20]
    none = answerer.weigh(instances, np.full((20, 2), -1), batch_size=16, seed=0)
    parts = RegParts.of(at, with_params=False).generator
    params = parts.stage_params(at, "joint")["generator"]
    plain = Generator(parts.reader, parts.decoder(parts.settings.decoding), EMOTION_HEAD, 0.0)
    alone = answerer_of(parts, plain, params, context_examples(parts, ()), AnswerOptions("joint", "", settings.buckets))
    for row, other in zip(none, alone.respond(instances, batch_size=16, seed=0), strict=True):
        assert row.notes["nll"] == pytest.approx(other.notes["nll"], rel=1e-4)
        assert row.exemplars == ()
        parts_of_it = sum(row.notes[f"nll_{part}"] for part in ("first", "rest", "end"))
        assert parts_of_it == pytest.approx(row.notes["nll"], abs=1e-3)
    own = answerer.weigh(instances, answerer.exemplars.find(instances)[0], batch_size=16, seed=0)
    wanted = {row["id"]: row["notes"]["nll"] for row in read_jsonl(finished / "predictions.jsonl")}
    assert [row.notes["nll"] for row in own] == pytest.approx([wanted[row.id] for row in own], rel=1e-4)
    assert [row.notes["nll"] for row in own] != pytest.approx([row.notes["nll"] for row in none], rel=1e-4)


def test_swaps_are_of_the_rows_and_the_decoder_of_the_evaluation(finished, predictions):
    rows = list(read_jsonl(finished / "swaps" / "swaps.jsonl.gz"))
    given = {name: [row for row in rows if row["given"] == name] for name in swaps.GIVEN}
    known = {row["id"]: row for row in predictions}
    assert {len(found) for found in given.values()} == {16}
    for row in given["own"]:
        assert row["nll"] == pytest.approx(known[row["id"]]["notes"]["nll"], rel=1e-4)
        assert row["exemplars"] == [exemplar["id"] for exemplar in known[row["id"]]["exemplars"]]
    for name in ("random", "same_turn", "same_emotion", "nearest"):
        assert [row["exemplars"] for row in given[name]] != [row["exemplars"] for row in given["own"]]
        assert all(len(set(row["exemplars"])) == 2 for row in given[name])
    emotions = {i.id: i.emotion for i in load_instances(context_of(finished), "train")}
    assert all(emotions[e] == known[row["id"]]["emotion"] for row in given["same_emotion"] for e in row["exemplars"])
    assert {sum("response" in row for row in found) for found in given.values()} == {8}
    shown = read_json(finished / "report.json")["swaps"]["swaps"]
    assert shown["given"]["own"]["nll"]["value"] == pytest.approx(np.mean([row["nll"] for row in given["own"]]))
    assert set(shown["recall"]["by"]) == {"own", "bm25"}
    assert "What the exemplars are worth" in (finished / "report.md").read_text(encoding="utf-8")
    assert "What the exemplars are worth" in (finished / "report.html").read_text(encoding="utf-8")


def test_report_has_the_agreed_names(finished, config, predictions):
    report = read_json(finished / "report.json")
    assert {"system", "config", "data", "metrics", "speed", "paper", "run"} <= set(report)
    assert report["system"] == "reg"
    assert report["config"] == config
    assert report["data"]["test"] == {"dialogues": 32, "instances": len(predictions)}
    assert set(report["metrics"]) == {m for m in METRICS if m != "intent_accuracy" and not m.startswith("bart_score")}
    for name, value in report["metrics"].items():
        assert value["low"] <= value["value"] <= value["high"], name
        assert np.isfinite(list(value.values())).all(), name
    nll = sum(row["notes"]["nll"] for row in predictions)
    tokens = sum(row["notes"]["num_tokens"] for row in predictions)
    assert report["metrics"]["perplexity"]["value"] == pytest.approx(np.exp(nll / tokens), rel=1e-4)
    hits = [row["emotion"] == row["emotion_prediction"] for row in predictions]
    assert report["metrics"]["emotion_accuracy"]["value"] == pytest.approx(100 * np.mean(hits))
    assert report["paper"] == {}  # its rows are of another corpus
    assert "built-in" in report["published_absent"]
    assert {"generator/examples_per_second", "joint/seconds"} <= set(report["speed"])
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 4
    assert predictions[0]["reference"].split(",")[0][:20] in page
    assert "| **reg\\_transformer.py:tiny** | this run |" in (finished / "report.md").read_text(encoding="utf-8")


def test_running_again_redoes_nothing(finished, config, caplog):
    def times():
        return {path: path.stat().st_mtime_ns for path in finished.rglob("*")}

    before, begin = times(), time.perf_counter()
    with caplog.at_level("INFO", logger="empax"):
        run.run(config, finished)
    assert time.perf_counter() - begin < 5
    assert times() == before
    assert [record.getMessage() for record in caplog.records] == [f"{stage}: done before" for stage in STAGES]


def test_each_index_is_of_the_retriever_that_its_stage_names(finished):
    hashes = {encoder: load_encoder_of(context_of(finished), encoder).hash for encoder in ("", "retriever")}
    assert load_index(finished / "index" / "store").encoder_hash == hashes[""]
    assert load_index(finished / "reindex" / "store").encoder_hash == hashes["retriever"]
    assert hashes[""] != hashes["retriever"]


def test_a_generator_that_reads_exemplars_is_no_model_of_plain_text(finished):
    with pytest.raises(ConfigError, match=r"reads 2 exemplars with each text; Session\.load gives it those"):
        empax.load(finished)
