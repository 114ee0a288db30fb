"""Options of one call, under our names or those of transformers, which override those of the model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError, check_keys, to_settings
from empax.decoding.constraints import check_ids
from empax.decoding.generation_config import (
    BY_METHOD,
    DEFAULT_TOP_K,
    DRAWN,
    IDS,
    KNOWN,
    LENGTHS,
    SAME_TEXT,
    ModelDecoding,
    Origin,
    decoding_of,
    listed,
)
from empax.decoding.settings import DecodeSettings, num_hypotheses

_THEIRS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "encoder_no_repeat_ngram": "encoder_no_repeat_ngram_size",
    "bad_words": "bad_words_ids",
}
"""Our names that differ from those of transformers."""

_OFF = {field.name: field.default for field in dataclasses.fields(DecodeSettings)}
_OURS = {*_OFF} - {*KNOWN} - {*_THEIRS} - {"method", "draw_beams"}
"""Options that transformers does not have."""

_RETURNED = ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate")
_RERANKED = {"rerank_length": "consensus", "rerank_similarity": "similarity", "rerank_likelihood": "similarity"}
"""The value of `rerank` that reads an option."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Decoding options of one call, which returns `num_texts` hypotheses for each source.

    The search ends with `eos_id` and the `more_eos_ids` of its settings. `start_id` is the first token of an
    encoder-decoder's decoder; None = that of the model. `counts_prompt` names those of "max_tokens" and "min_tokens"
    that include the tokens of the prompt.
    """

    settings: DecodeSettings
    num_texts: int
    eos_id: int
    start_id: int | None
    counts_prompt: frozenset[str]

    def most_tokens(self, prompt_tokens: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Returns the maximum number of tokens of each answer."""
        most = np.full_like(prompt_tokens, self.settings.max_tokens)
        return most - prompt_tokens if "max_tokens" in self.counts_prompt else most

    def limits(self, prompt_tokens: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
        """Returns the minimum and maximum number of tokens of each answer."""
        most, fewest = self.most_tokens(prompt_tokens), np.full_like(prompt_tokens, self.settings.min_tokens)
        if "min_tokens" in self.counts_prompt:
            fewest = fewest - prompt_tokens
        return np.clip(fewest, 0, most), most


def call_of(
    options: Mapping[str, Any],
    fields: Mapping[str, Any],
    *,
    own: DecodeSettings,
    encoder_decoder: bool,
    eos_id: int,
    vocab_size: int,
) -> Call:
    """Combines the options of a call with those of the model, which are the defaults.

    A name of transformers has the same meaning as there. Departures: None means not specified, except that `top_k=None`
    keeps all tokens, as there; `num_beams` alone means beam search, even if the model's folder sets `do_sample`; a
    length of the call overrides any length of the folder.

    The options of the model are `fields`, under transformers' names, of which those that the method does not read are
    ignored, and `own`, for options that transformers does not have. `eos_id` is the tokenizer's. Raises ConfigError if
    an option is unknown, is not read by the method, contradicts another, or has a value that is not allowed.
    """
    asked = {name: value for name, value in options.items() if name not in SAME_TEXT}
    check_keys(asked, {*_OFF, *KNOWN} - SAME_TEXT - {"draw_beams"}, where="generate", owner="generate")
    numbers = np.ndarray | np.generic  # converted to Python's
    given = {name: value.tolist() if isinstance(value, numbers) else value for name, value in options.items()}
    theirs, spelled = _translated(given)
    try:
        changes = theirs | _method(given, theirs, fields)
        for length, new in zip(LENGTHS[::2], LENGTHS[1::2], strict=True):
            if changes.get(length) is not None and changes.get(new) is not None:
                raise ConfigError(f"generate: {length} = {given[length]} has no effect beside {new}; give one of them.")
        if "top_k" in changes and changes["top_k"] is None:
            changes["top_k"] = 0
        base = {name: value for name, value in fields.items() if value is not None and name != "num_return_sequences"}
        for both in (LENGTHS[:2], LENGTHS[2:]):
            if any(changes.get(name) is not None for name in both):
                base = {name: value for name, value in base.items() if name not in both}
        whole = {**base, **{name: value for name, value in changes.items() if value is not None}}
        num_texts = whole.pop("num_return_sequences", 1)
        found = decoding_of(whole, _CALLER, encoder_decoder=encoder_decoder)
        settings = _with_ours(found, given, own, num_texts, encoder_decoder=encoder_decoder)
        _refuse_idle(given, settings, encoder_decoder=encoder_decoder)
        _check_single_ids(given, vocab_size)
        check_ids(settings, vocab_size)
    except ConfigError as error:
        raise ConfigError(re.sub(rf"\b({'|'.join(spelled)})\b", lambda hit: spelled[hit[1]], str(error))) from error
    pairs = zip(("max_tokens", "min_tokens"), LENGTHS[::2], LENGTHS[1::2], strict=True)
    counted = {ours for ours, length, new in pairs if not encoder_decoder and whole.get(length) and new not in whole}
    ends = (*([] if found.eos_id is None else [found.eos_id]), *settings.more_eos_ids)
    if found.settings.end_at_limit or (listed(given.get("eos_token_id")) and eos_id not in ends):
        eos_id = ends[0]
    settings = dataclasses.replace(settings, more_eos_ids=tuple(token for token in ends if token != eos_id))
    start = whole.get("decoder_start_token_id") if encoder_decoder else None
    return Call(settings, num_texts, eos_id, start, frozenset(counted))


_CALLER = Origin("generate", lambda name: f"leave {name} out")


def _translated(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns options under transformers' names, and the caller's spelling of each name, for messages."""
    theirs, spelled = {}, {}
    for name, value in given.items():
        if name == "method":
            continue
        other = _THEIRS.get(name, name)
        if other in theirs:
            raise ConfigError(f"generate: {spelled[other]} and {name} mean the same; give one of them.")
        theirs[other], spelled[other] = value, name
    ours = {theirs: ours for ours, theirs in _THEIRS.items()} | {"max_length": "max_tokens", "min_length": "min_tokens"}
    both = {ours[other]: name for other, name in spelled.items() if other in ours and given[name] is not None}
    return theirs, {"draw_beams": "do_sample", **spelled, **both}


def _method(given: Mapping[str, Any], theirs: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `do_sample` and `num_beams` of a call, which may give `method` instead; {} = not specified."""
    asked = {name: theirs.get(name) for name in ("do_sample", "num_beams")}
    method, samples, beams = given.get("method"), asked["do_sample"], asked["num_beams"]
    if samples is not None and not isinstance(samples, bool):
        raise ConfigError(f"generate: do_sample = {samples!r} must be True or False.")
    if beams is not None and (not isinstance(beams, int) or isinstance(beams, bool) or beams < 1):
        raise ConfigError(f"generate: num_beams = {beams!r} must be a whole number of at least 1.")
    if method is None:
        if samples is None and beams is None:
            return {}
        if samples is None:
            samples = fields.get("do_sample") if beams == 1 else False
        if beams is None:
            beams = fields.get("num_beams")
        return {"do_sample": samples, "num_beams": beams}
    to_settings(DecodeSettings, {"method": method}, where="generate")
    if samples is not None and samples != (method == "sample"):
        raise ConfigError(f"generate: do_sample = {samples} contradicts method = {method!r}; give one of them.")
    if beams is not None and beams > 1 and method != "beam":
        raise ConfigError(f"generate: num_beams = {beams} has no effect with method = {method!r}; give one of them.")
    if method != "beam":
        return {"do_sample": method == "sample", "num_beams": 1}
    own = fields.get("num_beams") or 1
    return {"do_sample": False, "num_beams": beams or (own if own > 1 else _OFF["num_beams"])}


def _with_ours(
    found: ModelDecoding, given: Mapping[str, Any], own: DecodeSettings, num_texts: Any, *, encoder_decoder: bool
) -> DecodeSettings:
    """Returns the settings with the options that transformers does not have."""
    values = {field.name: getattr(found.settings, field.name) for field in dataclasses.fields(DecodeSettings)}
    kept = _OURS if not encoder_decoder else _OURS - {"first_token"}
    values |= {name: getattr(own, name) for name in kept - {"end_at_limit"}}
    values |= {name: value for name, value in given.items() if name in _OURS and value is not None}
    values["more_eos_ids"] = (*found.settings.more_eos_ids, *listed(given.get("more_eos_ids")))
    several = {"sample": values["num_samples"], "beam": 2}.get(values["method"], 1) > 1
    if given.get("rerank") is None and not (several and values["method"] == own.method):  # the model's is for its own
        values |= {name: _OFF[name] for name in ("rerank", "rerank_exemplars", "rerank_length")}
    if type(num_texts) is not int or num_texts < 1:
        raise ConfigError(f"generate: num_return_sequences = {num_texts!r} must be a whole number of at least 1.")
    if values["method"] == "sample" and given.get("num_samples") is None:
        values["num_samples"] = max(values["num_samples"], num_texts)
    values["num_return_sequences"] = None
    if num_texts > 1 and values["method"] == "greedy":
        raise ConfigError(
            f"generate: num_return_sequences = {num_texts}, but taking the likeliest token gives one text; add "
            "do_sample=True or num_beams."
        )
    settings = to_settings(DecodeSettings, values, where="generate")
    if num_texts > num_hypotheses(settings):
        width = {"beam": "num_beams", "sample": "num_samples"}[settings.method]
        raise ConfigError(
            f"generate: num_return_sequences = {num_texts} is more than {width} = {num_hypotheses(settings)}; "
            "raise that, or lower this."
        )
    ranked_by_search = settings.method == "beam" and not settings.rerank
    return dataclasses.replace(settings, num_return_sequences=num_texts) if ranked_by_search else settings


def check_all_read(settings: DecodeSettings, where: str) -> None:
    """Raises ConfigError for options of a config that the method, or the re-ranking, does not read."""
    read = {*BY_METHOD[settings.method].values(), *(DRAWN if settings.draw_beams else ())}
    read |= {"draw_beams"} if settings.method == "beam" else set()
    by_method = {"draw_beams", *(ours for table in BY_METHOD.values() for ours in table.values())}
    idle = by_method - read | {name for name, reader in _RERANKED.items() if settings.rerank != reader}
    if found := [name for name in _OFF if name in idle and getattr(settings, name) != _OFF[name]]:
        given = ", ".join(f"{name} = {getattr(settings, name)!r}" for name in found)
        off = ", ".join(f"{name}={_OFF[name]!r}" for name in found)
        raise ConfigError(
            f"{where}: {given} would change nothing with method = {settings.method!r}, rerank = {settings.rerank!r}; "
            f"set {off}, or another method."
        )


def _check_single_ids(given: Mapping[str, Any], vocab_size: int) -> None:
    """Raises ConfigError for an id of the call that is outside the vocabulary."""
    for name in IDS:
        if any(not 0 <= token < vocab_size for token in listed(given.get(name))):
            raise ConfigError(f"generate: {name} = {given[name]} must lie in [0, {vocab_size}), the vocabulary.")


def _refuse_idle(given: Mapping[str, Any], settings: DecodeSettings, *, encoder_decoder: bool) -> None:
    """Raises ConfigError for the first option of the call that has no effect."""
    method = settings.method
    for name, value in given.items():
        other = _THEIRS.get(name, name)
        if value is None or value in _NEUTRAL.get(other, ()):
            continue
        if other in _RETURNED and value:
            raise ConfigError(
                f"generate: {name} = {value!r} asks for more than texts, but `generate` returns only texts."
            )
        readers = _READERS.get(other)
        if readers and method not in readers and not (settings.draw_beams and other in DRAWN):
            # do_sample=True alone would draw the beams of a folder, which has no number of samples.
            add = "method='sample'" if other == "num_samples" else " or ".join(_ADD[reader] for reader in readers)
            raise ConfigError(
                f"generate: {name} = {value!r} has no effect when {_HOW[method]}; add {add}, or leave {name} out."
            )
        if other in ("forced_bos_token_id", "decoder_start_token_id") and not encoder_decoder:
            raise ConfigError(
                f"generate: {name} = {value!r} has no effect after a prompt; first_token sets how an answer begins."
            )
        if other in _RERANKED and settings.rerank != _RERANKED[other]:
            raise ConfigError(
                f"generate: {name} = {value!r} has no effect with rerank = {settings.rerank!r}; set rerank to "
                f"{_RERANKED[other]!r}, or leave {name} out."
            )
        if other == "rerank_exemplars":
            raise ConfigError(
                f"generate: {name} = {value!r} has no effect, since there are no exemplars; leave it out."
            )


_READERS = {
    name: [reader for reader, table in BY_METHOD.items() if name in table]
    for table in BY_METHOD.values()
    for name in table
    if name != "num_beams"
} | {"num_samples": ["sample"]}
_NEUTRAL = {name: (off,) for name, off in _OFF.items()} | {"top_k": (0, DEFAULT_TOP_K), "num_return_sequences": (1,)}
"""Values that are allowed for options without effect."""
_HOW = {"greedy": "the likeliest token is taken", "beam": "a beam is searched", "sample": "tokens are drawn"}
_ADD = {"beam": "num_beams=4", "sample": "do_sample=True"}
