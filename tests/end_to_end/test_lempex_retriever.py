"""LEMPEx' retriever in small: trained, killed and gone on with, searched and measured."""

import jax
import numpy as np
import pytest

from empax.core.files import read_json
from empax.data.store import load_candidates, load_instances
from empax.serving.export import ExportSettings, export_run
from empax.training.checkpoint import load_params
from tests.plans import context_of

pytestmark = pytest.mark.slow

CONFIG = "configs/lempex_retriever.py:tiny"


def test_a_killed_run_ends_with_the_same_bits(workdir, recipe, tmp_path):
    broken = tmp_path / "run"
    recipe(broken, "--stop=retriever:3:SIGKILL", config=CONFIG, code=-9)
    assert not (broken / "retriever" / "DONE").exists()
    recipe(broken, config=CONFIG)
    whole, again = (load_params(folder / "retriever", "last") for folder in (workdir, broken))
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    for folder in (workdir, broken):
        assert set(load_params(folder / "retriever")) == {"query_encoder", "key_encoder"}
    found = [read_json(folder / "index" / "index.json")["quality"] for folder in (workdir, broken)]
    assert found[0] == found[1]


def test_both_towers_are_trained_apart(workdir):
    params = load_params(workdir / "retriever", "last")
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params["query_encoder"], params["key_encoder"])
    assert max(jax.tree.leaves(apart)) > 1e-5
    assert apart["encoder"]["token_embedding"] == 0.0  # the recipe does not train it


def test_candidates_are_responses_of_other_dialogues_of_the_training_split(workdir):
    run = context_of(workdir, "index")
    train = load_instances(run, "train")
    for split in ("train", "validation", "test"):
        instances = load_instances(run, split)
        positions, ids = load_candidates(run, "index", split)
        assert ids.shape == (len(instances), 10)
        assert ids.min() >= 0
        for position, rows in zip(positions, ids, strict=True):
            assert instances[position].dialogue_id not in {train[row].dialogue_id for row in rows}


def test_both_index_stages_measure_retrieval(workdir):
    for stage in ("zero_shot", "index"):
        about = read_json(workdir / stage / "index.json")["quality"]
        for split in ("validation", "test"):
            assert {"exemplar_emotion_match_at_5", "exemplar_overlap", "gold_recall_at_10:all"} <= set(
                about[split]["metrics"]
            )


def test_each_tower_is_exported(workdir, tmp_path):
    for what in ("retriever", "key_retriever"):
        line = export_run(workdir, tmp_path / what, ExportSettings(stage="retriever", what=what))
        assert f"wrote the {what} of stage retriever" in line
        assert "a key is a response alone" in (tmp_path / what / "README.md").read_text()
