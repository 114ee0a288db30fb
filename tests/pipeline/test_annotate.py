"""The attributes of every instance: VADER's and the classifiers'."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import f1_score

from empax.core.files import WorkDir, read_jsonl, write_jsonl
from empax.core.system import RunContext
from empax.core.types import ATTRIBUTES, MECHANISMS, Instance
from empax.data.dialogues import instance_to_row
from empax.parts.attributes.pairs import Pair
from empax.pipeline import annotate
from tests.plans import plan_of

RESPONSE = "I love you, that is wonderful, great, perfect!"


@dataclasses.dataclass
class CountingJudge:
    """Level of each mechanism by the number of words that it is shown; remembers the texts."""

    mechanisms: tuple
    hash: str = "judge"
    seen: list = dataclasses.field(default_factory=list)

    @property
    def task(self):
        return SimpleNamespace(mechanisms=self.mechanisms)

    def __call__(self, contexts, responses):
        self.seen += [(tuple(context), response) for context, response in zip(contexts, responses, strict=True)]
        words = [len(" ".join([*c, r]).split()) for c, r in zip(contexts, responses, strict=True)]
        levels = np.array([[(n + MECHANISMS.index(name)) % 3 for name in self.mechanisms] for n in words])
        return np.eye(3)[levels]


def test_sentiment_is_vaders_compound_cut_at_the_threshold(monkeypatch):
    texts = ["I love this, it is wonderful!", "This is horrible, I hate it.", "The table is made of wood."]
    assert annotate.sentiment_levels(texts) == ["high", "low", "mid"]
    compounds = {"a": 0.05, "b": 0.0499, "c": -0.0499, "d": -0.05}  # at the threshold counts as beyond it
    monkeypatch.setattr(annotate, "sentiment", compounds.get)
    assert annotate.sentiment_levels(list(compounds)) == ["high", "mid", "mid", "low"]


def test_levels_come_in_the_order_of_the_attributes_whoever_gives_them():
    judges = [CountingJudge(("exploration",)), CountingJudge(("interpretation", "emotional_reaction"))]
    (found,) = annotate.judge_levels(judges, [("I love it",)], ["so much"])
    assert tuple(found) == ATTRIBUTES
    assert found == {"sentiment": "high", "emotional_reaction": "high", "interpretation": "low", "exploration": "mid"}


def test_what_nobody_gives_is_no_attribute():
    assert annotate.judge_levels([], [("I love it",)], ["so much"]) == [{"sentiment": "high"}]
    (found,) = annotate.judge_levels([CountingJudge(("exploration",))], [("I love it",)], ["so much"])
    assert found == {"sentiment": "high", "exploration": "mid"}


@pytest.fixture
def run(tmp_path, own_cache):
    context = RunContext(WorkDir(tmp_path / "run"), plan_of({}), "annotate")
    for split in annotate.SPLITS:
        rows = [Instance(f"{split}-{i}#2", (f"I am {'so ' * i}sad",), RESPONSE, "sad") for i in range(3)]
        write_jsonl(context.files.instances(split), map(instance_to_row, rows))
    return context


def annotated(run, monkeypatch, *, contexts=True, **changes):
    judge = CountingJudge(("emotional_reaction", "interpretation", "exploration"), **changes)
    monkeypatch.setattr(annotate.attributes, "load_judge", lambda context, stage: judge)
    monkeypatch.setattr(annotate.attributes, "load_holdout", lambda context, stage: [])
    monkeypatch.setattr(annotate, "held_out_quality", lambda *_: {"quality": 1})
    annotate.run(annotate.Settings(contexts=contexts), run)
    return judge, {split: list(read_jsonl(run.files.notes("annotate", split))) for split in annotate.SPLITS}


def test_only_training_responses_are_ever_read(run, monkeypatch):
    judge, rows = annotated(run, monkeypatch)
    for split in annotate.SPLITS:
        keys = {"id", "context_attributes"} | ({"response_attributes"} if split == "train" else set())
        assert [set(row) for row in rows[split]] == [keys] * 3
        assert [row["id"] for row in rows[split]] == [f"{split}-{i}#2" for i in range(3)]
    assert sum(response == RESPONSE for _, response in judge.seen) == 3
    assert len(judge.seen) == 4 * 3  # contexts of three splits, responses of one
    assert all(row["context_attributes"]["sentiment"] == "low" for row in rows["train"])
    assert all(row["response_attributes"]["sentiment"] == "high" for row in rows["train"])


def test_contexts_may_be_left_out(run, monkeypatch):
    judge, rows = annotated(run, monkeypatch, contexts=False)
    assert [set(rows[split][0]) for split in annotate.SPLITS] == [{"id", "response_attributes"}, {"id"}, {"id"}]
    assert [response for _, response in judge.seen] == [RESPONSE] * 3
    _, whole = annotated(run, monkeypatch)
    assert whole["train"][0]["response_attributes"] == rows["train"][0]["response_attributes"]


def test_quality_is_that_of_three_levels_and_of_two(monkeypatch):
    gold = ["low", "low", "mid", "high", "mid"]
    pairs = [Pair((str(i),), "", (annotate.LEVELS.index(level),)) for i, level in enumerate(gold)]
    guess = [0, 1, 2, 2, 0]
    judge = CountingJudge(("exploration",))
    judge.predict = lambda contexts, responses: np.eye(3)[guess][:, None]
    monkeypatch.setattr(CountingJudge, "__call__", lambda self, *texts: self.predict(*texts))
    monkeypatch.setattr(annotate.attributes, "load_holdout", lambda run, stage: pairs)
    found = annotate.held_out_quality(("judges",), None, [judge])["exploration"]
    assert (found["accuracy"], found["binary_accuracy"]) == (pytest.approx(40.0), pytest.approx(60.0))
    two = [[int(level > 0) for level in levels] for levels in ([0, 0, 1, 2, 1], guess)]
    assert found["binary_weighted_f1"] == pytest.approx(100 * f1_score(*two, average="weighted"))


def test_annotations_are_kept_under_what_made_them(run, monkeypatch):
    _, rows = annotated(run, monkeypatch)
    again, found = annotated(run, monkeypatch)
    assert not again.seen
    assert found == rows
    other, _ = annotated(run, monkeypatch, hash="another judge")
    assert len(other.seen) == 12
    changed = [Instance("test-0#2", ("I am glad",), RESPONSE, "sad")]
    write_jsonl(run.files.instances("test"), map(instance_to_row, changed))
    partly, found = annotated(run, monkeypatch)
    assert partly.seen == [(("I am glad",), "")]
    assert found["test"][0]["context_attributes"]["sentiment"] == "high"
