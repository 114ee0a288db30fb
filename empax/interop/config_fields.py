"""What may stand in the `config.json` of a model: checked before anything is computed with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.data.known_fields import short
from empax.models.bert import DISTILBERT

_SIZES = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "d_model",
        "d_kv",
        "d_ff",
        "num_layers",
        "num_decoder_layers",
        "num_heads",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "n_embd",
        "n_head",
        "n_layer",
        "n_positions",
        "n_inner",
        "dim",
        "n_heads",
        "n_layers",
        "hidden_dim",
        "embedding_size",
        "decoder_vocab_size",
        "ffn_dim",
        "word_embed_proj_dim",
    ]
)
_COUNTS = frozenset(["type_vocab_size", "projection_dim", "decoder_start_token_id", "max_window_layers"])
_RATES = frozenset(
    [
        "dropout",
        "dropout_rate",
        "attention_dropout",
        "activation_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "attn_pdrop",
        "embd_pdrop",
        "attention_probs_dropout_prob",
    ]
)
_NUMBERS = frozenset(["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "init_std"])
_ROPE_NUMBERS = frozenset(
    ["factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
) | frozenset(["attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
_SWITCHES = frozenset(
    [
        "tie_word_embeddings",
        "scale_embedding",
        "is_decoder",
        "normalize_before",
        "normalize_embedding",
        "add_final_layer_norm",
        "static_position_embeddings",
        "attention_bias",
        "mlp_bias",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "add_cross_attention",
        "scale_decoder_outputs",
        "rope_interleaved",
        "share_encoder_decoder_embeddings",
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "enable_bias",
        "layer_norm_elementwise_affine",
        "use_sliding_window",
    ]
)
_TEXTS = frozenset(
    ["model_type", "hidden_act", "activation", "activation_function", "feed_forward_proj", "position_embedding_type"]
)
_LARGEST = 2**31 - 1

_LLAMA = {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
_LLAMA |= {"d_ff": "intermediate_size", "num_layers": "num_hidden_layers", "max_positions": "max_position_embeddings"}
_LLAMA |= {"activation": "hidden_act", "layer_norm_eps": "rms_norm_eps"}
_LLAMA |= {"tie_embeddings": "tie_word_embeddings", "original_positions": "original_max_position_embeddings"}
_GPT2 = {"d_model": "n_embd", "num_heads": "n_head", "num_layers": "n_layer", "max_positions": "n_positions"}
_GPT2 |= {"d_ff": "n_inner", "activation": "activation_function"}
_GPT2 |= {"layer_norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings"}
_OPT = _LLAMA | {"d_ff": "ffn_dim", "activation": "activation_function", "embedding_size": "word_embed_proj_dim"}
_T5 = {"head_dim": "d_kv", "num_encoder_layers": "num_layers", "activation": "feed_forward_proj"}
_T5 |= {"layer_norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings"}
_T5 |= {"relative_buckets": "relative_attention_num_buckets", "start_id": "decoder_start_token_id"}
_BART = {"num_heads": "encoder_attention_heads", "d_ff": "encoder_ffn_dim", "num_encoder_layers": "encoder_layers"}
_BART |= {"num_decoder_layers": "decoder_layers", "max_positions": "max_position_embeddings"}
_BART |= {"activation": "activation_function", "tie_embeddings": "tie_word_embeddings"}
_BERT = _LLAMA | {"layer_norm_eps": "layer_norm_eps"}
_THEIR_NAMES: dict[str, dict[str, str]] = {"llama": _LLAMA, "gpt2": _GPT2, "t5": _T5, "bart": _BART}
_THEIR_NAMES |= dict.fromkeys(("blenderbot", "mbart", "marian", "pegasus"), _BART) | {"mt5": _T5}
_THEIR_NAMES |= dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "mpnet", "dpr"), _BERT)
_THEIR_NAMES |= {"distilbert": _BERT | DISTILBERT}
_THEIR_NAMES |= {"qwen2": _LLAMA, "qwen3": _LLAMA, "mistral": _LLAMA, "opt": _OPT}


def their_words(message: str, architecture: str) -> str:
    """`message` with our names of settings replaced by the names in the model's `config.json`."""
    names = _THEIR_NAMES.get(architecture, {})
    return re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), message)


_CHECKED = _SIZES | _COUNTS | _RATES | _NUMBERS | _SWITCHES | _TEXTS


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without nulls: to Hugging Face a null field is absent."""
    return {name: value for name, value in fields.items() if value is not None or name not in _CHECKED}


def check_fields(fields: Mapping[str, Any], file: Path) -> None:
    """Raises ConfigError unless each field that is read here has the type and range of its kind; null is as absent."""
    problems = list(_problems(fields))
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            problems.append(f"{name} = {short(value)} must be an object or null")
            continue
        problems += [f"{name}.{problem}" for problem in _numbers(value, _ROPE_NUMBERS)]
        for key in ("type", "rope_type"):
            if not isinstance(value.get(key, ""), str):
                problems.append(f"{name}.{key} = {short(value[key])} must be a text")
    named = fields.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        problems.append(f"architectures = {short(named)} must be a list of names")
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}.")


def _problems(fields: Mapping[str, Any]) -> Iterable[str]:
    yield from _numbers(fields, _NUMBERS)
    for name, value in fields.items():
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in _SIZES and not (whole and 1 <= value <= _LARGEST):
            yield f"{name} = {short(value)} must be a whole number of at least 1"
        elif name in _COUNTS and not (whole and 0 <= value <= _LARGEST):
            yield f"{name} = {short(value)} must be a whole number of at least 0"
        elif name in _RATES and not (_is_number(value) and 0 <= value < 1):
            yield f"{name} = {short(value)} must be a number from 0 to below 1"
        elif name in _SWITCHES and not isinstance(value, bool):
            yield f"{name} = {short(value)} must be true or false"
        elif name in _TEXTS and not isinstance(value, str):
            yield f"{name} = {short(value)} must be a text"


def _numbers(fields: Mapping[str, Any], names: frozenset[str]) -> Iterable[str]:
    for name in sorted(names & set(fields)):
        if fields[name] is not None and not (_is_number(fields[name]) and fields[name] > 0):
            yield f"{name} = {short(fields[name])} must be a number above 0"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and math.isfinite(value)
