"""Export to folders that transformers, sentence-transformers and empax load: weights, configs, tokenizer.

Nothing here needs PyTorch. A folder is written completely or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers as rust
from tokenizers import processors

from empax.core.config import ConfigError
from empax.core.files import write_json, write_text
from empax.core.types import Params
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.architectures import Config
from empax.interop.parameters import foreign_tensors
from empax.interop.safetensors_out import SHARD_BYTES, new_folder, write_tensors
from empax.interop.sentence_modules import write_modules
from empax.interop.tied_embeddings import HEAD
from empax.models import bert, t5
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import T5Encoder
from empax.models.transformer import EncoderDecoder, TransformerConfig

_OPTIONS: dict[str, tuple[str, Any]] = {
    "no_repeat_ngram": ("no_repeat_ngram_size", 0),
    "encoder_no_repeat_ngram": ("encoder_no_repeat_ngram_size", 0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "encoder_repetition_penalty": ("encoder_repetition_penalty", 1.0),
    "suppress_tokens": ("suppress_tokens", ()),
    "begin_suppress_tokens": ("begin_suppress_tokens", ()),
    "bad_words": ("bad_words_ids", ()),
    "first_token": ("forced_bos_token_id", None),
}
"""Decoding options under transformers' names, with the values that switch them off."""

_T5_SHAPE = {
    "norm": "rms",
    "pre_norm": True,
    "use_bias": False,
    "attention_scale": False,
    "position": "relative",
    "embed_scale": False,
    "final_norm": True,
}
"""Settings that make an encoder-decoder a T5; sizes, activation and dropout are free."""

# In transformers, every encoder-decoder with T5's relative bias has T5's RMS norms and no biases, and every one with
# LayerNorm and biases adds absolute positions. So the Transformer from scratch matches none of them.


@dataclasses.dataclass(frozen=True)
class Generation:
    """The decoding settings of a generator: the fields of `decoding.settings.DecodeSettings`, and special token ids.

    Attributes:
      settings: `dataclasses.asdict` of the run's `config.SYSTEM.decoding`.
      start_id, eos_id, pad_id: ids of the decoder's start token, of the end of a response, and of padding.
      written: the fields in the folder that the model comes from, written unchanged; None = made from the others.
    """

    settings: Mapping[str, Any]
    start_id: int
    eos_id: int
    pad_id: int
    written: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `generation_config.json`."""
        if self.written is not None:
            return dict(self.written)
        s = self.settings
        draws = s["method"] == "sample" or (s["method"] == "beam" and s["draw_beams"])
        fields: dict[str, Any] = {
            "decoder_start_token_id": self.start_id,
            "eos_token_id": self.eos_id,
            "pad_token_id": self.pad_id,
            "max_new_tokens": s["max_tokens"],
            "do_sample": draws,
            "num_beams": s["num_beams"] if s["method"] == "beam" else 1,
        }
        if s["min_tokens"]:
            fields["min_new_tokens"] = s["min_tokens"]
        # Options that are off are left out.
        fields |= {theirs: s[ours] for ours, (theirs, off) in _OPTIONS.items() if s[ours] != off}
        if s["more_eos_ids"]:
            fields["eos_token_id"] = [self.eos_id, *s["more_eos_ids"]]
        if s["end_at_limit"]:
            fields["forced_eos_token_id"] = self.eos_id
        if s["method"] == "beam":
            fields |= {"length_penalty": s["length_penalty"], "early_stopping": s["early_stopping"]}
            if s["num_beam_groups"] > 1:
                fields |= {name: s[name] for name in ("num_beam_groups", "diversity_penalty")}
        if draws:
            # Also top_k = 0: without the field, transformers would use 50.
            fields |= {name: s[name] for name in ("temperature", "top_k", "top_p")}
            fields |= {name: s[name] for name, off in (("min_p", 0.0), ("typical_p", 1.0)) if s[name] != off}
        if s["method"] == "sample":
            fields["num_return_sequences"] = s["num_samples"]
        return fields


def export_generator(
    folder: Path,
    model: EncoderDecoder | DecoderOnly,
    params: Params,
    tokenizer: SubwordTokenizer,
    generation: Generation,
    *,
    base: Mapping[str, Any] | None = None,
    card: str = "",
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a generator with its tokenizer and its decoding settings.

    Args:
      folder: new or empty.
      model: its settings determine the architecture: one with the shape of a T5 becomes a T5ForConditionalGeneration.
      params: parameters of `model`, on the host or on devices; read one shard at a time.
      tokenizer: the run's tokenizer.
      generation: contents of generation_config.json.
      base: config.json of the pretrained model that training started from; needed for all but T5.
      card: text of README.md; empty = none.
      max_shard_bytes: see `write_tensors`.

    Raises:
      ConfigError: no architecture of transformers is this model, or the folder is not empty.
      DataError: `params` are not those of `model`.
    """
    config = model.config
    if base is not None and base["model_type"] != "t5":
        # The run may have added tokens to the vocabulary.
        sizes = [name for name in ("vocab_size", "decoder_vocab_size") if name in base]
        fields = _in_float32(base, dict.fromkeys(sizes, config.vocab_size))
    elif isinstance(config, TransformerConfig):
        fields = t5_fields(config, eos_id=generation.eos_id, pad_id=generation.pad_id)
    else:
        raise ConfigError(
            "a decoder-only model cannot be written without the config.json of the model it started from."
        )
    tensors = foreign_tensors(fields["model_type"], params, config)
    if config.tie_embeddings and fields.get("tie_word_embeddings") is False:  # else transformers 4 draws a head
        tensors[HEAD] = tensors["shared.weight"]
    with new_folder(folder, card=card) as new:
        write_tensors(new, tensors, max_shard_bytes=max_shard_bytes)
        write_json(new / "config.json", fields)
        write_json(new / "generation_config.json", generation_fields(generation, config))
        tokenizer.save(new)


def export_retriever(
    folder: Path,
    model: DualEncoder,
    params: Params,
    tokenizer: SubwordTokenizer,
    *,
    max_tokens: int,
    keep: Literal["start", "end"] = "end",
    base: Mapping[str, Any] | None = None,
    card: str = "",
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a text encoder as a sentence-transformers folder; transformers' AutoModel reads its weights too.

    Arguments are as for `export_generator`; only encoders other than BERT and T5 need `base`. The parameters of the
    encoder are under "encoder". `max_tokens` is the length limit of a text, including both special tokens; `keep` says
    which end of a longer text stays: "end", as in retrieval here.

    Raises:
      ConfigError: no architecture of transformers is this encoder, or the folder is not empty.
      DataError: `params` are not those of `model`.
    """
    encoder = model.encoder
    fields = _encoder_fields(encoder, base, tokenizer)
    tensors = foreign_tensors(fields["model_type"], params["encoder"], encoder.config)
    max_tokens = min(max_tokens, tokenizer.reading.max_tokens or max_tokens)
    if isinstance(encoder, BertEncoder):
        max_tokens = min(max_tokens, encoder.config.max_tokens())
    with new_folder(folder, card=card) as new:
        write_tensors(new, tensors, max_shard_bytes=max_shard_bytes)
        write_json(new / "config.json", fields)
        _write_framing_tokenizer(new, tokenizer, max_tokens, keep)
        write_modules(new, model, params, tokenizer.reading, size=encoder.config.d_model, max_tokens=max_tokens)


def _encoder_fields(encoder: Any, base: Mapping[str, Any] | None, tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """Returns the `config.json` of a text encoder.

    Raises:
      ConfigError: transformers has no encoder like this one.
    """
    size = {"vocab_size": encoder.config.vocab_size}  # it may have grown
    if isinstance(encoder, BertEncoder):
        if base is None or base["model_type"] == "bert":
            return bert_fields(encoder.config, pad_id=tokenizer.pad_id)
        layers = "n_layers" if base["model_type"] == "distilbert" else "num_hidden_layers"
        return _in_float32(base, {**size, layers: encoder.config.num_layers})
    assert isinstance(encoder, T5Encoder)
    if base is None:
        whole = dataclasses.replace(encoder.config, tie_embeddings=True, output_scale=True)
        base = t5_fields(whole, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    elif base["model_type"] not in ("t5", "mt5"):
        raise ConfigError(
            f"the encoder of a {base['model_type']!r} cannot be written for transformers, which has no model for this "
            "encoder alone."
        )
    kind = f"{base['model_type'].upper()}EncoderModel"
    return _in_float32(base, {**size, "architectures": [kind], "is_encoder_decoder": False})


def _in_float32(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with `changes` for weights in float32; older configs call the type "torch_dtype"."""
    return {name: value for name, value in base.items() if name != "torch_dtype"} | {**changes, "dtype": "float32"}


def t5_fields(config: TransformerConfig, *, eos_id: int, pad_id: int) -> dict[str, Any]:
    """Returns the `config.json` of a T5: the inverse of `models.t5.t5_config`.

    Raises:
      ConfigError: the model does not have the shape of a T5.
    """
    differences = [
        f"{name} = {getattr(config, name)!r} (T5: {value!r})"
        for name, value in _T5_SHAPE.items()
        if getattr(config, name) != value
    ]
    if differences:
        raise ConfigError(
            "this generator cannot be written for transformers, which has no architecture with its layers: "
            f"{', '.join(differences)}. A generator of architecture = 't5' can."
        )
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        **{theirs: getattr(config, ours) for ours, theirs in t5.FIELDS.items()},
        # If this is true, Transformers 4 ties the head and scales the logits; if only the first is wanted,
        # `export_generator` writes the head. Transformers 5 has another field for the scale, and ties by the weights.
        "tie_word_embeddings": config.tie_embeddings and config.output_scale,
        "scale_decoder_outputs": config.output_scale,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def bert_fields(config: BertConfig, *, pad_id: int) -> dict[str, Any]:
    """Returns the `config.json` of a BERT: the inverse of `models.bert.bert_config`."""
    if config.attention_dropout is None:
        config = dataclasses.replace(config, attention_dropout=config.dropout)
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        **{theirs: getattr(config, ours) for ours, theirs in bert.FIELDS.items()},
        "position_embedding_type": "absolute",
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def generation_fields(generation: Generation, config: Config) -> dict[str, Any]:
    """Returns the `generation_config.json` of a model with these settings."""
    fields = generation.fields()
    if isinstance(config, DecoderOnlyConfig):
        if generation.written is None:
            del fields["decoder_start_token_id"]  # transformers starts at the prompt's last token
    elif isinstance(config, TransformerConfig):
        if generation.written is None:
            fields["decoder_start_token_id"] = config.start_id
        if config.num_decoder_layers > config.num_encoder_layers:
            # transformers 5 builds the decoder's cache with the encoder's number of layers, and fails beyond it.
            fields["use_cache"] = False
    return fields


def _write_framing_tokenizer(
    folder: Path, tokenizer: SubwordTokenizer, max_tokens: int, keep: Literal["start", "end"]
) -> None:
    """Writes a tokenizer that adds special tokens and truncates as `data.features.encode_for_bert` does."""
    backend = rust.Tokenizer.from_str(tokenizer.backend.to_str())
    first, last = (backend.id_to_token(i) for i in (tokenizer.cls_id, tokenizer.sep_id))
    assert first is not None
    assert last is not None
    # By their roles: the library would read a text such as "$A" or "x:1" as part of its syntax.
    tokens = [("cls", tokenizer.cls_id, first), ("sep", tokenizer.sep_id, last)]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="cls $A sep",
        pair="cls $A sep $B:1 sep:1",
        special_tokens=[{"id": role, "ids": [number], "tokens": [text]} for role, number, text in tokens],
    )
    tokenizer.save(folder)
    write_text(folder / "tokenizer.json", backend.to_str(pretty=False))
    path = folder / "tokenizer_config.json"
    names = {"cls_token": first, "sep_token": last, "model_max_length": max_tokens}
    names["truncation_side"] = "left" if keep == "end" else "right"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | names)
