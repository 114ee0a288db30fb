"""The fields that a model's `config.json` may hold, and their valid values; checked before anything else.

An unknown field is named in a warning and ignored, as Transformers ignores fields that the model's class does not read.
A field that would change the result in an unsupported way is refused.
Source: the configuration classes of Transformers 5, and the released files that earlier versions wrote.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from empax.core.config import ConfigError
from empax.data.model_files import short, warn_of_unknown
from empax.models import bart, bert, t5
from empax.models.foreign_fields import COMMON

_NOTHING = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels attn_implementation
    architectures chunk_size_feed_forward cross_attention_hidden_size custom_pipelines dtype finetuning_task
    gradient_checkpointing id2label is_encoder_decoder keys_to_ignore_at_inference label2id model_type name_or_path
    num_labels output_attentions output_hidden_states output_past prefix problem_type return_dict task_specific_params
    tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
    bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id sep_token_id unk_token_id
    classif_dropout classifier_dropout initializer_factor initializer_range init_std tie_word_embeddings vocab_size"""
"""Fields of any model: how to load, train and name it, and what ids stand for. Other modules read some of these."""

_DECODING = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p"""
"""Decoding fields of older files, which `decoding.generation_config` reads."""

_T5 = """d_model d_kv d_ff num_layers num_decoder_layers num_heads relative_attention_num_buckets
    relative_attention_max_distance dropout_rate layer_norm_epsilon feed_forward_proj scale_decoder_outputs
    dense_act_fn is_gated_act is_decoder n_positions"""
_BART = """d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim
    decoder_ffn_dim max_position_embeddings activation_function dropout activation_dropout attention_dropout
    encoder_layerdrop decoder_layerdrop scale_embedding normalize_before normalize_embedding add_final_layer_norm
    static_position_embeddings is_decoder add_bias_logits extra_pos_embeddings extra_layer_norm layernorm_variant
    do_blenderbot_90_layernorm save_step"""
_BERT = """hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob
    attention_probs_dropout_prob max_position_embeddings type_vocab_size layer_norm_eps position_embedding_type
    is_decoder add_cross_attention directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type"""
_SUMMARY = """summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type
    summary_use_proj"""
_LLAMA = """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size hidden_act
    max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor
    attention_dropout attention_bias"""
_WINDOWS = "sliding_window use_sliding_window max_window_layers layer_types"
_T5S = ("t5", "mt5")
_BARTS = ("bart", "mbart", "blenderbot", "pegasus", "marian")
_BERTS = ("bert", "roberta", "xlm-roberta", "mpnet", "electra", "dpr")
_KNOWN: dict[str, str] = {
    **dict.fromkeys(_T5S, _T5),
    **dict.fromkeys(_BARTS, _BART),
    "marian": f"{_BART} decoder_vocab_size share_encoder_decoder_embeddings",
    **dict.fromkeys(_BERTS, _BERT),
    "mpnet": f"{_BERT} relative_attention_num_buckets",
    "electra": f"{_BERT} {_SUMMARY} embedding_size",
    "dpr": f"{_BERT} projection_dim",
    "distilbert": """dim n_layers n_heads hidden_dim activation dropout attention_dropout max_position_embeddings
        sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_ is_decoder""",
    "llama": f"{_LLAMA} mlp_bias pretraining_tp rope_interleaved is_llama_config",
    "qwen2": f"{_LLAMA} {_WINDOWS} use_mrope",
    "qwen3": f"{_LLAMA} {_WINDOWS}",
    "mistral": f"{_LLAMA} {_WINDOWS}",
    "opt": """hidden_size ffn_dim num_hidden_layers num_attention_heads max_position_embeddings word_embed_proj_dim
        do_layer_norm_before _remove_final_layer_norm enable_bias layer_norm_elementwise_affine activation_function
        dropout attention_dropout activation_dropout layerdrop""",
    "gpt2": f"""{_SUMMARY} n_embd n_layer n_head n_positions n_inner n_ctx activation_function layer_norm_epsilon
        resid_pdrop embd_pdrop attn_pdrop scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn
        add_cross_attention""",
}


def _pairs(text: str) -> dict[str, str]:
    """Parses words of the form NAME=OTHER_NAME."""
    return dict(pair.split("=") for pair in text.split())


_T5_ALIASES = _pairs("hidden_size=d_model num_attention_heads=num_heads num_hidden_layers=num_layers head_dim=d_kv")
_BART_ALIASES = _pairs("""
    hidden_size=d_model num_attention_heads=encoder_attention_heads num_hidden_layers=encoder_layers""")
ALIASES: dict[str, dict[str, str]] = {
    **dict.fromkeys(_T5S, _T5_ALIASES),
    **dict.fromkeys(_BARTS, _BART_ALIASES),
    "gpt2": _pairs("""
        hidden_size=n_embd max_position_embeddings=n_positions num_attention_heads=n_head num_hidden_layers=n_layer"""),
    "distilbert": _pairs("hidden_size=dim num_attention_heads=n_heads num_hidden_layers=n_layers"),
}
"""Other names of fields that Transformers also accepts. Source: `attribute_map` of its configuration classes."""

_DEMANDED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "pruned_heads": (None, {}),
}
_DEMANDED_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    **{name: {"is_decoder": (None, False)} for name in (*_T5S, *_BARTS)},
    **{name: {"is_decoder": (None, False), "add_cross_attention": (None, False)} for name in (*_BERTS, "distilbert")},
    "qwen2": {"use_mrope": (None, False)},
}
"""Fields that would change the result, and the values with which they do not."""


def known_fields(fields: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns the fields of a `config.json` under their usual names; warns of unknown ones.

    Raises:
      ConfigError: a field asks for something unsupported, or two names of one field have different values.
    """
    name = fields["model_type"]
    demanded = _DEMANDED | _DEMANDED_OF.get(name, {})
    problems = [
        f"{field} = {short(fields[field])} is not supported here; it must be {' or '.join(map(json.dumps, allowed))}"
        for field, allowed in demanded.items()
        if field in fields and fields[field] not in allowed
    ]
    problems += _contradictions(fields)
    aliases = ALIASES.get(name, {})
    problems += [
        f"{alias} = {short(fields[alias])} and {field} = {short(fields[field])} mean the same; leave one out"
        for alias, field in aliases.items()
        if fields.get(alias) is not None and fields.get(field) is not None and fields[alias] != fields[field]
    ]
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}.")
    known = {*f"{_NOTHING} {_DECODING} {_KNOWN[name]}".split(), *aliases, *demanded}
    warn_of_unknown(fields, known, file, f"no {name} of transformers reads it either")
    named = {field: fields[alias] for alias, field in aliases.items() if fields.get(alias) is not None}
    return {**fields, **named}


def _contradictions(fields: Mapping[str, Any]) -> list[str]:
    """Lists pairs of fields that contradict each other."""
    problems = []
    feed, ends = fields.get("feed_forward_proj"), {}
    if fields["model_type"] in _T5S and isinstance(feed, str):
        # Transformers derives these from it, writes them too, and then reads the written ones.
        ends = {"is_gated_act": feed.startswith("gated-"), "dense_act_fn": feed.removeprefix("gated-")}
        ends |= {"dense_act_fn": "gelu_new"} if feed == "gated-gelu" else {}
    for name, value in ends.items():
        if fields.get(name) not in (None, value):
            problems.append(f"{name} = {short(fields[name])} does not go with feed_forward_proj = {short(feed)}")
    old, new = (fields.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    if isinstance(old, dict) and isinstance(new, dict):
        old, new = ({"rope_type" if name == "type" else name: said[name] for name in said} for said in (old, new))
        differing = sorted(name for name in set(old) & set(new) if old[name] != new[name])
        if differing:
            problems.append(f"rope_scaling and rope_parameters differ in {', '.join(differing)}; leave one out")
    return problems


_Rule: TypeAlias = tuple[Callable[[Any], bool], str]
"""A predicate of valid values, and a description of them."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and math.isfinite(value)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _rules(**kinds: str) -> dict[str, _Rule]:
    """Returns the rule of each field from the fields of each kind."""
    rules: dict[str, _Rule] = {
        "sizes": (lambda value: _is_whole(value, 1), "a whole number of at least 1"),
        "counts": (lambda value: _is_whole(value, 0), "a whole number of at least 0"),
        "rates": (lambda value: _is_number(value) and 0 <= value < 1, "a number from 0 to below 1"),
        "numbers": (lambda value: _is_number(value) and value > 0, "a number above 0"),
        "switches": (lambda value: isinstance(value, bool), "true or false"),
        "texts": (lambda value: isinstance(value, str), "a text"),
    }
    return {name: rules[kind] for kind, names in kinds.items() for name in names.split()}


_RULES = _rules(
    sizes="""vocab_size hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size
        num_hidden_layers max_position_embeddings d_model d_kv d_ff num_layers num_decoder_layers num_heads
        relative_attention_num_buckets relative_attention_max_distance encoder_layers decoder_layers
        encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim n_embd n_head n_layer
        n_positions n_inner dim n_heads n_layers hidden_dim embedding_size decoder_vocab_size ffn_dim
        word_embed_proj_dim""",
    counts="type_vocab_size projection_dim decoder_start_token_id max_window_layers",
    rates="""dropout dropout_rate attention_dropout activation_dropout hidden_dropout_prob resid_pdrop attn_pdrop
        embd_pdrop attention_probs_dropout_prob""",
    numbers="rms_norm_eps layer_norm_eps layer_norm_epsilon rope_theta init_std",
    switches="""tie_word_embeddings scale_embedding is_decoder normalize_before normalize_embedding
        add_final_layer_norm static_position_embeddings attention_bias mlp_bias scale_attn_weights
        scale_attn_by_inverse_layer_idx add_cross_attention scale_decoder_outputs rope_interleaved
        share_encoder_decoder_embeddings do_layer_norm_before _remove_final_layer_norm enable_bias
        layer_norm_elementwise_affine use_sliding_window""",
    texts="model_type hidden_act activation activation_function feed_forward_proj position_embedding_type",
)
_ROPE_RULES = _rules(
    numbers="""factor rope_theta low_freq_factor high_freq_factor original_max_position_embeddings
        attention_factor beta_fast beta_slow mscale mscale_all_dim""",
    switches="truncate",
    texts="type rope_type",
)

# Our names of settings = their names.
_LLAMA_NAMES = COMMON | _pairs("""
    num_kv_heads=num_key_value_heads activation=hidden_act layer_norm_eps=rms_norm_eps
    tie_embeddings=tie_word_embeddings original_positions=original_max_position_embeddings""")
_GPT2_NAMES = _pairs("""
    d_model=n_embd num_heads=n_head num_layers=n_layer max_positions=n_positions d_ff=n_inner
    activation=activation_function layer_norm_eps=layer_norm_epsilon tie_embeddings=tie_word_embeddings""")
_OPT_NAMES = _LLAMA_NAMES | _pairs("d_ff=ffn_dim activation=activation_function embedding_size=word_embed_proj_dim")
_THEIR_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(_T5S, t5.FIELDS | {"tie_embeddings": "tie_word_embeddings"}),
    **dict.fromkeys(_BARTS, bart.FIELDS),
    **dict.fromkeys(_BERTS, bert.FIELDS),
    "distilbert": bert.FIELDS | bert.DISTILBERT,
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), _LLAMA_NAMES),
    "gpt2": _GPT2_NAMES,
    "opt": _OPT_NAMES,
}


def their_words(message: str, architecture: str) -> str:
    """Returns `message` with our names of settings replaced by those in the model's `config.json`."""
    names = _THEIR_NAMES.get(architecture, {})
    return re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), message)


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` without nulls: to Hugging Face a null field is absent."""
    return {name: value for name, value in fields.items() if value is not None or name not in _RULES}


def check_fields(fields: Mapping[str, Any], file: Path) -> None:
    """Raises ConfigError unless each field that is read has the type and range of its kind; null counts as absent."""
    problems = _breaches(fields, _RULES)
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            problems.append(f"{name} = {short(value)} must be an object or null")
            continue
        problems += [f"{name}.{problem}" for problem in _breaches(value, _ROPE_RULES)]
    named = fields.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        problems.append(f"architectures = {short(named)} must be a list of names")
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}.")


def _breaches(fields: Mapping[str, Any], rules: Mapping[str, _Rule]) -> list[str]:
    return [
        f"{name} = {short(value)} must be {rules[name][1]}"
        for name, value in fields.items()
        if value is not None and name in rules and not rules[name][0](value)
    ]
