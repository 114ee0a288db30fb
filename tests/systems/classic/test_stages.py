"""What is known to be wrong before any work."""

from pathlib import Path

import pytest

from configs import classic
from empax.core.files import WorkDir
from empax.pipeline import run
from empax.pipeline.plan import make_plan, plain


def problems(name, **changes):
    config = plain(classic.get_config(f"{name},tiny"))
    for path, value in changes.items():
        section = config
        *sections, last = path.split("__")
        for part in sections:
            section = section[part]
        section[last] = value
    return [str(problem) for problem in run.find_problems(make_plan(config), WorkDir(Path("nowhere")))]


@pytest.mark.parametrize("name", classic.FORMS)
def test_recipes_are_right(name):
    assert problems(name) == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "multi_trs",
            {"generator__weights": {}},
            "config.generator.weights lacks emotion, a loss of config.classic.re",
        ),
        ("mime", {"generator__weights": {"emotion": 1.0}}, "weights lacks kl"),
        (
            "transformer",
            {"generator__weights": {"kl": 1.0}},
            "weights.kl is no loss of this model; it has nll, f",
        ),
        ("transformer", {"classic__vectors": "glove.txt"}, "vectors = 'glove.txt' is no file"),
        ("empdg", {"classic__lexicon": "nrc.txt"}, "lexicon = 'nrc.txt' is no file"),
        ("moel", {"prepare__tokenizer": {"vocab_size": 600}}, 'config.prepare.tokenizer.kind must be "words"'),
        ("emo_prepend", {"generator__prepend": "emotion"}, "config.generator.prepend = 'emotion'"),
        ("emo_prepend", {"emotions__weights": {"emotion": 0.0}}, "learns no emotions; set its weights.emotion above 0"),
    ],
)
def test_what_does_not_fit_is_named(name, changes, message):
    (found,) = problems(name, **changes)
    assert message in found
