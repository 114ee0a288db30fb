"""The published judge: changes of MiniLM's weights become the identifiers that were trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json, write_json
from empax.core.tree import named_leaves
from empax.core.types import LEVELS, MECHANISMS
from empax.data.wheels import published_folder
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models.lora import LoraSettings
from empax.parts.attributes.identifier import IdentifierTaskSettings, make_task
from empax.parts.attributes.pairs import AttributeBatch
from empax.parts.attributes.published import CONFIG, FILE, NAME, changed, load_published
from tests.systems.learning import random_like
from tools.publish_judge import RANK, reduced

STAGE = IdentifierTaskSettings(encoder=EncoderSettings(d_model=8, num_heads=2, d_ff=16, num_layers=2))


@pytest.fixture(scope="module")
def trained(tokenizer):
    """Identifiers, and the encoder that both of theirs started from; the word embeddings have not changed."""
    loaded = load_encoder(STAGE.encoder, tokenizer)
    ids = jnp.zeros((1, 4), jnp.int32)
    batch = AttributeBatch(ids, ids == 0, ids, ids == 0, valid=jnp.ones(1, bool), labels=ids[:, :3])
    params = random_like(make_task(STAGE, loaded).init(jax.random.key(0), batch), 1)
    start = jax.tree.map(lambda leaf: np.asarray(leaf) * 0.9, params["context_encoder"])
    for tower in ("context_encoder", "response_encoder"):
        params[tower] = {**params[tower], "token_embedding": start["token_embedding"]}
    return params, start


def test_changes_of_full_rank_give_the_trained_identifiers(trained):
    params, start = trained
    changes = reduced(params, start, LoraSettings(rank=8))
    assert not [name for name in changes if "token_embedding" in name]
    assert {str(value.dtype) for value in changes.values()} == {"float16"}
    found, want = named_leaves(changed(start, changes, 8)), named_leaves(params)
    assert sorted(found) == sorted(want)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-3, err_msg=name)


def test_changes_of_low_rank_are_the_best_ones(trained):
    params, start = trained
    found = changed(start, reduced(params, start, LoraSettings(rank=2)), 2)
    trees = [named_leaves(tree) for tree in (start, params["response_encoder"], found["response_encoder"])]
    for inside, columns in (("attention/query", 8), ("attention/out", 8), ("feed_forward/wi", 16)):
        (name,) = (name for name in trees[0] if name.endswith(inside))
        first, own, kept = (np.asarray(tree[name])[1].reshape(-1, columns).astype(np.float64) for tree in trees)
        u, s, v = np.linalg.svd(own - first)
        np.testing.assert_allclose(kept - first, (u[:, :2] * s[:2]) @ v[:2], atol=5e-3)


def test_the_published_judge_knows_feelings_questions_and_understanding(minilm):
    judge = load_published()
    replies = [
        "I'm so sorry, that makes me really sad.",
        "What happened? When did you see her last?",
        "The shop closes at nine.",
    ]
    levels = judge([["My dog died last night and I cannot stop crying."]] * 3, replies, progress=False).argmax(axis=2)
    reaction, exploration = (MECHANISMS.index(name) for name in ("emotional_reaction", "exploration"))
    assert [LEVELS[level] for level in levels[:, reaction]] == ["high", "low", "low"]
    assert LEVELS[levels[1, exploration]] == "high"
    assert LEVELS[levels[2, exploration]] == "low"


def test_the_published_folder_is_small_and_its_card_has_its_numbers():
    folder = published_folder(NAME)
    about, card = read_json(folder / CONFIG), (folder / "README.md").read_text(encoding="utf-8")
    assert about["rank"] == RANK
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6
    for name, found in about["held_out"].items():
        cells = [f"{found[key]:.1f}" for key in ("accuracy", "weighted_f1", "macro_f1")]
        assert " | ".join([name.replace("_", " "), *cells, f"{found['kappa']:.2f}"]) in card


def test_files_that_do_not_fit_are_refused(minilm, tmp_path):
    about = {"rank": 2, "settings": dataclasses.asdict(STAGE) | {"encoder": {"pretrained": "minilm"}}}
    write_json(tmp_path / CONFIG, about)
    wrong = {"context_encoder/layers/attention/query/a": np.zeros((6, 5, 2), np.float16)}
    wrong |= {"context_encoder/layers/attention/query/b": np.zeros((6, 2, 12, 32), np.float16)}
    safetensors.numpy.save_file(wrong, tmp_path / FILE)
    with pytest.raises(DataError, match="does not fit minilm"):
        load_published(tmp_path)
    write_json(tmp_path / CONFIG, {"rank": 2})
    with pytest.raises(DataError, match=r"config\.json lacks settings; copy the folder again"):
        load_published(tmp_path)
    write_json(tmp_path / CONFIG, about | {"settings": {"pooling": "sum"}})
    with pytest.raises(ConfigError, match=r"config.json: settings.pooling"):
        load_published(tmp_path)
