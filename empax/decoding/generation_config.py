"""Decoding options of a model folder: converts `generation_config.json` to our settings; refuses unsupported ones."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError, to_settings
from empax.data.model_files import read_model_json
from empax.decoding.constraints import check_ids
from empax.decoding.settings import DecodeSettings

FILE = "generation_config.json"

SAME_TEXT = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    *("remove_invalid_values", "transformers_version", "_from_model_config", "_commit_hash", "bos_token_id"),
}
"""Options that do not change the text: speed, memory, further outputs, and handling of non-finite logits."""

_UNREAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sequence_bias", "exponential_decay_length_penalty", "watermarking_config"), (None,)),
    **dict.fromkeys(("stop_strings", "max_time", "dola_layers", "constraints", "force_words_ids"), (None,)),
    "guidance_scale": (None, 1),
    "token_healing": (None, False),
}
"""Unsupported options that change the text, with the values that switch them off."""

_UNREAD_BY_METHOD: dict[str, dict[str, tuple[Any, ...]]] = {
    "greedy": {"penalty_alpha": (None, 0)},  # contrastive search
    "beam": {"renormalize_logits": (None, False)},
    "sample": {"top_h": (None,), "epsilon_cutoff": (None, 0), "eta_cutoff": (None, 0)},
}
"""Unsupported options that only one method of decoding reads."""

ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "bad_words_ids": "bad_words",
}
DRAWN = ("temperature", "top_k", "top_p", "min_p", "typical_p")
BY_METHOD: dict[str, dict[str, str]] = {
    "greedy": {},
    "beam": {
        name: name
        for name in (
            *("num_beams", "length_penalty", "early_stopping"),
            *("num_beam_groups", "diversity_penalty", "num_return_sequences"),
        )
    },
    "sample": {name: name for name in DRAWN} | {"num_return_sequences": "num_samples"},
}
IDS = ("eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
_SIZES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
METHOD = ("do_sample", "num_beams")

KNOWN = (
    *METHOD, *IDS, *LENGTHS,
    *(name for table in (*BY_METHOD.values(), ALWAYS, _UNREAD, *_UNREAD_BY_METHOD.values()) for name in table),
    *sorted(SAME_TEXT),
)  # fmt: skip
"""All options, each after those that it depends on."""

DEFAULT_TOP_K = 50
_DEFAULT_NEW_TOKENS = 20
"""Default of transformers."""


@dataclasses.dataclass(frozen=True)
class ModelDecoding:
    """Decoding options of a model.

    `eos_id` ends a response, as the `more_eos_ids` of its settings do, and is the token that `end_at_limit` forces;
    None = not specified.
    """

    settings: DecodeSettings
    eos_id: int | None

    def with_eos(self, eos_id: int) -> DecodeSettings:
        """Returns settings for a search with the end-of-sequence token `eos_id`, which may differ from `self.eos_id`.

        Raises ConfigError if the folder forces another token at the end.
        """
        ids = (() if self.eos_id is None else (self.eos_id,)) + self.settings.more_eos_ids
        if self.settings.end_at_limit and eos_id != self.eos_id:
            raise ConfigError(
                f"forced_eos_token_id = {self.eos_id} of the model is not {eos_id}, the end of sequence of the "
                "tokenizer; remove it from generation_config.json, or use the model's own tokenizer."
            )
        return dataclasses.replace(self.settings, more_eos_ids=tuple(token for token in ids if token != eos_id))


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of options, for error messages: a file or function, and advice about an option, given its name."""

    where: str
    advice: Callable[[str], str]


def generation_fields_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Reads the options of a folder, under transformers' names and unchecked; returns their file and the options.

    Raises DataError if the file is broken.
    """
    path = folder / FILE
    if path.is_file():
        fields = read_model_json(path)
        for name in sorted(set(fields) - set(KNOWN)):
            logging.warning("%s: %s is not a known decoding option; it has no effect.", path, name)
        return path, fields
    path = folder / "config.json"
    fields = read_model_json(path) if path.is_file() else {}
    if fields.get("force_bos_token_to_be_generated"):
        fields.setdefault("forced_bos_token_id", fields.get("bos_token_id"))
    return path, {name: value for name, value in fields.items() if name in KNOWN}


def decoding_of(fields: Mapping[str, Any], origin: Origin, *, encoder_decoder: bool) -> ModelDecoding:
    """Converts options under transformers' names to settings; an option of None counts as absent.

    Defaults are those of transformers: 20 new tokens, the likeliest token at each step, top_k = 50 for sampling.

    The response of a model that is no encoder-decoder continues a prompt, whose tokens do not count here. Raises
    ConfigError if an option that changes the text is unsupported, or a value is not allowed.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    _check_integers(fields, origin)
    method = _method(fields, origin)
    _refuse_unread(fields, method, origin)
    values = {ours: fields[theirs] for theirs, ours in (ALWAYS | BY_METHOD[method]).items() if theirs in fields}
    if method == "beam":
        values.setdefault("num_return_sequences", 1)
    if fields.get("do_sample", False):
        values |= {name: fields[name] for name in DRAWN if name in fields}
        values["top_k"] = fields.get("top_k", DEFAULT_TOP_K)
        values["draw_beams"] = method == "beam"
    eos_ids, forced = _eos_ids(fields, origin)
    values |= {"method": method, "more_eos_ids": eos_ids[1:], "end_at_limit": forced}
    if encoder_decoder and "forced_bos_token_id" in fields:  # after a prompt, transformers forces nothing
        values["first_token"] = fields["forced_bos_token_id"]
    values |= _lengths(fields, int(encoder_decoder), origin)
    return ModelDecoding(
        settings=to_settings(DecodeSettings, values, where=origin.where), eos_id=eos_ids[0] if eos_ids else None
    )


def options_that_can_be_had(
    fields: Mapping[str, Any], *, encoder_decoder: bool, eos_id: int, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a folder's options into supported and unsupported ones; each is tested with those before it.

    `num_return_sequences` is in neither: the caller sets the number of answers. `eos_id` is the tokenizer's; of several
    end tokens, those outside the model's vocabulary are left out.
    """
    kept: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for name in KNOWN:
        value = fields.get(name)
        if value is None or name == "num_return_sequences":
            continue
        if name == "eos_token_id" and isinstance(value, list):
            value = [token for token in value if not isinstance(token, int) or token < vocab_size]
        read = [method for method in _ONE if name in BY_METHOD[method] or name in _UNREAD_BY_METHOD[method]]
        try:
            for chosen in ({}, *(_ONE[method] for method in read)):  # also with methods that a caller may choose
                asked = {**kept, name: value, **chosen}
                found = decoding_of(asked, _NOBODY, encoder_decoder=encoder_decoder)
                check_ids(found.with_eos(eos_id), vocab_size)
        except ConfigError:
            left[name] = value
        else:
            kept[name] = value
    return kept, left


_NOBODY = Origin("", lambda name: "")
_ONE = {"greedy": {"do_sample": False, "num_beams": 1}, "sample": {"do_sample": True, "num_beams": 1}}


def _check_integers(fields: dict[str, Any], origin: Origin) -> None:
    """Raises ConfigError for a length, size or id that is not an integer; sets sizes below 0 to 0, which is off."""
    for name in (*IDS, *LENGTHS, *_SIZES):
        several = isinstance(fields.get(name), list | tuple) and name in ("eos_token_id", "forced_eos_token_id")
        for value in fields.get(name, []) if several else [fields.get(name, 0)]:
            if type(value) is not int:
                raise ConfigError(
                    f"{origin.where}: {name} = {fields[name]!r} must be an integer; {origin.advice(name)}."
                )
    fields |= {name: max(fields[name], 0) for name in _SIZES if name in fields}


def _method(fields: Mapping[str, Any], origin: Origin) -> str:
    beams, samples = fields.get("num_beams", 1), fields.get("do_sample", False)
    several = fields.get("num_return_sequences", 1)
    if several != 1 and beams == 1 and not samples:
        raise ConfigError(
            f"{origin.where}: num_return_sequences = {several} has no meaning when the likeliest token is taken; "
            f"{origin.advice('num_return_sequences')}."
        )
    return "beam" if beams != 1 else "sample" if samples else "greedy"


def _refuse_unread(fields: Mapping[str, Any], method: str, origin: Origin) -> None:
    unread = _UNREAD | _UNREAD_BY_METHOD[method]
    if fields.get("do_sample", False):  # also with beams
        unread |= _UNREAD_BY_METHOD["sample"]
    for name, off in unread.items():
        if name in fields and fields[name] not in off:
            raise ConfigError(
                f"{origin.where}: {name} = {fields[name]!r} would change the text and is not supported; "
                f"{origin.advice(name)}."
            )


def _eos_ids(fields: Mapping[str, Any], origin: Origin) -> tuple[tuple[int, ...], bool]:
    """Returns the ids that end a response, a forced one first, and whether one is forced at the last position."""
    ids, forced = (listed(fields.get(name)) for name in ("eos_token_id", "forced_eos_token_id"))
    if not forced:
        return ids, False
    if len(forced) != 1 or forced[0] not in ids:
        raise ConfigError(
            f"{origin.where}: forced_eos_token_id = {fields['forced_eos_token_id']} must be one of eos_token_id = "
            f"{fields.get('eos_token_id')}; {origin.advice('forced_eos_token_id')}."
        )
    return (*forced, *(token for token in ids if token != forced[0])), True


def listed(value: Any) -> tuple[Any, ...]:
    """Returns one value or several as a tuple; () for None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _lengths(fields: Mapping[str, Any], given: int, origin: Origin) -> dict[str, Any]:
    """Returns `max_tokens` and `min_tokens`, which count new tokens alone; `given` is the number of start tokens."""
    found = {}
    for ours, whole, new, default in (
        ("min_tokens", "min_length", "min_new_tokens", 0),
        ("max_tokens", "max_length", "max_new_tokens", _DEFAULT_NEW_TOKENS),
    ):
        if new in fields or not fields.get(whole, 0):
            found[ours] = fields.get(new, default)
        else:
            found[ours] = fields[whole] - given
    found["min_tokens"] = max(found["min_tokens"], 0)
    if found["min_tokens"] > found["max_tokens"] and origin is not _NOBODY:
        logging.warning("%s asks for at least %d of at most %d tokens.", origin.where, *found.values())
    found["min_tokens"] = min(found["min_tokens"], max(found["max_tokens"], 0))
    return found
