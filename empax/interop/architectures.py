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
from empax.interop import model_mappings as tables
from empax.interop.mappings import Mapping
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


@functools.lru_cache(maxsize=8)  # tracing a model takes a second
def _shapes(config: Config) -> Params:
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    inputs = (ids, mask)
    if isinstance(config, BertConfig):
        model = BertEncoder(config)
    elif isinstance(config, DecoderOnlyConfig):
        model = DecoderOnly(config)
    elif config.num_decoder_layers:
        model, inputs = EncoderDecoder(config), (ids, mask, ids)
    else:
        model = T5Encoder(config)
    return jax.eval_shape(lambda rng: model.init(rng, *inputs), jax.random.key(0))["params"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a `model_type` of Hugging Face is here."""

    config: Callable[..., Any]
    mapping: Callable[[Any], Mapping]
    shapes = staticmethod(_shapes)


ARCHITECTURES: dict[str, Architecture] = {
    "t5": Architecture(t5_config, tables.t5_mapping),
    "bert": Architecture(bert_config, tables.bert_mapping),
    "llama": Architecture(llama_config, tables.llama_mapping),
    "qwen2": Architecture(qwen2_config, tables.llama_mapping),
    "qwen3": Architecture(qwen3_config, tables.llama_mapping),
    "mistral": Architecture(mistral_config, tables.llama_mapping),
    "opt": Architecture(opt_config, tables.opt_mapping),
    "gpt2": Architecture(gpt2_config, tables.gpt2_mapping),
    "bart": Architecture(bart_config, tables.bart_mapping),
    "blenderbot": Architecture(blenderbot_config, tables.bart_mapping),
    "roberta": Architecture(roberta_config, tables.bert_mapping),
    "mpnet": Architecture(mpnet_config, tables.mpnet_mapping),
    "dpr": Architecture(dpr_config, tables.dpr_mapping),
    "mt5": Architecture(mt5_config, tables.t5_mapping),
    "mbart": Architecture(mbart_config, tables.bart_mapping),
    "marian": Architecture(marian_config, tables.bart_mapping),
    "pegasus": Architecture(pegasus_config, tables.bart_mapping),
    "xlm-roberta": Architecture(roberta_config, tables.bert_mapping),
    "distilbert": Architecture(distilbert_config, tables.distilbert_mapping),
    "electra": Architecture(electra_config, tables.bert_mapping),
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
