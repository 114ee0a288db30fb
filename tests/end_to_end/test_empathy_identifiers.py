"""The identifiers' recipe in small: two kinds of judges, two splits, and a file that they score."""

import json
import math

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import read_json, read_jsonl
from empax.core.types import LEVELS, MECHANISMS
from empax.parts import attributes
from empax.pipeline import judging
from empax.training.checkpoint import load_params
from tests.plans import context_of

pytestmark = pytest.mark.slow

RECIPE = """
from configs import common, empathy_identifiers

def get_config():
    config = empathy_identifiers.get_config("tiny")
    config.second_seed = empathy_identifiers.tiny(mechanisms=("exploration",), seed=1, class_weights=True)
    config.classifier = common.train(
        task="classifier", steps=2, batch_size=8, learning_rate=1e-3, data="sample", max_tokens=16, buckets=(16,),
        encoder={"d_model": 16, "num_heads": 2, "d_ff": 32}, best_metric="weighted_f1", best_mode="max",
    )
    config.assess.judges = ("identifiers", "second_seed", "classifier")
    config.run = ("prepare", *config.assess.judges, "assess")
    return config
"""


@pytest.fixture(scope="module")
def workdir(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("identifiers")
    config = folder / "small.py"
    config.write_text(RECIPE)
    recipe(folder / "run", "--check", config=str(config))
    return folder / "run"


def test_every_judge_is_assessed_on_posts_that_it_never_saw(workdir):
    quality = read_json(workdir / "assess" / "classifiers.json")
    assert set(quality) == {*MECHANISMS, "second_seed/exploration", *(f"classifier/{name}" for name in MECHANISMS)}
    for found in quality.values():
        assert found["pairs"] == np.sum(found["confusion"])
        assert found["accuracy"] == pytest.approx(100 * np.trace(found["confusion"]) / found["pairs"])
    run = context_of(workdir, "assess")
    one, other = (attributes.load_holdout(run, stage) for stage in ("identifiers", "second_seed"))
    assert {pair.context for pair in one} != {pair.context for pair in other}


def test_the_best_are_kept_by_weighted_f1_of_the_whole_evaluation(workdir):
    rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["stage"] == "identifiers"]
    validated = [row for row in rows if row["split"] == "validation"]
    best = read_json(workdir / "identifiers" / "DONE")
    assert best["best_value"] == max(row["weighted_f1"] for row in validated)
    quality = read_json(workdir / "assess" / "classifiers.json")
    at_best = next(row for row in validated if row["step"] == best["best_step"])
    for name in MECHANISMS:
        assert 100 * at_best[f"{name}_weighted_f1"] == pytest.approx(quality[name]["weighted_f1"], abs=1e-3)
    assert not any("_as_" in name or name.endswith("f1") for row in rows for name in row if row["split"] == "train")
    assert not any("_as_" in name for row in validated for name in row)


def test_both_encoders_are_trained_and_apart(workdir):
    params = load_params(workdir / "identifiers", "last")
    assert set(params) == {"context_encoder", "response_encoder", *MECHANISMS}
    kept = (params[f"{side}_encoder"]["stack"] for side in ("context", "response"))
    assert len({str(tree) for tree in kept}) == 2


def test_the_identifiers_of_a_work_directory_score_a_file(workdir, tmp_path, command):
    rows = [
        {"context": [f"I lost game {i}."], "response": text, "reference": "I am sorry. What happened?"}
        for i, text in enumerate(["I am sorry. What happened?"] * 3 + ["Well done!"])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = [f"--predictions={path}", "--bootstrap_samples=5"]
    result = command("-m", "empax.evaluate", *options, f"--output={tmp_path / 'out'}", f"--empathy={workdir}")
    assert result.returncode == 0, result.stderr
    metrics = read_json(tmp_path / "out" / "report.json")["metrics"]
    names = [f"{name}_f1" for name in MECHANISMS]
    assert metrics["empathy_f1"]["value"] == pytest.approx(np.mean([metrics[name]["value"] for name in names]))
    (identifiers,) = judging.find_judges(workdir)
    levels = [
        identifiers([row["context"] for row in rows], [row[whose] for row in rows]).argmax(axis=-1)
        for whose in ("response", "reference")
    ]
    np.testing.assert_array_equal(levels[0][:3], levels[1][:3])
    assert all(math.isfinite(metrics[name]["value"]) for name in names)
    assert {name: metrics[name]["value"] == pytest.approx(100.0) for name in names} == {
        name: bool((levels[0][:, c] == levels[1][:, c]).all()) for c, name in enumerate(names)
    }


def test_which_judges_of_a_work_directory_are_meant(workdir, tmp_path):
    (identifiers,) = judging.find_judges(workdir)
    assert isinstance(identifiers, attributes.IdentifierJudge)
    (classifier,) = judging.find_judges(workdir / "classifier")
    assert isinstance(classifier.task, attributes.classifier.Classifier)
    found = classifier([("My dog died.",)] * 2, ["Oh no!", ""])
    assert found.shape == (2, len(MECHANISMS), len(LEVELS))
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1.0, rtol=1e-5)
    with pytest.raises(
        ConfigError, match=r"no judges that cover emotional_reaction, .* it trains: identifiers second_seed"
    ):
        judging.find_judges(workdir / "second_seed")
    with pytest.raises(ConfigError, match="holds no run"):
        judging.find_judges(tmp_path)
    run = context_of(workdir, "evaluate")
    with pytest.raises(ConfigError, match=r"config\.assess trains no judge"):
        judging.load_judges("assess", run)
    with pytest.raises(ConfigError, match=r"config\.evaluate\.judge lacks a classifier of emotional_reaction"):
        judging.check_judges("judge", ("second_seed",), run)
