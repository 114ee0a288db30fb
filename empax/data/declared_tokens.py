"""What the files beside a `tokenizer.json` say: tokens that it may lack, and settings that it may contradict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from empax.core.files import DataError
from empax.data.model_files import is_listed, read_model_json, short, warn_of_unknown

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FIELDS = """
    add_bos_token add_eos_token add_prefix_space added_tokens_decoder auto_map backend chat_template
    clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    do_basic_tokenize do_lower_case errors extra_ids fix_mistral_regex
    full_tokenizer_file init_inputs is_local keep_accents language_codes legacy local_files_only max_length
    mask_token_sent model_input_names model_max_length name_or_path never_split offset pad_to_multiple_of
    pad_token_type_id padding padding_side processor_class rare_words return_offsets return_token_type_ids
    separate_vocabs source_lang sp_model_kwargs spaces_between_special_tokens special_tokens_map_file
    split_special_tokens src_lang stride strip_accents target_lang tgt_lang tokenize_chinese_chars tokenizer_class
    tokenizer_file
    tokenizer_type trim_offsets truncation truncation_side truncation_strategy use_default_system_prompt use_fast
    vocab_file"""
"""Fields of tokenizer_config.json beside those that name tokens. What cuts a text stands in tokenizer.json alone."""

_AGREE = {
    "do_lower_case": ("BertNormalizer", "lowercase"),
    "strip_accents": ("BertNormalizer", "strip_accents"),
    "tokenize_chinese_chars": ("BertNormalizer", "handle_chinese_chars"),
    "add_prefix_space": ("ByteLevel", "add_prefix_space"),
}
"""Fields of tokenizer_config.json, and the step of a tokenizer.json and its field that say the same."""


class Declared(NamedTuple):
    """Tokens that a folder declares.

    Attributes:
      names: special ones by what they are for, `pad_token` and so on.
      numbered: those with ids, in their order; transformers appends first of these what the vocabulary lacks.
      more: further special ones, which it appends last.
    """

    names: dict[str, str]
    numbered: tuple[AddedToken, ...] = ()
    more: tuple[AddedToken, ...] = ()


def read_declared(folder: Path, tokenizer: Mapping[str, Any]) -> Declared:
    """What stands beside the tokenizer.json of a folder, whose fields are `tokenizer`.

    Raises:
      DataError: a file is broken, or contradicts tokenizer.json.
    """
    names: dict[str, str] = {}
    numbered: list[AddedToken] = []
    more: list[AddedToken] = []
    for file in (folder / ADDED, folder / SPECIAL, folder / CONFIG):
        if not is_listed(file):
            continue
        said = read_model_json(file)
        if file.name == ADDED:
            ids = sorted(said, key=lambda text: str(said[text]).zfill(9))
            numbered += [_token(file, "a key", text) for text in ids]
            continue
        numbered += _numbered(file, said)
        more += _more(file, said)
        for name, value in said.items():
            if name.endswith("_token") and value is not None and not isinstance(value, bool):  # add_bos_token is one
                names[name] = _token(file, name, value).content
        known = (*names, *_LISTS, *(_FIELDS.split() if file.name == CONFIG else ()))
        warn_of_unknown(said, known, file, "tokenizer.json alone says how a text is cut")
        if file.name == CONFIG:
            _check_agreement(file, said, tokenizer)
    return Declared({name: text for name, text in names.items() if text}, tuple(numbered), tuple(more))


def _numbered(file: Path, said: Mapping[str, Any]) -> Iterator[AddedToken]:
    decoder = said.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(isinstance(key, str) and key.isdecimal() for key in decoder):
        raise DataError(f"{file}: added_tokens_decoder = {short(decoder)} must map ids to tokens.")
    for key in sorted(decoder, key=lambda key: key.zfill(9)):
        yield _token(file, f"added_tokens_decoder.{key}", decoder[key])


def _more(file: Path, said: Mapping[str, Any]) -> Iterator[AddedToken]:
    for name in _LISTS:
        listed = said.get(name) or []
        if not isinstance(listed, list | dict):
            raise DataError(f"{file}: {name} = {short(listed)} must be a list of tokens.")
        for value in listed.values() if isinstance(listed, dict) else listed:
            yield _token(file, name, value)


def _token(file: Path, name: str, value: Any) -> AddedToken:
    """A token as a text, or as an object with its text and how it is found."""
    said = value if isinstance(value, dict) else {"content": value, "special": True}
    text = said.get("content")
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{file}: {name} = {short(value)} must be a text; correct it.")
    switches = ("single_word", "lstrip", "rstrip", "normalized", "special")
    options = {switch: said[switch] for switch in switches if said.get(switch) is not None}
    if not all(isinstance(option, bool) for option in options.values()):
        raise DataError(f"{file}: {name} = {short(value)}: {', '.join(switches)} must be true or false.")
    return AddedToken(text, **{"special": True, "normalized": False} | options)


def _check_agreement(file: Path, said: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """Raises DataError where the file says otherwise than tokenizer.json how a text is cut."""
    for name, (kind, field) in _AGREE.items():
        for step in (*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))):
            here, there = said.get(name), step.get(field)
            if step.get("type") == kind and isinstance(here, bool) and isinstance(there, bool) and here != there:
                raise DataError(
                    f"{file}: {name} = {here}, but tokenizer.json says {field} = {there} ({kind}); make them agree."
                )


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """A normaliser or pre-tokeniser, or those of a sequence."""
    if isinstance(step, dict):
        yield step
        for name in ("normalizers", "pretokenizers"):
            for inner in step.get(name) or []:
                yield from _steps(inner)
