"""The evaluate stage with a made-up answerer: which head, which rows, in which order."""

import dataclasses
from types import SimpleNamespace

import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, hash_file, read_json, read_jsonl, write_json, write_jsonl
from empax.core.manifest import write_sealed
from empax.core.system import AnswerOptions, RunContext, Stage, TaskSpec
from empax.core.types import MECHANISMS, Instance, Prediction
from empax.data.dialogues import instance_to_row
from empax.data.epitome import FILES
from empax.data.sample import load_annotated_pairs
from empax.data.store import load_instances
from empax.evaluation.rows import read_predictions
from empax.interop.pretrained import GeneratorSettings
from empax.parts.attributes.linear import LinearJudge, train_linear
from empax.parts.generator.settings import DialogueSettings
from empax.pipeline import annotate, answers, evaluate, judging
from tests.plans import plan_of


class Parrot:
    """Repeats the context; one head knows the emotion on validation, the other on test."""

    def __init__(self):
        self.asked = []

    def emotions(self, instances, *, batch_size, seed=0):
        self.asked.append(("emotions", len(instances), batch_size))
        return [
            {
                "generator": "sad" if i.id.startswith("test") else "joyful",
                "retriever": "sad" if i.id.startswith("validation") else "proud",
            }
            for i in instances
        ]

    def respond(self, instances, *, batch_size, seed, progress, kept):
        found = self.emotions(instances, batch_size=batch_size)
        self.asked[-1] = (progress, len(instances), batch_size, seed)
        self.notes = [i.notes for i in instances]
        return [
            Prediction(
                context=i.context, response=f"so {i.context[-1]}", reference=i.response, id=i.id, emotion=i.emotion,
                emotion_prediction="angry", notes={"emotion_by_head": by_head},
            )
            for i, by_head in zip(instances, found, strict=True)
        ]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    config = {
        "seed": 5,
        "run": ["annotate", "elsewhere", "evaluate", "again"],
        "data": {"dir": str(tmp_path / "data")},
        "annotate": {"kind": "annotate"},
        "elsewhere": {"kind": "evaluate", "stage": "joint", "corpus": "dailydialog"},
        "evaluate": {"kind": "evaluate", "stage": "joint"},
        "again": {"kind": "evaluate", "stage": "generator"},
    }
    context = RunContext(WorkDir(tmp_path), plan_of(config), "evaluate")
    for split in ("validation", "test"):
        rows = [Instance(f"{split}-{i}#2", (f"turn {i}",), "gold", "sad" if i else "") for i in range(7)]
        write_jsonl(context.files.instances(split), map(instance_to_row, rows))
    return context


class Unfeeling(Parrot):
    """Has learnt nothing of emotions."""

    def emotions(self, instances, *, batch_size, seed=0):
        return [{} for found in super().emotions(instances, batch_size=batch_size, seed=seed)]


def settings_of(**values):
    return to_settings(evaluate.Settings, {"stage": "joint", "batch_size": 4, **values}, where="config.evaluate")


def evaluated(run, parrot=None, **values):
    parrot, named = parrot or Parrot(), []
    spec = TaskSpec(object, None, None, None, answer=lambda stage, run, options: named.append(options) or parrot)
    settings = settings_of(**values)
    trained = Stage(settings.stage, "train", None, task=f"reg.{settings.stage}", spec=spec)
    stages = {**run.plan.stages, trained.name: trained}
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, stages=stages))
    evaluate.run(settings, run)
    path = run.files.predictions if run.stage == "evaluate" else run.files.evaluation(run.stage)
    return parrot, named, list(read_jsonl(path))


def test_the_head_is_chosen_on_validation_and_used_on_test(run):
    parrot, named, rows = evaluated(run, index="reindex", buckets=[8])
    assert named == [AnswerOptions("joint", "reindex", (8,))]
    assert parrot.asked == [("emotions", 7, 4), ("test", 7, 4, 5)]
    assert [row["id"] for row in rows] == [f"test-{i}#2" for i in range(7)]
    assert {row["emotion_prediction"] for row in rows} == {"proud"}  # the retriever's, though the other is right here
    about = read_json(run.directory / "evaluate.json")
    assert about["emotion_head"] == "retriever"
    assert about["emotion_head_validation_accuracy"] == {"generator": 0.0, "retriever": 100.0}  # of known emotions


def test_parameters_that_were_kept_answer(run):
    _, named, _ = evaluated(run, step=40)
    assert named == [AnswerOptions("joint", "reindex", (64, 128, 256, 512), 40)]


def test_without_a_head_that_has_learnt_emotions_none_is_predicted(run):
    _, _, rows = evaluated(run, Unfeeling())
    assert {row["emotion_prediction"] for row in rows} == {""}
    assert not [name for name in read_json(run.directory / "evaluate.json") if "head" in name]


def test_a_limit_draws_whole_dialogues_and_says_so(run):
    parrot, _, rows = evaluated(run, limit=3, head_examples=3)
    assert [asked[1] for asked in parrot.asked] == [3, 3]
    ids = [row["id"] for row in rows]
    assert ids == sorted(ids)
    assert ids != ["test-0#2", "test-1#2", "test-2#2"]
    assert read_json(run.directory / "evaluate.json")["data"] == {
        "instances": 7, "answered": 3, "chosen": "of dialogues drawn at random"
    }  # fmt: skip
    other = dataclasses.replace(run, plan=dataclasses.replace(run.plan, seed=6))
    assert [row["id"] for row in evaluated(other, limit=3)[2]] == ids  # runs are compared on the same rows
    outputs, bad = read_predictions(run.files.outputs, {i.id: i for i in load_instances(run, "test")})
    assert not bad
    assert [(row.id, row.response, row.reference) for row in outputs] == [
        (row["id"], row["response"], row["reference"]) for row in rows
    ]


class Stopping(Parrot):
    """Leaves what it has answered, and answers the rest the next time."""

    def __init__(self, most=None):
        super().__init__()
        self.most = most

    def respond(self, instances, *, kept, **options):
        answered = super().respond(instances, kept=kept, **options)
        for number, row in enumerate(answered):
            if number == self.most:
                kept.flush()
                raise KeyboardInterrupt
            if kept.get(number) is None:
                kept.add(number, {number: row})
        return [(kept.get(i) or {i: row})[i] for i, row in enumerate(answered)]


def test_a_stage_that_is_cut_off_keeps_its_answers_and_leaves_the_same_file(run, tmp_path):
    evaluated(run, Stopping())
    expected = run.files.predictions.read_bytes()
    parts = run.directory / "parts"
    assert not parts.exists()
    with pytest.raises(KeyboardInterrupt):
        evaluated(run, Stopping(4))
    kept = answers.KeptAnswers(parts, answers.identify(run, settings_of(), load_instances(run, "test")))
    assert len(kept) == 4
    evaluated(run, Stopping())
    assert run.files.predictions.read_bytes() == expected
    assert not parts.exists()
    assert read_json(run.directory / "evaluate.json")["seconds"] > kept.seconds > 0


def test_answers_of_another_model_or_to_other_instances_are_not_kept(run):
    instances = load_instances(run, "test")
    first = answers.identify(run, settings_of(), instances)
    assert first == answers.identify(run, settings_of(), instances)
    others = [
        answers.identify(run, settings_of(batch_size=5), instances),
        answers.identify(run, settings_of(), instances[1:]),
        answers.identify(
            dataclasses.replace(run, plan=dataclasses.replace(run.plan, seed=6)), settings_of(), instances
        ),
    ]
    for result in ("one", "two"):
        write_sealed(run.files.done("annotate"), {"files": {}, "result": result})
        others.append(answers.identify(run, settings_of(), instances))
    assert len({first, *others}) == 6


def test_without_any_known_emotion_no_head_predicts(run):
    unknown = [Instance("validation#2", ("x",), "y", "")]
    found = Parrot().emotions(unknown, batch_size=1)
    assert evaluate.head_accuracies(unknown, found) == {}
    write_jsonl(run.files.instances("validation"), map(instance_to_row, unknown))
    _, _, rows = evaluated(run)
    assert {row["emotion_prediction"] for row in rows} == {""}
    assert not [name for name in read_json(run.directory / "evaluate.json") if "head" in name]


def test_a_judge_levels_responses_and_references(run, monkeypatch):
    judge = SimpleNamespace(task=SimpleNamespace(mechanisms=MECHANISMS))
    monkeypatch.setattr(annotate, "load_judges", lambda settings, context: [judge])
    monkeypatch.setattr(
        annotate, "judge_levels",
        lambda judges, contexts, responses: [{"exploration": text} for text in responses],
    )  # fmt: skip
    _, _, rows = evaluated(run, judge="annotate", limit=2)
    assert [row["notes"]["response_attributes"] for row in rows] == [{"exploration": row["response"]} for row in rows]
    assert [row["notes"]["reference_attributes"] for row in rows] == [{"exploration": "gold"}] * 2
    _, _, rows = evaluated(run, judge=["annotate"], second_judge="annotate", limit=2)
    for whose, text in (("response", rows[0]["response"]), ("reference", "gold")):
        for note in (f"{whose}_attributes", f"second_seed_{whose}_attributes"):
            assert rows[0]["notes"][note] == {"exploration": text}
    with pytest.raises(ConfigError, match=r"config\.evaluate refers to config\.anotate"):
        evaluated(run, judge="anotate")


def test_another_corpus_is_answered_in_a_file_of_its_own(run, monkeypatch):
    monkeypatch.setattr(annotate, "load_judges", lambda settings, run: [])
    monkeypatch.setattr(annotate, "load_marker", lambda settings, run: lambda contexts: [[(0, 0, 1)]] * len(contexts))
    evaluated(run)
    own = run.files.predictions.read_bytes()
    elsewhere = dataclasses.replace(run, stage="elsewhere")
    with pytest.raises(ConfigError, match="holds no DailyDialog"):
        evaluated(elsewhere, corpus="dailydialog")
    path = run.files.root / "data" / "dailydialog" / "dialogues_test.txt"
    path.parent.mkdir(parents=True)
    path.write_text("A . __eou__ B . __eou__ C . __eou__\nD . __eou__ E . __eou__\n")
    parrot, _, rows = evaluated(elsewhere, corpus="dailydialog")
    # Annotated, as the run's own data are: the generator may have been trained on these notes.
    assert parrot.notes == [{"reasons": [[0, 0, 1]], "context_attributes": {"sentiment": "mid"}}] * 3
    assert parrot.asked == [("dailydialog", 3, 4, 5)]  # no emotion is known there: no head to choose
    assert [(row["context"], row["response"], row["reference"]) for row in rows] == [
        (["A."], "so A.", "B."), (["A.", "B."], "so B.", "C."), (["D."], "so D.", "E."),
    ]  # fmt: skip
    assert {(row["emotion"], row["emotion_prediction"]) for row in rows} == {("", "")}
    about = read_json(elsewhere.directory / "evaluate.json")
    assert (about["stage"], about["corpus"], about["split"]) == ("joint", "dailydialog", "test")
    assert about["data"] == {"source_hash": hash_file(path), "instances": 3, "answered": 3}
    assert "emotion_head" not in about
    assert run.files.predictions.read_bytes() == own
    data = dataclasses.replace(run.plan.data, limit=2)
    elsewhere = dataclasses.replace(elsewhere, plan=dataclasses.replace(run.plan, data=data))
    assert [len(evaluated(elsewhere, corpus="dailydialog", limit=limit)[2]) for limit in (0, 1, 3)] == [2, 1, 2]


def test_a_second_evaluation_of_the_same_data_leaves_the_first_alone(run):
    evaluated(run)
    again = dataclasses.replace(run, stage="again")
    _, _, rows = evaluated(again, stage="generator", split="validation", limit=2)
    assert [row["id"].partition("-")[0] for row in rows] == ["validation"] * 2
    assert len(list(read_jsonl(run.files.predictions))) == 7
    counts = read_json(again.directory / "evaluate.json")["data"]
    assert (counts["instances"], counts["answered"]) == (7, 2)


def test_another_decoder_takes_the_place_of_the_systems_own(run):
    decoders = []
    spec = TaskSpec(object, None, None, None, answer=lambda stage, run, options: decoders.append(
        run.plan.system_settings.decoding) or Parrot())  # fmt: skip
    stages = {**run.plan.stages, "joint": Stage("joint", "train", None, task="reg.joint", spec=spec)}
    shared = DialogueSettings()
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, stages=stages, system_settings=shared))
    evaluate.run(settings_of(), run)
    evaluate.run(settings_of(decoding={"method": "beam", "num_beams": 3}), run)
    assert decoders[0] == shared.decoding
    assert (decoders[1].method, decoders[1].num_beams) == ("beam", 3)
    own = dataclasses.replace(shared, own_decoding=True, generator=GeneratorSettings("t5", pretrained="x"))
    plan = dataclasses.replace(run.plan, system_settings=own)
    with pytest.raises(ConfigError, match=r"own_decoding = True; set only one of them"):
        evaluate.run(settings_of(decoding={"method": "greedy"}), dataclasses.replace(run, plan=plan))


def test_the_main_stage_is_the_first_on_the_own_data(run):
    assert evaluate.main_stage(run.plan) == "evaluate"
    assert evaluate.main_stage(plan_of({**run.plan.config, "run": ["elsewhere", "annotate"]})) == ""


def test_the_linear_judge_judges_beside_the_others_where_epitome_is(run, monkeypatch):
    _, _, rows = evaluated(run, linear_judge=True, limit=2)
    assert not [note for note in rows[0]["notes"] if note.startswith("linear_")]
    about = read_json(run.directory / "evaluate.json")
    assert about["linear_judge"] == {"absent": "EPITOME is not there to train it on"}
    monkeypatch.setattr(judging, "load_linear", lambda data_dir: train_linear(load_annotated_pairs()))
    _, _, rows = evaluated(run, linear_judge=True, limit=2)
    judge = train_linear(load_annotated_pairs())
    for whose, text in (("response", rows[0]["response"]), ("reference", "gold")):
        assert rows[0]["notes"][f"linear_{whose}_attributes"] == judge.levels([text])[0]
    about = read_json(run.directory / "evaluate.json")
    assert about["linear_judge"]["exploration"]["weighted_f1"] > 0
    evaluated(run, limit=2)
    assert "linear_judge" not in read_json(run.directory / "evaluate.json")


def test_the_linear_judge_of_a_jury_learns_from_the_epitome_of_the_run_or_of_the_folder_given(tmp_path, monkeypatch):
    stages = {"system": "attributes", "attributes": {}, "run": ["prepare"], "prepare": {"kind": "prepare"}}
    asked = []
    monkeypatch.setattr(judging, "find_judges", lambda workdir: ["neural"])
    monkeypatch.setattr(judging, "load_linear", lambda data_dir: asked.append(data_dir) or LinearJudge(None, {}))
    for folder in ("", "of the run"):
        write_json(tmp_path / "config.json", {"seed": 0, "data": {"name": "sample", "dir": folder}, **stages})
        for place in (tmp_path, tmp_path / "prepare"):
            assert judging.find_jury(str(place)).neural == ["neural"]
    with pytest.raises(ConfigError, match="has no stage 'identifiers'; it has: prepare"):
        judging.find_jury(str(tmp_path / "identifiers"))
    for _ in range(2):
        judging.find_jury(str(tmp_path), str(tmp_path / "data"))
        (tmp_path / "data").mkdir(exist_ok=True)
        for name in FILES.values():
            (tmp_path / "data" / name).touch()
    assert asked == ["", "", *["of the run"] * 3, str(tmp_path / "data")]


def test_the_published_judge_needs_no_run_and_no_epitome(monkeypatch, no_data_dir, tmp_path):
    monkeypatch.setattr(judging, "load_published", lambda: "published")
    monkeypatch.setattr(judging, "load_linear", lambda data_dir: f"linear of {data_dir}")
    assert judging.find_jury("empathy-minilm") == judging.Jury(["published"])
    for name in FILES.values():
        (tmp_path / name).touch()
    found = judging.find_jury("empathy-minilm", str(tmp_path))
    assert found == judging.Jury(["published"], f"linear of {tmp_path}")
