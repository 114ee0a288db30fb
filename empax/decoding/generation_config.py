"""How a model's own folder says to decode: `generation_config.json` as our settings, or refused by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError, check_keys, to_settings
from empax.data.model_files import read_model_json
from empax.decoding.settings import DecodeSettings

FILE = "generation_config.json"

_SAME_TEXT = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    *("remove_invalid_values", "transformers_version", "_from_model_config", "_commit_hash", "bos_token_id"),
}
"""Options about speed, memory and what else is returned, and what fits finite logits only."""

_UNREAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sequence_bias", "exponential_decay_length_penalty", "watermarking_config"), (None,)),
    **dict.fromkeys(("stop_strings", "max_time", "dola_layers", "constraints", "force_words_ids"), (None,)),
    "guidance_scale": (None, 1),
    "token_healing": (None, False),
}
"""Options that change the text and are not here, with the values that switch them off."""

_UNREAD_BY_METHOD: dict[str, dict[str, tuple[Any, ...]]] = {
    "greedy": {"penalty_alpha": (None, 0)},  # contrastive search
    "beam": {"renormalize_logits": (None, False)},
    "sample": {"top_h": (None,), "epsilon_cutoff": (None, 0), "eta_cutoff": (None, 0)},
}
"""The same, where only one way of decoding looks at them."""

_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "bad_words_ids": "bad_words",
}
_BY_METHOD: dict[str, dict[str, str]] = {
    "greedy": {},
    "beam": {
        name: name
        for name in (
            *("num_beams", "length_penalty", "early_stopping"),
            *("num_beam_groups", "diversity_penalty", "num_return_sequences"),
        )
    },
    "sample": {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
    | {"num_return_sequences": "num_samples"},
}
_IDS = ("eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
_SIZES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
_METHOD = ("do_sample", "num_beams")

_KNOWN = {
    *_SAME_TEXT, *_UNREAD, *_ALWAYS, *_IDS, *_LENGTHS, *_METHOD,
    *(name for table in (*_UNREAD_BY_METHOD.values(), *_BY_METHOD.values()) for name in table),
}  # fmt: skip

_DEFAULT_NEW_TOKENS, _DEFAULT_TOP_K = 20, 50
"""What transformers takes where nothing is said."""


@dataclasses.dataclass(frozen=True)
class ModelDecoding:
    """How a model is meant to decode.

    Attributes:
      settings: for `decoding.search.generate`; `more_eos_ids` are those beside `eos_id`.
      start_id: what the decoder of an encoder-decoder reads first; None = the folder does not say.
      eos_id: ends a response, and is what `end_at_limit` forces; None = the folder does not say.
      pad_id: None = the folder does not say.
    """

    settings: DecodeSettings
    start_id: int | None
    eos_id: int | None
    pad_id: int | None

    def with_eos(self, eos_id: int) -> DecodeSettings:
        """Settings for a search whose end-of-sequence token is `eos_id`, which need not be the folder's first.

        Raises:
          ConfigError: the folder forces another token at the end.
        """
        ids = (() if self.eos_id is None else (self.eos_id,)) + self.settings.more_eos_ids
        if self.settings.end_at_limit and eos_id != self.eos_id:
            raise ConfigError(
                f"forced_eos_token_id = {self.eos_id} of the model is not {eos_id}, the end of sequence of the "
                "tokenizer; take it out of generation_config.json, or take the model's own tokenizer."
            )
        return dataclasses.replace(self.settings, more_eos_ids=tuple(token for token in ids if token != eos_id))


def read_generation_config(
    folder: Path,
    *,
    encoder_decoder: bool,
    prompt_tokens: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> ModelDecoding:
    """What a folder's `generation_config.json` asks for; without one, what its config.json says of generation.

    What nobody says is as transformers has it: 20 new tokens, the likeliest token at each step, top_k = 50 if sampled.

    Args:
      folder: of a model.
      encoder_decoder: whether the response has a decoder of its own, or goes on behind a prompt.
      prompt_tokens: of a prompt, with its padding: what `max_length` and `min_length` count with a response.
      changes: options under transformers' names that take the place of the file's; None = as if it were not there.

    Raises:
      ConfigError: an option that changes the text is not here, or has a value that is not allowed.
      DataError: the file is broken.
    """
    path = folder / FILE
    if path.is_file():
        fields = read_model_json(path)
        for name in sorted(set(fields) - _KNOWN):
            logging.warning("%s: %s is no option of decoding that is known here; it has no effect.", path, name)
    else:
        path = folder / "config.json"
        fields = read_model_json(path) if path.is_file() else {}
        if fields.get("force_bos_token_to_be_generated"):
            fields.setdefault("forced_bos_token_id", fields.get("bos_token_id"))
    check_keys(changes or {}, _KNOWN, where="changes", owner=FILE)
    fields = {name: value for name, value in {**fields, **(changes or {})}.items() if value is not None}
    _check_integers(fields, path)
    method = _method(fields, path)
    _refuse_unread(fields, method, path)
    values = {ours: fields[theirs] for theirs, ours in (_ALWAYS | _BY_METHOD[method]).items() if theirs in fields}
    if method == "beam":
        values.setdefault("num_return_sequences", 1)
    if method == "sample":
        values.setdefault("top_k", _DEFAULT_TOP_K)
    eos_ids, forced = _eos_ids(fields, path)
    values |= {"method": method, "more_eos_ids": eos_ids[1:], "end_at_limit": forced}
    if encoder_decoder and "forced_bos_token_id" in fields:  # behind a prompt transformers forces nothing
        values["first_token"] = fields["forced_bos_token_id"]
    values |= _lengths(fields, 1 if encoder_decoder else prompt_tokens, path)
    return ModelDecoding(
        settings=to_settings(DecodeSettings, values, where=str(path)),
        start_id=fields.get("decoder_start_token_id", fields.get("bos_token_id")) if encoder_decoder else None,
        eos_id=eos_ids[0] if eos_ids else None,
        pad_id=fields.get("pad_token_id"),
    )


def _check_integers(fields: dict[str, Any], path: Path) -> None:
    """Raises ConfigError for a length, a size or an id that is no integer; sizes below 0 become 0, which is off."""
    for name in (*_IDS, *_LENGTHS, *_SIZES):
        several = isinstance(fields.get(name), list | tuple) and name in ("eos_token_id", "forced_eos_token_id")
        for value in fields.get(name, []) if several else [fields.get(name, 0)]:
            if type(value) is not int:
                raise ConfigError(f"{path}: {name} = {fields[name]!r} must be an integer; {_advice(name, path)}.")
    fields |= {name: max(fields[name], 0) for name in _SIZES if name in fields}


def _advice(name: str, path: Path) -> str:
    return f"take it out of {path}, or pass changes={{{name!r}: None}}"


def _method(fields: Mapping[str, Any], path: Path) -> str:
    beams, samples = fields.get("num_beams", 1), fields.get("do_sample", False)
    if beams != 1 and samples:
        raise ConfigError(
            f"{path}: num_beams = {beams} with do_sample = True samples inside a beam, which is not here; "
            "set do_sample to False or num_beams to 1, there or in `changes`."
        )
    if fields.get("num_return_sequences", 1) != 1 and beams == 1 and not samples:
        raise ConfigError(
            f"{path}: num_return_sequences = {fields['num_return_sequences']} has no meaning where the likeliest token "
            f"is taken; {_advice('num_return_sequences', path)}."
        )
    return "beam" if beams != 1 else "sample" if samples else "greedy"


def _refuse_unread(fields: Mapping[str, Any], method: str, path: Path) -> None:
    for name, off in (_UNREAD | _UNREAD_BY_METHOD[method]).items():
        if name in fields and fields[name] not in off:
            raise ConfigError(
                f"{path}: {name} = {fields[name]!r} would change the text and is not here; {_advice(name, path)}."
            )


def _eos_ids(fields: Mapping[str, Any], path: Path) -> tuple[tuple[int, ...], bool]:
    """The ids that end a response, with the one that the last place forces in front, and whether it forces one."""
    ids, forced = (_several(fields.get(name, ())) for name in ("eos_token_id", "forced_eos_token_id"))
    if not forced:
        return ids, False
    if len(forced) != 1 or forced[0] not in ids:
        raise ConfigError(
            f"{path}: forced_eos_token_id = {fields['forced_eos_token_id']} must be one of eos_token_id = "
            f"{fields.get('eos_token_id')}; {_advice('forced_eos_token_id', path)}."
        )
    return (*forced, *(token for token in ids if token != forced[0])), True


def _several(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _lengths(fields: Mapping[str, Any], given: int | None, path: Path) -> dict[str, Any]:
    """`max_tokens` and `min_tokens`, which count new tokens alone; `given` is how many are no new ones."""
    found = {}
    for ours, whole, new, default in (
        ("max_tokens", "max_length", "max_new_tokens", _DEFAULT_NEW_TOKENS),
        ("min_tokens", "min_length", "min_new_tokens", 0),
    ):
        if new in fields or not fields.get(whole, 0):
            found[ours] = fields.get(new, default)
        elif given is None:
            raise ConfigError(
                f"{path}: {whole} = {fields[whole]} counts the prompt, whose length is not known here; give {new} in "
                "`changes`, or prompt_tokens."
            )
        else:
            found[ours] = fields[whole] - given
    found["min_tokens"] = max(found["min_tokens"], 0)
    if found["min_tokens"] > found["max_tokens"]:
        logging.warning("%s asks for at least %d of at most %d tokens.", path, found["min_tokens"], found["max_tokens"])
        found["min_tokens"] = found["max_tokens"]
    return found
