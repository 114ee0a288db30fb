"""The tokenizer class for all tokenizers: encoding, decoding, special tokens, saving."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import tokenizers as rust
from tokenizers import normalizers

from empax.core.config import ConfigError
from empax.core.files import hash_json, write_json, write_text
from empax.core.protocols import Reading
from empax.data.plain_text import PlainText

PAD_TOKEN, EOS_TOKEN, START_TOKEN = "<pad>", "</s>", "<s>"
SEPARATOR, SPEAKER_TOKEN, LISTENER_TOKEN = "<sep>", "<speaker>", "<listener>"
EXEMPLAR_SPEAKER_TOKEN, EXEMPLAR_LISTENER_TOKEN = "<exemplar_speaker>", "<exemplar_listener>"
CONFIG, RARE_WORDS = "tokenizer_config.json", "rare_words"
CLEAN_UP = "clean_up_tokenization_spaces"

_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Strings whose blanks `decode` removes, in this order. Source: `clean_up_tokenization` of transformers."""


class SubwordTokenizer:
    """A `core.protocols.Tokenizer` based on a Rust tokenizer: encodes batches in parallel, never pads or truncates.

    A text is plain text: anything in it that looks like a control token (`</s>`, `<sentiment:high>`, `<|im_end|>`) is
    encoded as ordinary text. Control tokens come from `token_id`, or from frames that went through `mark`.

    Attributes:
      backend: the Rust tokenizer.
      pad_id, eos_id, start_id: padding, end of a target, and the decoder's first token.
      cls_id, sep_id: frame of a text for an encoder: BERT's [CLS] and [SEP] if the vocabulary has them, else the start
        id, and `<sep>` or the end-of-sequence id.
      vocab_size: the largest id + 1, added tokens included; some ids below may have no token.
      own_size: `vocab_size` without the tokens that were added on loading.
      names: texts of the pad, eos and start token, as `pad_token` and so on; `bos_token` if one is declared.
      chat_template: chat template of the model (Jinja); None if it has none.
      reading: how an encoder with this tokenizer expects its texts.
      rare_words: for a word vocabulary, the number of different words of its training texts that are `<unk>`.
      cleans_up: whether `decode` removes blanks before signs: "that ' s so ." becomes "that's so.".
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
        clean_up: bool | None = None,
        chat_template: str | None = None,
        source: str = "the tokenizer",
    ):
        # A tokenizer.json may enable both; here the caller decides on lengths.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.vocab_size = num_ids(backend)
        self.own_size = self.vocab_size
        self.chat_template = chat_template
        self.reading = Reading()
        self.rare_words = 0
        self.cleans_up = isinstance(backend.model, rust.models.WordPiece) if clean_up is None else clean_up
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

    @functools.cached_property
    def hash(self) -> str:
        """Hash of everything that affects ids or texts."""
        return hash_json([self.backend.to_str(), self.names, self.cleans_up, self.chat_template])

    @property
    def unk_id(self) -> int | None:
        """Id of all words that a word vocabulary lacks; None for other vocabularies, which can encode any text."""
        model = self.backend.model
        return self.backend.token_to_id(model.unk_token) if isinstance(model, rust.models.WordLevel) else None

    @property
    def template_tokens(self) -> dict[str, str]:
        """The special tokens that a chat template may refer to, as arguments of `data.chat`."""
        return {name: text for name, text in self.names.items() if name != "start_token"}

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """Special ids that the model's own tokenizer puts before and after a text; T5: none, and end-of-sequence."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        framed = self.backend.encode("a", add_special_tokens=True).ids
        first = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return framed[:first], framed[first + len(bare) :]

    def encode(self, text: str) -> list[int]:
        """Encodes `text`, without special ids."""
        return self._plain.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes all texts in parallel."""
        return [row.ids for row in self._plain.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns `encode_batch`, with the (start, end) characters of each id in its text."""
        rows = self._plain.backend.encode_batch(list(texts), add_special_tokens=False)
        return [(row.ids, row.offsets) for row in rows]

    def mark(self, frame: str) -> str:
        """Marks control tokens in `frame`, a text of ours, so that `encode` treats them as such.

        The result may be joined with users' texts and encoded in one pass.
        """
        return self._plain.mark(frame)

    def decode(self, ids: Sequence[int], words: Sequence[str] = ()) -> str:
        """Decodes ids up to the first end-of-sequence id, with blanks; skips special tokens.

        The text is that of transformers' `decode` with skip_special_tokens. Departure: if tokenizer_config.json does
        not specify cleaning up, WordPiece does it. `words` are the texts of the ids from `vocab_size` on, for a word
        vocabulary.
        """
        plain = [int(i) for i in ids]
        if self.eos_id in plain:
            plain = plain[: plain.index(self.eos_id)]
        if not words:
            return self._text(plain)
        said = []
        for known, run in itertools.groupby(plain, lambda i: i < self.vocab_size):
            if known:
                said.append(self._text(list(run)))
            else:
                said += [words[i - self.vocab_size] for i in run if i - self.vocab_size < len(words)]
        return " ".join(filter(None, said))

    def continuation(self, text: str, ids: Sequence[int]) -> str:
        """Returns the text that `ids` add to `text`, with the blank in between, which `decode(ids)` may drop."""
        before = self.encode(text)
        start, whole = self.decode(before), self.decode([*before, *ids])
        return whole.removeprefix(start) if whole.startswith(start) else self.decode(ids)

    def _text(self, ids: list[int]) -> str:
        text = self.backend.decode(ids, skip_special_tokens=True)
        for found in _CLEANED if self.cleans_up else ():
            text = text.replace(found, found.strip())
        return text

    def lower_cased(self) -> SubwordTokenizer:
        """Returns a copy that lower-cases texts."""
        other = copy.copy(self)
        for kept in ("_plain", "hash"):  # cached for the old backend
            other.__dict__.pop(kept, None)
        other.backend = rust.Tokenizer.from_str(self.backend.to_str())
        given = other.backend.normalizer
        both = normalizers.Sequence([normalizers.Lowercase(), *([given] if given else [])])
        other.backend.normalizer = both  # pyright: ignore[reportAttributeAccessIssue]
        return other

    def token_id(self, token: str) -> int:
        """Returns the id of a token by its text; ConfigError if the vocabulary lacks it."""
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
        fields[CLEAN_UP] = self.cleans_up
        if self.chat_template is not None:
            fields["chat_template"] = self.chat_template
        if self.rare_words:
            fields[RARE_WORDS] = self.rare_words
        write_json(folder / CONFIG, fields)

    def _first_of(self, *names: str) -> int:
        found = (self.backend.token_to_id(name) for name in names)
        return self.token_id(next(name for name, i in zip(names, found, strict=True) if i is not None))


def num_ids(backend: rust.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
