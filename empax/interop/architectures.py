"""The supported architectures of Hugging Face: settings, table of names, and shapes for each `model_type`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from empax.core.config import ConfigError
from empax.core.types import Params
from empax.interop import model_mappings as tables
from empax.interop.mappings import Mapping
from empax.models import bart, bert, t5
from empax.models import decoder_families as decoders
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.t5 import T5Encoder
from empax.models.transformer import EncoderDecoder, TransformerConfig

Config: TypeAlias = TransformerConfig | BertConfig | DecoderOnlyConfig
C = TypeVar("C", bound=Config)


def shapes_of(model: nn.Module) -> Params:
    """Returns the shapes of the parameters of `model`."""
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    inputs = (ids, mask, ids) if isinstance(model, EncoderDecoder) else (ids, mask)
    return jax.eval_shape(lambda rng: model.init(rng, *inputs), jax.random.key(0))["params"]


@functools.lru_cache(maxsize=8)  # tracing a model takes a second
def _shapes(config: Config) -> Params:
    if isinstance(config, BertConfig):
        return shapes_of(BertEncoder(config))
    if isinstance(config, DecoderOnlyConfig):
        return shapes_of(DecoderOnly(config))
    return shapes_of(EncoderDecoder(config) if config.num_decoder_layers else T5Encoder(config))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Our counterpart of a `model_type` of Hugging Face."""

    config: Callable[..., Any]
    mapping: Callable[[Any], Mapping]
    shapes = staticmethod(_shapes)


ARCHITECTURES: dict[str, Architecture] = {
    "t5": Architecture(t5.t5_config, tables.t5_mapping),
    "bert": Architecture(bert.bert_config, tables.bert_mapping),
    "llama": Architecture(decoders.llama_config, tables.llama_mapping),
    "qwen2": Architecture(decoders.qwen2_config, tables.llama_mapping),
    "qwen3": Architecture(decoders.qwen3_config, tables.llama_mapping),
    "mistral": Architecture(decoders.mistral_config, tables.llama_mapping),
    "opt": Architecture(decoders.opt_config, tables.opt_mapping),
    "gpt2": Architecture(decoders.gpt2_config, tables.gpt2_mapping),
    "bart": Architecture(bart.bart_config, tables.bart_mapping),
    "blenderbot": Architecture(bart.blenderbot_config, tables.bart_mapping),
    "roberta": Architecture(bert.roberta_config, tables.bert_mapping),
    "mpnet": Architecture(bert.mpnet_config, tables.bert_mapping),
    "dpr": Architecture(bert.dpr_config, tables.dpr_mapping),
    "mt5": Architecture(t5.mt5_config, tables.t5_mapping),
    "mbart": Architecture(bart.mbart_config, tables.bart_mapping),
    "marian": Architecture(bart.marian_config, tables.bart_mapping),
    "pegasus": Architecture(bart.pegasus_config, tables.bart_mapping),
    "xlm-roberta": Architecture(bert.roberta_config, tables.bert_mapping),
    "distilbert": Architecture(bert.distilbert_config, tables.distilbert_mapping),
    "electra": Architecture(bert.electra_config, tables.bert_mapping),
}


def with_dropout(config: C, rate: float | None) -> C:
    """Returns the settings with one dropout rate everywhere; None = unchanged."""
    if rate is None:
        return config
    finer = {"attention_dropout", "embedding_dropout", "activation_dropout"}
    follow = dict.fromkeys(field.name for field in dataclasses.fields(config) if field.name in finer)
    return dataclasses.replace(config, dropout=rate, **follow)


def architecture_of(name: str) -> Architecture:
    """Returns the entry of a `model_type`.

    Raises:
      ConfigError: the `model_type` is not supported.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"{name!r} is not a known architecture; it must be one of {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]
