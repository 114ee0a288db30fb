"""What a config.json says holds, and its silence means what it means to transformers; dropout place by place."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers as t

from empax.core.config import ConfigError
from empax.interop.architectures import ARCHITECTURES, with_dropout
from empax.interop.huggingface import model_config
from empax.models import layers
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.transformer import EncoderDecoder

WIDTH, INNER, VOCAB = 12, 20, 30
BERT = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": INNER, "num_hidden_layers": 2}
LLAMA = BERT | {"num_key_value_heads": 2}
T5 = {"d_model": WIDTH, "d_kv": 6, "num_heads": 2, "d_ff": INNER, "num_layers": 2, "decoder_start_token_id": 0}
BART = {"d_model": WIDTH} | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", INNER))
}
DISTIL = {"dim": WIDTH, "n_heads": 2, "n_layers": 2, "hidden_dim": INNER}
GPT2 = {"n_embd": WIDTH, "n_head": 2, "n_layer": 2, "n_inner": INNER}
OPT = {"hidden_size": WIDTH, "num_attention_heads": 2, "ffn_dim": INNER, "num_hidden_layers": 2}
OPT |= {"word_embed_proj_dim": WIDTH}

OF_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
OF_BART = ("dropout", "attention_dropout", "activation_dropout")
# Settings, model, sizes, and the names of the rates.
KINDS = {
    "t5": (t.T5Config, t.T5ForConditionalGeneration, T5, ("dropout_rate",)),
    "mt5": (t.MT5Config, t.MT5ForConditionalGeneration, T5, ("dropout_rate",)),
    "bart": (t.BartConfig, t.BartForConditionalGeneration, BART, OF_BART),
    "blenderbot": (t.BlenderbotConfig, t.BlenderbotForConditionalGeneration, BART, OF_BART),
    "mbart": (t.MBartConfig, t.MBartForConditionalGeneration, BART | {"decoder_start_token_id": 2}, OF_BART),
    "marian": (t.MarianConfig, t.MarianMTModel, BART | {"pad_token_id": 0, "decoder_start_token_id": 0}, OF_BART),
    "pegasus": (t.PegasusConfig, t.PegasusForConditionalGeneration, BART, OF_BART),
    "bert": (t.BertConfig, t.BertModel, BERT, OF_BERT),
    "roberta": (t.RobertaConfig, t.RobertaModel, BERT, OF_BERT),
    "xlm-roberta": (t.XLMRobertaConfig, t.XLMRobertaModel, BERT, OF_BERT),
    "mpnet": (t.MPNetConfig, t.MPNetModel, BERT, OF_BERT),
    "electra": (t.ElectraConfig, t.ElectraModel, BERT | {"embedding_size": WIDTH}, OF_BERT),
    "dpr": (t.DPRConfig, t.DPRContextEncoder, BERT, OF_BERT),
    "distilbert": (t.DistilBertConfig, t.DistilBertModel, DISTIL, ("dropout", "attention_dropout")),
    "gpt2": (t.GPT2Config, t.GPT2LMHeadModel, GPT2, ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
    "opt": (t.OPTConfig, t.OPTForCausalLM, OPT, ("dropout", "attention_dropout")),
    "llama": (t.LlamaConfig, t.LlamaForCausalLM, LLAMA, ("attention_dropout",)),
    "mistral": (t.MistralConfig, t.MistralForCausalLM, LLAMA, ("attention_dropout",)),
    "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM, LLAMA, ("attention_dropout",)),
    "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, LLAMA | {"head_dim": 6}, ("attention_dropout",)),
}
RATES = (0.1, 0.2, 0.3)


def test_every_architecture_is_looked_at():
    assert set(KINDS) == set(ARCHITECTURES)


def place(shape):
    """Where something is dropped out: attention weights, the feed-forward's inside, or states."""
    return "attention" if len(shape) == 4 else "inside" if shape[-1] == INNER else "states"


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
    config, model, sizes, _ = KINDS[kind]
    made = model(config(vocab_size=VOCAB, attn_implementation="eager", **sizes, **rates)).train()
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
    config, _, sizes, _ = KINDS[kind]
    absent = {name for name in KINDS[kind][3] if name not in rates}
    fields = config(vocab_size=VOCAB, **sizes, **rates).to_dict()
    return model_config({name: value for name, value in fields.items() if value is not None and name not in absent})


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_each_place_drops_out_as_in_transformers(kind, monkeypatch):
    names = KINDS[kind][3]
    for rates in (dict(zip(names, RATES, strict=False)), {}):
        assert our_rates(monkeypatch, read(kind, rates)) == their_rates(monkeypatch, kind, rates), rates


@pytest.mark.parametrize("kind", ["bart", "bert", "gpt2", "llama"])
def test_one_rate_takes_the_place_of_all(kind, monkeypatch):
    config = read(kind, dict(zip(KINDS[kind][3], RATES, strict=False)))
    assert our_rates(monkeypatch, with_dropout(config, 0.0)) == set()
    assert {rate for _, rate in our_rates(monkeypatch, with_dropout(config, 0.4))} == {0.4}
    assert with_dropout(config, None) == config


FROM_THE_FILE = {("mt5", "tie_word_embeddings"), ("mistral", "num_key_value_heads")}
"""What the shapes of the weights decide."""


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_an_absent_field_means_what_transformers_takes(kind):
    """Or the field is asked for."""
    made = KINDS[kind][0](**({"decoder_start_token_id": 2} if kind == "mbart" else {}))
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
