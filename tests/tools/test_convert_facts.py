"""Pickled facts of other systems: read as data, and refused wherever they would do more."""

import collections
import os
import pickle
import sys
import types

import numpy as np
import pytest

from empax.core.files import DataError
from empax.core.types import Dialogue, Instance, Utterance
from empax.data.dialogues import to_instances
from empax.data.knowledge import Fact, read_knowledge
from tools import convert_facts
from tools.convert_facts import read_cem, read_nec

INSTANCES = [Instance(f"d{i}#2", ("Hello.", "Hi.", f"I lost my dog {i}."), "Oh no.", "sad") for i in range(3)]
NEC = {"xReact": {str(i): ["sad", "none", f"mood {i}"] for i in range(3)}, "xWant": {str(i): [] for i in range(3)}}


def write(folder, value, protocol=4):
    path = folder / "facts.pkl"
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_necs_layout_is_read_in_every_protocol(protocol, tmp_path):
    found = read_nec(write(tmp_path, NEC, protocol), INSTANCES)
    head = INSTANCES[1].context[-1]
    assert found[1] == [Fact(head, "xReact", "sad"), Fact(head, "xReact", "mood 1", 1)]


@pytest.mark.parametrize("protocol", [2, 4])
def test_cems_layout_is_read_with_its_vocabulary_as_a_token(protocol, tmp_path, monkeypatch):
    module = types.ModuleType("src.utils.data.loader")
    module.Lang = type("Lang", (), {"__module__": module.__name__})
    for name in ("src", "src.utils", "src.utils.data"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vocabulary = module.Lang()
    vocabulary.word2index = {"dog": 5}
    column = [[[["to", "own", "it"]], [["food"]], [], [["cries"], ["weeps"]], [["sad"]]] for _ in INSTANCES]
    splits = [{"utt_cs": column, "emotion": np.int64(3)}, {"utt_cs": []}, {"utt_cs": []}, vocabulary]
    path = write(tmp_path, splits, protocol)
    monkeypatch.delitem(sys.modules, module.__name__)
    found = read_cem(path, "train", INSTANCES)
    assert [(fact.relation, fact.tail) for fact in found[0]] == [
        ("xIntent", "to own it"), ("xNeed", "food"), ("xEffect", "cries"), ("xEffect", "weeps"), ("xReact", "sad"),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"has 0 rows, but the split has 3 instances.*moel_compat = True"):
        read_cem(path, "test", INSTANCES)


class Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "attack",
    [
        Runs(os.system, ("touch {path}",)),
        Runs(eval, ("open('{path}', 'w')",)),
        Runs(open, ("{path}", "w")),
        collections.deque(["sad"]),
        collections.Counter(["sad"]),
        np.array(["sad"], object),
    ],
    ids=["system", "eval", "open", "deque", "Counter", "array"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_whatever_names_another_function_or_class_is_refused_and_nothing_happens(attack, protocol, tmp_path):
    mark = tmp_path / "happened"
    if isinstance(attack, Runs):
        attack = Runs(attack.call[0], tuple(text.format(path=mark) for text in attack.call[1]))
    path = write(tmp_path, {"xReact": {"0": ["sad"], "1": ["sad"], "2": [attack]}}, protocol)
    with pytest.raises(DataError, match=r"facts\.pkl asks for .*which could be an attack: refused"):
        read_nec(path, INSTANCES)
    assert not mark.exists()


def test_a_class_by_an_allowed_name_is_a_token_that_is_never_a_tail(tmp_path):
    content = b"\x80\x02csrc.utils.data.loader\nLang\n."
    with pytest.raises(DataError, match="must hold a dict of relations, but is a Token"):
        read_nec(write(tmp_path, content), INSTANCES)
    rows = {"xReact": {"0": [], "1": [], "2": [np.int64(3)]}}
    with pytest.raises(DataError, match="row 2: a tail must be a text or a list of words, but is a Call"):
        read_nec(write(tmp_path, rows), INSTANCES)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (pickle.dumps(NEC)[:40], "holds a broken pickle"),
        (b"", "is empty"),
        (["xReact"], "must hold a dict of relations, but is a list of 1"),
        ({"xReact": ["sad"]}, "'xReact' must be a relation with a dict of rows"),
        ({"xReact": {"0": []}}, "has 1 rows, but the split has 3 instances"),
        ({"xReact": {"0": [], "1": [], "3": []}}, "the relation xReact has no row '2'"),
        ({"xReact": {"0": [], "1": "sad", "2": []}}, "row 1: the tails must be a list of at most 1000, but are a str"),
        ({"xReact": {"0": [], "1": [], "2": [["a", 1]]}}, "row 2: a tail must be a text or a list of words"),
    ],
)
def test_what_is_no_pickle_of_facts_is_refused(value, said, tmp_path):
    with pytest.raises(DataError, match=said):
        read_nec(write(tmp_path, value), INSTANCES)


def test_a_pickle_that_holds_itself_many_times_over_takes_no_time(tmp_path):
    many = ["sad"]
    for _ in range(60):
        many = [many, many]
    rows = {"xReact": {"0": [], "1": [], "2": many}}
    with pytest.raises(DataError, match="row 2: a tail must be"):
        read_nec(write(tmp_path, rows), INSTANCES)


def test_there_must_be_a_file(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read_nec(tmp_path / "facts.pkl", INSTANCES)


def test_the_command_writes_what_a_run_reads(tmp_path, monkeypatch, capsys):
    turns = tuple(Utterance(who, text) for who, text in (("speaker", "I lost my dog."), ("listener", "Oh no.")))
    splits = {name: [Dialogue(f"{name}-{i}", "sad", f"{i}", turns) for i in range(3)] for name in convert_facts._SPLITS}
    monkeypatch.setattr(convert_facts.empathetic_dialogues, "load_dialogues", lambda data: splits)
    rows = {"xReact": {"0": ["sad"], "1": []}}  # of MoEL's three dialogues the last is lost
    write(tmp_path, rows)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert convert_facts.main(["nec", "~/facts.pkl", "~/facts", "--data=x"]) == 0
    instances = to_instances(splits["test"], moel_compat=True)
    known = read_knowledge(tmp_path / "facts" / "test.jsonl", instances)
    assert known.source == "pickle of NEC's layout facts.pkl"
    assert known.facts[instances[0].id] == [Fact("I lost my dog.", "xReact", "sad")]
    assert convert_facts.main(["cem", str(tmp_path / "facts.pkl"), str(tmp_path / "facts")]) == 2
    assert "must hold a list with a dict for each of train" in capsys.readouterr().err
