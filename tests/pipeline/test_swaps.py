"""The stage "swaps" with a made-up system: what it is shown, what is written, and that it goes on where it stopped."""

import dataclasses

import numpy as np
import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, read_json, read_jsonl, write_jsonl
from empax.core.system import RunContext, Stage, TaskSpec
from empax.core.types import EMOTIONS, Instance, Prediction
from empax.data.dialogues import instance_to_row
from empax.evaluation.text import token_f1_rows
from empax.pipeline import swaps
from empax.reporting.swaps import score_stages, tables
from tests.plans import plan_of

WORDS = ("dog", "cup", "exam", "job", "rain", "song", "bus", "tree")
TRAIN = [
    Instance(f"train-{i}#2", (f"about my {word} {i}",), f"what of the {word} number {i} ?", EMOTIONS[i % 4])
    for i, word in enumerate(WORDS * 4)
]
# The gold reply of each stands in training, once; its own dialogue is not there.
TEST = [Instance(f"test-{i}#2", (f"my {WORDS[i]} is gone",), TRAIN[8 + i].response, EMOTIONS[i % 4]) for i in range(6)]


class WordEncoder:
    """Counts words."""

    vocabulary = sorted({word for i in (*TRAIN, *TEST) for text in (*i.context, i.response) for word in text.split()})

    def _count(self, texts):
        counts = np.array([[text.split().count(word) for word in self.vocabulary] for text in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    def embed_queries(self, instances, *, progress=None, mesh=None):
        return self._count([" ".join(i.context) for i in instances])

    def embed_keys(self, instances, *, progress=None, mesh=None):
        return self._count([" ".join((*i.context, i.response)) for i in instances])


class Source:
    """Finds the first two."""

    encoder, pairs = WordEncoder(), TRAIN

    def find(self, instances):
        return np.tile([0, 1], (len(instances), 1)), np.ones((len(instances), 2))


class Reader:
    """Says what it is shown; a reference is the likelier the more of it stands there."""

    exemplars = Source()

    def __init__(self, most=99):
        self.asked, self.most = [], most

    def _each(self, instances, exemplars, kept, make):
        found = []
        for number, (instance, shown) in enumerate(zip(instances, exemplars, strict=True)):
            known = kept.get(number)
            if known is None:
                self.most -= 1
                if self.most < 0:
                    kept.flush()
                    raise KeyboardInterrupt
                said = [TRAIN[row] for row in shown if row >= 0]
                ids = tuple({"id": one.id} for one in said)
                made = Prediction(instance.context, "", instance.response, id=instance.id, exemplars=ids)
                known = {0: make(made, [one.response for one in said])}
                kept.add(number, known)
            found.append(known[0])
        return found

    def weigh(self, instances, exemplars, *, batch_size, seed, progress, kept):
        self.asked.append(progress)

        def make(row, said):
            best = max((token_f1_rows([text], [row.reference]).item() for text in said), default=0.0)
            notes = {"nll": 20.0 - best / 10, "num_tokens": 6}
            return dataclasses.replace(
                row, notes={**notes, "nll_first": 1.0, "nll_rest": notes["nll"] - 2.0, "nll_end": 1.0}
            )

        return self._each(instances, exemplars, kept, make)

    def respond(self, instances, *, exemplars, batch_size, seed, progress, kept):
        self.asked.append((progress, batch_size, seed))
        return self._each(
            instances, exemplars, kept, lambda row, said: dataclasses.replace(row, response=" ".join(said) or "oh no")
        )


def settings_of(**values):
    return to_settings(swaps.Settings, {"nearest": "", "replies": 4, **values}, where="config.swaps")


@pytest.fixture
def run(tmp_path):
    config = {
        "seed": 3,
        "run": ["prepare", "joint", "evaluate", "elsewhere", "plain", "swaps"],
        "prepare": {"kind": "prepare"},
        "joint": {"kind": "train"},
        "evaluate": {"kind": "evaluate", "stage": "joint", "batch_size": 4},
        "elsewhere": {"kind": "evaluate", "stage": "joint", "corpus": "dailydialog"},
        "plain": {"kind": "evaluate", "stage": "generator"},
        "swaps": {"kind": "swaps"},
    }
    context = RunContext(WorkDir(tmp_path), plan_of(config), "swaps")
    for split, rows in (("train", TRAIN), ("test", TEST)):
        write_jsonl(context.files.instances(split), map(instance_to_row, rows))
    return context


def with_reader(run, reader=None, shown=True):
    def spec(shows):
        return TaskSpec(object, None, None, None, answer=lambda *_: reader, reads_exemplars=lambda _: shows)

    stages = {
        name: Stage(name, "train", None, task=f"reg.{name}", spec=spec(shows))
        for name, shows in (("joint", shown), ("generator", False))
    }
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, stages={**run.plan.stages, **stages}))


def swapped(run, reader=None, **values):
    reader = reader or Reader()
    swaps.run(settings_of(**values), with_reader(run, reader))
    return reader, list(read_jsonl(run.directory / "swaps.jsonl.gz"))


def test_every_row_is_weighed_beside_six_kinds_of_exemplars_and_some_are_answered(run):
    reader, rows = swapped(run)
    assert [row["given"] for row in rows] == [name for name in swaps.GIVEN for _ in TEST]
    assert [row["id"] for row in rows] == [i.id for i in TEST] * 6
    assert [asked for asked in reader.asked if isinstance(asked, str)] == [f"swaps, {name}" for name in swaps.GIVEN]
    assert [asked for asked in reader.asked if not isinstance(asked, str)] == [
        (f"swaps, {name}, replies", 4, 3) for name in swaps.GIVEN
    ]
    by_given = {name: [row for row in rows if row["given"] == name] for name in swaps.GIVEN}
    for row, instance in zip(by_given["own"], TEST, strict=True):
        assert row["exemplars"] == ["train-0#2", "train-1#2"]
        alike = token_f1_rows([one.response for one in TRAIN[:2]], [instance.response] * 2)
        assert row["exemplar_f1"] == pytest.approx(alike.mean(), abs=1e-5)
    assert all(row["exemplars"] == [] and "exemplar_f1" not in row for row in by_given["none"])
    answered = [{row["id"] for row in found if "response" in row} for found in by_given.values()]
    assert len(answered[0]) == 4
    assert answered == answered[:1] * 6
    emotions = {i.id: i.emotion for i in TRAIN}
    for row, instance in zip(by_given["same_emotion"], TEST, strict=True):
        assert [emotions[exemplar] for exemplar in row["exemplars"]] == [instance.emotion] * 2
    about = read_json(run.directory / "swaps.json")
    assert about["data"] == {"instances": 6, "answered": 6, "rows": 6, "replies": 4}
    assert about["given"] == {name: {"with_too_few": 0} for name in swaps.GIVEN}
    found = [m["value"] for by in about["recall"]["by"].values() for name, m in by.items() if "recall_at_10:" in name]
    assert found == [100.0, 100.0]  # all replies with the word of a context are alike: the gold one is among them
    assert not (run.directory / "parts").exists()


def test_a_planted_gold_reply_is_found_by_the_oracle_and_shown_in_the_report(run):
    _, rows = swapped(run)
    nearest = [row for row in rows if row["given"] == "nearest"]
    assert [row["exemplars"][0] for row in nearest] == [f"train-{8 + i}#2" for i in range(6)]
    assert all(row["nll"] == 10.0 for row in nearest)  # the reference itself stands there
    assert all(row["exemplar_f1"] > 50 for row in nearest)
    found = score_stages(run.files, {"run": ["swaps"]}, samples=50, seed=0)["swaps"]
    assert found["given"]["nearest"]["minus_own"]["nll"]["high"] < 0
    assert "would save more" in found["meaning"]
    likelihoods, parts, replies, recall = tables({"swaps": {"swaps": found}})
    assert [row[0] for row in likelihoods.rows] == [
        "its own", "random", "random, same turn", "random, same emotion", "nearest to the gold reply", "none",
    ]  # fmt: skip
    assert likelihoods.rows[4][1] == "10.000"
    assert [len(row) for table in (likelihoods, parts, replies, recall) for row in table.rows] == [
        len(table.head) for table in (likelihoods, parts, replies, recall) for _ in table.rows
    ]
    assert [row[0] for row in recall.rows] == ["this system's retriever", "BM25"]
    assert found["recall"]["among"] == len(TRAIN) + 1


def test_what_was_kept_is_not_asked_again_and_the_file_is_the_same(run):
    swapped(run)
    expected = (run.directory / "swaps.jsonl.gz").read_bytes()
    (run.directory / "swaps.jsonl.gz").unlink()
    with pytest.raises(KeyboardInterrupt):
        swapped(run, Reader(most=15))
    again = Reader()
    swapped(run, again)
    assert 99 - again.most == 6 * (6 + 4) - 15
    assert (run.directory / "swaps.jsonl.gz").read_bytes() == expected
    with pytest.raises(KeyboardInterrupt):
        swapped(run, Reader(most=15))
    other = Reader()
    swapped(dataclasses.replace(run, plan=dataclasses.replace(run.plan, seed=4)), other)
    assert 99 - other.most == 6 * (6 + 4)  # of another seed


def test_fewer_rows_no_replies_and_no_recall(run):
    reader, rows = swapped(run, rows=3, replies=0, recall=False)
    assert len(rows) == 6 * 3
    assert not [row for row in rows if "response" in row]
    assert all(isinstance(asked, str) for asked in reader.asked)
    about = read_json(run.directory / "swaps.json")
    assert "recall" not in about
    assert (about["data"]["rows"], about["data"]["replies"]) == (3, 0)
    found = score_stages(run.files, {"run": ["swaps"]}, samples=50, seed=0)["swaps"]
    assert len(tables({"swaps": {"swaps": found}})) == 2


def test_without_emotions_that_line_is_absent_and_says_why(run):
    rows = [dataclasses.replace(i, emotion="") for i in TEST]
    write_jsonl(run.files.instances("test"), map(instance_to_row, rows))
    _, rows = swapped(run)
    assert "same_emotion" not in {row["given"] for row in rows}
    found = score_stages(run.files, {"run": ["swaps"]}, samples=50, seed=0)["swaps"]
    assert "random, same emotion is absent: no row has an emotion." in tables({"swaps": {"swaps": found}})[0].note


def test_what_reads_no_exemplars_is_refused_before_any_work(run):
    swaps.check(settings_of(), with_reader(run))
    with pytest.raises(ConfigError, match=r"config\.generator, which reads no exemplars; leave 'swaps' out"):
        swaps.check(settings_of(evaluation="plain"), with_reader(run))
    with pytest.raises(ConfigError, match=r"answers dailydialog; name a stage that answers the run's own data"):
        swaps.check(settings_of(evaluation="elsewhere"), with_reader(run))
    with pytest.raises(ConfigError, match=r"config\.swaps\.evaluation = 'nothing'"):
        swaps.check(settings_of(evaluation="nothing"), with_reader(run))
