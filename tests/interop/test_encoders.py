"""BERT, RoBERTa, MPNet and DPR: positions, sides, folders, pooling. Values and gradients: `test_families.py`."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.bpe import train_bpe
from empax.interop.architectures import ARCHITECTURES
from empax.interop.parameters import import_params
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models.bert import BertEncoder
from tests.interop import oracle
from tests.interop.tiny import BERT, tiny

VOCAB, WIDTH = 301, 21
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 3, "max_position_embeddings": 20}
SIDES = {"dpr-context": "DPRContextEncoder", "dpr-question": "DPRQuestionEncoder"}


@functools.cache
def made(kind):
    more = {"architectures": [SIDES[kind]]} if kind in SIDES else {"type_vocab_size": 1} if kind == "roberta" else {}
    return tiny(SIDES.get(kind, kind), **SIZES, **more)


def test_positions_are_counted_over_real_tokens():
    config = ARCHITECTURES["roberta"].config(made("roberta").config.to_dict())
    model = BertEncoder(config)
    ids = jnp.asarray([[5, 6, 7, 8, 1, 1]])
    params = jax.jit(model.init)(jax.random.key(0), ids, ids > 1)
    apply = jax.jit(model.apply)
    right, left = apply(params, ids, ids > 1), apply(params, jnp.roll(ids, 2, axis=1), jnp.roll(ids > 1, 2, axis=1))
    np.testing.assert_allclose(left[:, 2:], right[:, :4], rtol=1e-5, atol=1e-6)
    too_many = jnp.full((1, 19), 5)
    with pytest.raises(ConfigError, match=r"19 tokens.*max_positions = 20, 18 of them"):
        model.apply(params, too_many, too_many > 1)


def test_a_dpr_encoder_of_the_other_side_is_refused():
    model = made("dpr-context")
    config = ARCHITECTURES["dpr"].config(model.config.to_dict() | {"architectures": ["DPRQuestionEncoder"]})
    with pytest.raises(
        DataError, match=r"missing question_encoder\.bert_model\.(.|\n)*surplus ctx_encoder\.bert_model"
    ):
        import_params("dpr", oracle.tensors_of(model), config)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dpr", {"projection_dim": 8}, "projection_dim = 8 of a DPR must be 0"),
        ("dpr", {"architectures": ["DPRReader"]}, "DPRContextEncoder, DPRQuestionEncoder"),
        ("roberta", {"position_embedding_type": "relative_key"}, "must be 'absolute'"),
        ("roberta", {"pad_token_id": None}, "positions are counted from it"),
        ("roberta", {"is_decoder": True}, "a RoBERTa is an encoder here"),
        ("roberta", {"max_position_embeddings": 2}, "leaves no position for a token"),
        ("roberta", {"hidden_act": "quick_gelu"}, "activation = 'quick_gelu' is unknown"),
        ("mpnet", {"relative_attention_num_buckets": 8}, "of an MPNet must be 32"),
        ("mpnet", {"hidden_size": 22}, "must be a multiple of num_heads = 3"),
    ],
)
def test_what_is_not_supported_is_a_config_error(kind, changes, message):
    fields = BERT | SIZES | {"architectures": ["DPRContextEncoder"]} | changes
    with pytest.raises(ConfigError, match=message):
        ARCHITECTURES[kind].config(fields).transformer()


# Folders


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["a b"], vocab_size=300)


def saved(kind, folder, tokenizer, **pooling):
    made(kind).save_pretrained(folder)
    tokenizer.save(folder)
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "dpr-context", "dpr-question"])
def test_folders_load_and_may_be_cut(kind, tmp_path, tokenizer):
    folder = saved(kind, tmp_path, tokenizer)
    loaded = load_encoder(EncoderSettings(pretrained=folder, num_layers=1, dropout=0.0), tokenizer)
    assert loaded.model.encoder.config.num_layers == 1
    assert loaded.model.pooling == ("cls" if "dpr" in kind else "mean")
    ids = jnp.asarray([[4, 5, 6]])
    vectors = loaded.model.apply({"params": loaded.params}, ids, ids > 0)
    assert vectors.shape == (1, WIDTH)
    mean = EncoderSettings(pretrained=folder, pooling="mean")
    assert load_encoder(mean, tokenizer, with_params=False).model.pooling == "mean"


def test_a_pooling_that_is_not_here_is_refused(tmp_path, tokenizer):
    folder = saved("mpnet", tmp_path, tokenizer, pooling_mode_max_tokens=True, pooling_mode_mean_tokens=True)
    with pytest.raises(
        ConfigError, match=r"asks for mean, max; only one of mean, cls, max, .*: set pooling to override it"
    ):
        load_encoder(EncoderSettings(pretrained=folder), tokenizer, with_params=False)
    chosen = EncoderSettings(pretrained=folder, pooling="mean")
    assert load_encoder(chosen, tokenizer, with_params=False).model.pooling == "mean"
