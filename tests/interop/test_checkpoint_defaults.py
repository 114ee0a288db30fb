"""What a config.json says holds, and its silence means what it means to transformers; dropout place by place."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
import torch

from empax.core.config import ConfigError
from empax.interop.architectures import ARCHITECTURES, with_dropout
from empax.interop.huggingface import model_config
from empax.models import layers
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.transformer import EncoderDecoder
from tests.interop.tiny import BART, BERT, SIZES, T5, class_of, tiny

OF_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
OF_BART = ("dropout", "attention_dropout", "activation_dropout")
NAMES = {
    **dict.fromkeys(("t5", "mt5"), ("dropout_rate",)),
    **dict.fromkeys(("bart", "blenderbot", "mbart", "marian", "pegasus"), OF_BART),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "mpnet", "electra", "dpr"), OF_BERT),
    **dict.fromkeys(("distilbert", "opt"), ("dropout", "attention_dropout")),
    "gpt2": ("resid_pdrop", "attn_pdrop", "embd_pdrop"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("attention_dropout",)),
}
"""Of the rates, by architecture."""
RATES = (0.1, 0.2, 0.3)


def test_every_architecture_is_looked_at():
    assert set(NAMES) == set(ARCHITECTURES)


def place(shape):
    """Where something is dropped out: attention weights, the feed-forward's inside, or states."""
    return "attention" if len(shape) == 4 else "states" if shape[-1] in (T5["d_model"], BART["d_model"]) else "inside"


@contextlib.contextmanager
def watched(monkeypatch, module, name):
    """Places and rates of every dropout that is called."""
    found = set()
    real = getattr(module, name)

    def watch(values, rate=0.5, *rest, **named):
        rate = named.get("p", rate)
        if rate:
            found.add((place(values.shape), rate))
        return real(values, rate, *rest, **{key: value for key, value in named.items() if key != "p"})

    with monkeypatch.context() as patch:
        patch.setattr(module, name, watch)
        yield found


def their_rates(monkeypatch, kind, rates):
    made = tiny(kind, attn_implementation="eager", **rates).train()
    ids = torch.ones((2, 3), dtype=torch.long)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if made.config.is_encoder_decoder else {})
    with watched(monkeypatch, torch.nn.functional, "dropout") as found:
        made(**inputs)
    return found


def our_rates(monkeypatch, config):
    ids, mask = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    model, inputs = EncoderDecoder(config), (ids, mask, ids)
    if isinstance(config, BertConfig):
        model, inputs = BertEncoder(config), (ids, mask)
    elif isinstance(config, DecoderOnlyConfig):
        model, inputs = DecoderOnly(config), (ids, mask)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with watched(monkeypatch, layers, "dropout") as found:
        jax.eval_shape(lambda: model.init(keys, *inputs, deterministic=False))
    return found


def read(kind, rates):
    absent = {name for name in NAMES[kind] if name not in rates}
    fields = class_of(kind).config_class(**SIZES.get(kind, BERT), **rates).to_dict()
    return model_config({name: value for name, value in fields.items() if value is not None and name not in absent})


@pytest.mark.oracle
@pytest.mark.parametrize("kind", NAMES)
def test_each_place_drops_out_as_in_transformers(kind, monkeypatch):
    names = NAMES[kind]
    for rates in (dict(zip(names, RATES, strict=False)), {}):
        assert our_rates(monkeypatch, read(kind, rates)) == their_rates(monkeypatch, kind, rates), rates


@pytest.mark.parametrize("kind", ["bart", "bert", "gpt2", "llama"])
def test_one_rate_takes_the_place_of_all(kind, monkeypatch):
    config = read(kind, dict(zip(NAMES[kind], RATES, strict=False)))
    assert our_rates(monkeypatch, with_dropout(config, 0.0)) == set()
    assert {rate for _, rate in our_rates(monkeypatch, with_dropout(config, 0.4))} == {0.4}
    assert with_dropout(config, None) == config


FROM_THE_FILE = {("mt5", "tie_word_embeddings"), ("mistral", "num_key_value_heads")}
"""What the shapes of the weights decide."""


@pytest.mark.oracle
@pytest.mark.parametrize("kind", NAMES)
def test_an_absent_field_means_what_transformers_takes(kind):
    """Or the field is asked for."""
    made = class_of(kind).config_class(**({"decoder_start_token_id": 2} if kind == "mbart" else {}))
    fields = {name: value for name, value in made.to_dict().items() if value is not None}
    whole = model_config(fields)
    for name in set(fields) - {"model_type"}:
        if (kind, name) in FROM_THE_FILE:
            continue
        found = config_or_refusal({other: value for other, value in fields.items() if other != name})
        assert found == whole or f" lacks {name}" in str(found), name


def config_or_refusal(fields):
    try:
        return model_config(fields)
    except ConfigError as error:
        return error
