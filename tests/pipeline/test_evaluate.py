"""The evaluate stage with a made-up responder: which head, which rows, in which order."""

from types import SimpleNamespace

import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, read_json, read_jsonl, write_jsonl
from empax.core.run import RunContext
from empax.core.types import MECHANISMS, Instance, Prediction
from empax.data.dialogues import instance_to_row
from empax.pipeline import annotate, evaluate


class Parrot:
    """Repeats the context; one head knows the emotion on validation, the other on test."""

    heads = ("generator", "retriever")

    def __init__(self):
        self.asked = []

    def respond(self, instances, *, batch_size, seed, progress):
        self.asked.append((progress, len(instances), batch_size, seed))
        return [
            Prediction(
                context=i.context, response=f"so {i.context[-1]}", reference=i.response, id=i.id, emotion=i.emotion,
                emotion_prediction="angry",
                notes={"emotion_by_head": {
                    "generator": "sad" if i.id.startswith("test") else "joyful",
                    "retriever": "sad" if i.id.startswith("validation") else "proud",
                }},
            )
            for i in instances
        ]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    context = RunContext(WorkDir(tmp_path), {"seed": 5, "annotate": {"kind": "annotate"}}, "evaluate")
    for split in ("validation", "test"):
        rows = [Instance(f"{split}-{i}#2", (f"turn {i}",), "gold", "sad" if i else "") for i in range(7)]
        write_jsonl(context.files.instances(split), map(instance_to_row, rows))
    return context


def evaluated(run, **values):
    parrot, named = Parrot(), []
    system = SimpleNamespace(load_responder=lambda context, **options: named.append(options) or parrot)
    settings = to_settings(evaluate.Settings, {"stage": "joint", "batch_size": 4, **values}, where="config.evaluate")
    evaluate.run(settings, run, system)
    return parrot, named, list(read_jsonl(run.files.predictions))


def test_the_head_is_chosen_on_validation_and_used_on_test(run):
    parrot, named, rows = evaluated(run, index="reindex", buckets=[8])
    assert named == [{"stage": "joint", "index": "reindex", "buckets": (8,)}]
    assert parrot.asked == [("emotion head", 7, 4, 5), ("test", 7, 4, 5)]
    assert [row["id"] for row in rows] == [f"test-{i}#2" for i in range(7)]
    assert {row["emotion_prediction"] for row in rows} == {"proud"}  # the retriever's, though the other is right here
    about = read_json(run.directory / "evaluate.json")
    assert about["emotion_head"] == "retriever"
    assert about["emotion_head_validation_accuracy"] == {"generator": 0.0, "retriever": 100.0}  # of known emotions


def test_limits_take_the_first(run):
    parrot, _, rows = evaluated(run, limit=2, head_examples=3)
    assert [asked[1] for asked in parrot.asked] == [3, 2]
    assert [row["id"] for row in rows] == ["test-0#2", "test-1#2"]


def test_without_any_known_emotion_no_head_is_better():
    found = Parrot().respond([Instance("validation#2", ("x",), "y", "")], batch_size=1, seed=0, progress="")
    assert evaluate.head_accuracies(found, Parrot.heads) == {"generator": 0.0, "retriever": 0.0}


def test_a_judge_levels_responses_and_references(run, monkeypatch):
    judge = SimpleNamespace(task=SimpleNamespace(mechanisms=MECHANISMS))
    monkeypatch.setattr(annotate, "load_judges", lambda settings, context: [judge])
    monkeypatch.setattr(
        annotate, "judge_levels",
        lambda judges, contexts, responses, threshold: [{"exploration": text} for text in responses],
    )  # fmt: skip
    _, _, rows = evaluated(run, judge="annotate", limit=2)
    assert [row["notes"]["response_attributes"] for row in rows] == [{"exploration": f"so turn {i}"} for i in range(2)]
    assert [row["notes"]["reference_attributes"] for row in rows] == [{"exploration": "gold"}] * 2
    _, _, rows = evaluated(run, judge=["annotate"], second_judge="annotate", limit=2)
    for whose, text in (("response", "so turn 0"), ("reference", "gold")):
        for note in (f"{whose}_attributes", f"independent_{whose}_attributes"):
            assert rows[0]["notes"][note] == {"exploration": text}
    with pytest.raises(ConfigError, match=r"config\.evaluate refers to config\.anotate"):
        evaluated(run, judge="anotate")
