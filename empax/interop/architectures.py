"""The architectures of Hugging Face that are known here: `model_type` to settings, table of names, and shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from empax.core.config import ConfigError
from empax.core.types import Params
from empax.interop import encoder_decoder_mappings, encoder_mappings, mappings
from empax.interop.decoder_families import llama_like_mapping, opt_mapping
from empax.models.bart import bart_config, blenderbot_config, marian_config, mbart_config, pegasus_config
from empax.models.bert import (
    BertConfig,
    BertEncoder,
    bert_config,
    distilbert_config,
    dpr_config,
    electra_config,
    mpnet_config,
    roberta_config,
)
from empax.models.decoder_families import (
    gpt2_config,
    llama_config,
    mistral_config,
    opt_config,
    qwen2_config,
    qwen3_config,
)
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.t5 import T5Encoder, mt5_config, t5_config
from empax.models.transformer import EncoderDecoder, TransformerConfig

Config: TypeAlias = TransformerConfig | BertConfig | DecoderOnlyConfig
C = TypeVar("C", bound=Config)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a `model_type` of Hugging Face is here."""

    config: Callable[..., Any]
    mapping: Callable[[Any], mappings.Mapping]
    shapes: Callable[[Any], Params]


@functools.lru_cache(maxsize=8)  # tracing a model takes a second
def _shapes_of_t5(config: TransformerConfig) -> Params:
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    model, inputs = EncoderDecoder(config), (ids, mask, ids)
    if not config.num_decoder_layers:
        model, inputs = T5Encoder(config), (ids, mask)
    return jax.eval_shape(lambda rng: model.init(rng, *inputs), jax.random.key(0))["params"]


@functools.lru_cache(maxsize=8)  # tracing a model takes a second
def _shapes_of_bert(config: BertConfig) -> Params:
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return jax.eval_shape(lambda rng: BertEncoder(config).init(rng, ids, mask), jax.random.key(0))["params"]


@functools.lru_cache(maxsize=8)  # tracing a model takes a second
def _shapes_of_decoder_only(config: DecoderOnlyConfig) -> Params:
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return jax.eval_shape(lambda rng: DecoderOnly(config).init(rng, ids, mask), jax.random.key(0))["params"]


ARCHITECTURES: dict[str, Architecture] = {
    "t5": Architecture(t5_config, encoder_decoder_mappings.t5_mapping, _shapes_of_t5),
    "bert": Architecture(bert_config, encoder_mappings.bert_mapping, _shapes_of_bert),
    "llama": Architecture(llama_config, mappings.llama_mapping, _shapes_of_decoder_only),
    "qwen2": Architecture(qwen2_config, llama_like_mapping, _shapes_of_decoder_only),
    "qwen3": Architecture(qwen3_config, llama_like_mapping, _shapes_of_decoder_only),
    "mistral": Architecture(mistral_config, llama_like_mapping, _shapes_of_decoder_only),
    "opt": Architecture(opt_config, opt_mapping, _shapes_of_decoder_only),
    "gpt2": Architecture(gpt2_config, mappings.gpt2_mapping, _shapes_of_decoder_only),
    "bart": Architecture(bart_config, encoder_decoder_mappings.bart_mapping, _shapes_of_t5),
    "blenderbot": Architecture(blenderbot_config, encoder_decoder_mappings.bart_mapping, _shapes_of_t5),
    "roberta": Architecture(roberta_config, encoder_mappings.bert_mapping, _shapes_of_bert),
    "mpnet": Architecture(mpnet_config, encoder_mappings.mpnet_mapping, _shapes_of_bert),
    "dpr": Architecture(dpr_config, encoder_mappings.dpr_mapping, _shapes_of_bert),
    "mt5": Architecture(mt5_config, encoder_decoder_mappings.t5_mapping, _shapes_of_t5),
    "mbart": Architecture(mbart_config, encoder_decoder_mappings.bart_mapping, _shapes_of_t5),
    "marian": Architecture(marian_config, encoder_decoder_mappings.bart_mapping, _shapes_of_t5),
    "pegasus": Architecture(pegasus_config, encoder_decoder_mappings.bart_mapping, _shapes_of_t5),
    "xlm-roberta": Architecture(roberta_config, encoder_mappings.bert_mapping, _shapes_of_bert),
    "distilbert": Architecture(distilbert_config, encoder_mappings.distilbert_mapping, _shapes_of_bert),
    "electra": Architecture(electra_config, encoder_mappings.bert_mapping, _shapes_of_bert),
}


def with_dropout(config: C, rate: float | None) -> C:
    """The settings with one rate wherever the model drops out; None = with the rates that they have."""
    if rate is None:
        return config
    finer = {"attention_dropout", "embedding_dropout", "activation_dropout"}
    follow = dict.fromkeys(field.name for field in dataclasses.fields(config) if field.name in finer)
    return dataclasses.replace(config, dropout=rate, **follow)


def architecture_of(name: str) -> Architecture:
    """The entry of a `model_type`.

    Raises:
      ConfigError: it is not known here.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"{name!r} is not an architecture here; it is one of {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]
