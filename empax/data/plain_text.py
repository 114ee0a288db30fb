"""Text that nobody vouches for, as plain text: no string in it becomes a control token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import tokenizers as rust


class PlainText:
    """A copy of a Rust tokenizer in which control tokens have secret names, so that no text can hold one.

    All else is the original's: a text without the name of a control token gets the same ids. A copy is needed since the
    models themselves know control tokens too (Unigram finds the piece `</s>`, WordLevel the word `<sep>`), beyond what
    the option `encode_special_tokens` turns off.
    """

    def __init__(self, backend: rust.Tokenizer, more: Iterable[str] = ()):
        """Copies `backend`; `more` names control tokens that it does not declare as added ones."""
        controls = [token.content for token in backend.get_added_tokens_decoder().values() if _is_control(token)]
        controls = list(dict.fromkeys((*controls, *more)))
        secret = secrets.token_hex(8)
        self._names = {token: f"<{secret}:{number}>" for number, token in enumerate(controls)}
        # The longest first: the Rust side takes the longest of the leftmost ones.
        longest = sorted(controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self.backend = rust.Tokenizer.from_str(json.dumps(_renamed(json.loads(backend.to_str()), self._names)))
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        names = (name for name in self._names.values() if name not in added)
        self.backend.add_special_tokens([rust.AddedToken(name, normalized=False) for name in names])

    def mark(self, frame: str) -> str:
        """`frame` with its control tokens under their secret names."""
        return self._pattern.sub(lambda found: self._names[found[0]], frame)


def _is_control(token: rust.AddedToken) -> bool:
    """Whether an added token steers a model: all special ones, and tags that only lack the flag, such as `<think>`.

    Runs of blanks or signs and whole words, added to a vocabulary as tokens, are text.
    """
    content = token.content
    return bool(content) and (token.special or (any(map(str.isalnum, content)) and not content.strip().isalnum()))


def _renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields of a tokenizer.json with other names for some tokens; their ids stay."""
    model = fields["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b[prefix:]))]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = []
    for token in fields["added_tokens"]:
        if token["content"] in names:  # found before the normalizer runs, which may change a name
            token = token | {"content": names[token["content"]], "normalized": False}
        added.append(token)
    return fields | {"added_tokens": added, "post_processor": None}
