"""What earlier stages left, as later ones find it."""

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, write_jsonl
from empax.core.protocols import Tokenizer
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data import features
from empax.data.bpe import train_bpe
from empax.data.dialogues import instance_to_row
from empax.data.store import load_candidates, load_instances, run_tokenizer
from tests.plans import plan_of

INSTANCES = [Instance(f"d{i}#2", (f"turn {i}",), "yes", "sad", {"kept": i}) for i in range(3)]


@pytest.fixture
def run(tmp_path):
    prepare = {"kind": "prepare", "tokenizer": {"vocab_size": 321}}
    plan = plan_of({"prepare": prepare, "annotate": {"kind": "annotate"}, "intents": {"kind": "annotate"}})
    context = RunContext(WorkDir(tmp_path), plan, "joint")
    write_jsonl(context.files.instances("train"), map(instance_to_row, INSTANCES))
    return context


def test_annotations_join_by_id_whatever_their_order(run):
    assert load_instances(run, "train") == INSTANCES
    rows = [{"id": i.id, "context_attributes": {"sentiment": "low", "n": i.id}} for i in reversed(INSTANCES)]
    write_jsonl(run.files.notes("annotate", "train"), rows)
    found = load_instances(run, "train")
    assert [i.notes["context_attributes"]["n"] for i in found] == [i.id for i in INSTANCES]
    assert [i.notes["kept"] for i in found] == [0, 1, 2]


def test_notes_of_several_stages_are_merged(run):
    write_jsonl(run.files.notes("annotate", "train"), [{"id": i.id, "mood": "low"} for i in INSTANCES])
    write_jsonl(run.files.notes("intents", "train"), [{"id": i.id, "intent": f"of {i.id}"} for i in INSTANCES])
    assert [i.notes["intent"] for i in load_instances(run, "train")] == [f"of {i.id}" for i in INSTANCES]
    assert {i.notes["mood"] for i in load_instances(run, "train")} == {"low"}
    first = load_instances(run.at("intents"), "train")  # what comes later is not there yet
    assert not any("intent" in i.notes for i in first)
    assert {i.notes["mood"] for i in first} == {"low"}


def test_annotations_that_lack_an_instance_are_refused(run):
    write_jsonl(run.files.notes("annotate", "train"), [{"id": "d0#2"}])
    with pytest.raises(DataError, match=r"lacks 2 instances, the first is d1#2\. Run again with --redo=annotate"):
        load_instances(run, "train")


def test_candidates_come_with_the_positions_that_were_searched(run):
    folder = run.files.stage("index")
    folder.mkdir()
    np.savez(folder / "candidates_train.npz", positions=np.array([2, 0]), ids=np.array([[1, -1], [2, 1]]))
    positions, ids = load_candidates(run, "index", "train")
    np.testing.assert_array_equal(positions, [2, 0])
    np.testing.assert_array_equal(ids, [[1, -1], [2, 1]])
    with pytest.raises(ConfigError, match=r"joint needs 'validation' among config\.index\.queries"):
        load_candidates(run, "index", "validation")


def test_a_plan_has_a_tokenizer_of_the_size_to_come_and_a_run_its_own(run):
    planned = run_tokenizer(run, planned=True)
    assert isinstance(planned, Tokenizer)
    assert planned.vocab_size == 321
    assert planned.token_id("<sentiment:low>") < 321
    assert len(planned.encode("a prompt of 25 characters")) == 7
    with pytest.raises(NotImplementedError, match="reads no text"):
        planned.encode_batch(["a"])
    trained = train_bpe(["a text"], vocab_size=300, special_tokens=features.SPECIAL_TOKENS)
    trained.save(run.files.tokenizer)
    assert run_tokenizer(run).encode("a text") == trained.encode("a text")


def test_a_plan_takes_the_default_size_where_the_recipe_names_none(tmp_path):
    context = RunContext(WorkDir(tmp_path), plan_of({"prepare": {"kind": "prepare"}}), "generator")
    assert run_tokenizer(context, planned=True).vocab_size == 12_000
