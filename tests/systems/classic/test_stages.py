"""What is known to be wrong before any work."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import classic
from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.system import RunContext
from empax.data.store import PlannedTokenizer
from empax.pipeline import run
from empax.pipeline.plan import make_plan, plain
from empax.systems.classic import stages
from empax.systems.classic.settings import ClassicSettings, ClassicTaskSettings
from tests.own_corpus import write_rows


def problems(name, **changes):
    config = plain(classic.get_config(f"{name},tiny"))
    for path, value in changes.items():
        section = config
        *sections, last = path.split("__")
        for part in sections:
            section = section[part]
        section[last] = value
    config = {name: section for name, section in config.items() if section is not None}
    return [str(problem) for problem in run.find_problems(make_plan(config), WorkDir(Path("nowhere")))]


@pytest.mark.parametrize("name", classic.FORMS)
def test_recipes_are_right(name):
    assert problems(name) == []


@pytest.mark.parametrize("lines", ["sad 1 2 3\n", "9 3\nsad 1 2 3\n"])
def test_word_vectors_of_another_size_are_named_before_any_work(lines, tmp_path):
    (path := tmp_path / "vectors.txt").write_text(lines)
    (found,) = problems("transformer", classic__vectors=str(path))
    assert "have 3 dimensions, but d_model = 32; set it to 3" in found
    assert problems("transformer", classic__vectors=str(path), classic__d_model=3) == []


def test_only_training_needs_the_word_vectors():
    """Those that a trained model began with may be gone, as spaCy's are."""
    config = plain(classic.get_config("transformer,tiny"))
    config["classic"]["vectors"] = "spacy-md"
    plan, files = make_plan(config), WorkDir(Path("nowhere"))
    stages.check_system(RunContext(files, plan, "evaluate"))
    with pytest.raises(ConfigError, match="'spacy-md' is not a file"):
        stages.check_generator(plan.stages["generator"].settings, RunContext(files, plan, "generator"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "multi_trs", {"generator__weights": {}},
            "weights names none, but must name the losses of config.classic.readers, emotion (0 = it teaches nothing)",
        ),
        ("mime", {"generator__weights": {"emotion": 1.0}}, "losses of config.classic.readers, emotion, kl"),
        ("transformer", {"generator__weights": {"kl": 1.0}}, "names kl, but must name the losses of config.classic.r"),
        ("transformer", {"classic__vectors": "glove.txt"}, "vectors = 'glove.txt' is not a file"),
        ("empdg", {"classic__lexicon": "nrc.txt"}, "lexicon = 'nrc.txt' is not a file"),
        ("moel", {"prepare__tokenizer": {"vocab_size": 600}}, 'config.prepare.tokenizer.kind must be "words"'),
        ("case", {"generator__start_from": "bag"}, "config.generator.start_from = 'bag': config.run has no such stage"),
        (
            "cem", {"generator__weights": {"emotion": 1.0, "frequency": 1.5, "nll": 0.0}},
            "nll = 0 decodes nothing, but frequency = 1.5 learns from decoded text",
        ),
        (
            "cem", {"knowledge": {"kind": "knowledge", "entity": {"source": "sample"}}},
            "config.knowledge.social = None; set it to a source, or set config.classic.readers without refinement",
        ),
        ("kemp", {"knowledge": {"kind": "knowledge", "social": {"source": "sample"}}}, "reads facts about things"),
        (
            "cem", {"run": ["prepare", "generator", "evaluate", "report"], "knowledge": None},
            "no stage of kind 'knowledge' comes before it",
        ),
        ("emo_prepend", {"generator__prepend": "emotion"}, "config.generator.prepend = 'emotion'"),
        ("emo_prepend", {"emotions__weights": {"emotion": 0.0}}, "learns no emotions; set its weights.emotion above 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name, changes, message):
    (found,) = problems(name, **changes)
    assert message in found


def test_a_file_of_intensities_is_read_before_any_work(tmp_path):
    (path := tmp_path / "vad.txt").write_text("word valence arousal\nsad 0.1\n")
    (found,) = problems("kemp", classic__concepts={"intensity": str(path)})
    assert "line 2: 'sad 0.1' must be a word, its valence, its arousal" in found


def test_emotions_that_no_dialogue_names_cannot_be_learnt(tmp_path):
    folder = write_rows(tmp_path, {"id": "a", "utterances": ["I won!", "Well done!"]})
    bare = {"data__name": "jsonl", "data__dir": str(folder)}
    (found,) = problems("emo_prepend", **bare)
    assert "config.emotions learns only emotions, but no dialogue of the split 'train' has one; add them" in found
    assert "or take configs/classic.py:transformer." in found
    assert not problems("transformer", **bare)


def test_on_a_small_corpus_the_teacher_leaves_as_much_sooner():
    config = plain(classic.get_config("moel,tiny"))
    config["generator"]["steps"] = 600
    config["classic"]["listeners"]["teacher_decay_steps"] = 200
    config["data"] = {"name": "jsonl", "dir": "nowhere", "most_passes": 10}
    tokenizer, files = PlannedTokenizer(100), WorkDir(Path("nowhere"))

    def decay(config, num_examples):
        context = RunContext(files, make_plan(config), "generator")
        parts = stages.ClassicParts(context.shared_settings(ClassicSettings), tokenizer)
        found = stages._with_shorter_teacher(parts, num_examples, context).task(ClassicTaskSettings())
        return dict(found.model.readers)["listeners"].teacher_decay_steps

    assert [decay(config, rows) for rows in (10_000, 240, 1)] == [200, 100, 3]  # 300 steps of 8 are ten passes of 240
    assert decay({**config, "data": {"name": "sample"}}, 240) == 200


@pytest.mark.parametrize(
    ("smoothing", "shares"), [(0.0, [1 / 9, 3 / 9, 3 / 9, 2 / 9]), (0.1, [0.125, 0.325, 0.325, 0.225])]
)
def test_the_output_bias_begins_with_the_frequencies_of_words(smoothing, shares):
    parts = stages.ClassicParts(ClassicSettings(), SimpleNamespace(vocab_size=4))
    made = parts.initial({"output_bias": 0.0, "core": {"token_embedding": 1.0}}, [[2, 2, 1], [3, 1]], smoothing)
    np.testing.assert_allclose(np.exp(made["output_bias"]), shares, rtol=1e-6)
    assert made["output_bias"].dtype == np.float32
    assert made["core"] == {"token_embedding": 1.0}


def test_a_stage_goes_on_from_an_earlier_one(monkeypatch):
    run = SimpleNamespace(files=SimpleNamespace(stage=lambda name: f"params of {name}"))
    parts = SimpleNamespace(initial=lambda *given: given)
    monkeypatch.setattr(stages, "load_params", lambda path: path)
    made = stages._initial(ClassicTaskSettings(start_from="choice"), parts, run, [])
    assert made({"fresh": 1}) == "params of choice"
    made = stages._initial(ClassicTaskSettings(label_smoothing=0.1), parts, run, [[5]])
    assert made({"fresh": 1}) == ({"fresh": 1}, [[5]], 0.1)
    config = plain(classic.get_config("case,tiny"))
    assert config["generator"]["start_from"] == "choice"
    weights = config["choice"]["weights"]
    assert {name for name, weight in weights.items() if weight} == {"bag"}
    assert {*config["generator"]["weights"], "nll"} == set(weights)
