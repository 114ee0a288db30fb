"""Encoding untrusted text as plain text: no string in it becomes a control token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import tokenizers as rust


class PlainText:
    """A copy of a Rust tokenizer in which control tokens have secret names, so that no text can contain one.

    Otherwise it equals the original: a text without names of control tokens gets the same ids. The option
    `encode_special_tokens` is not enough, since the models themselves also know control tokens (Unigram finds the piece
    `</s>`, WordLevel the word `<sep>`).
    """

    def __init__(self, backend: rust.Tokenizer, more: Iterable[str] = ()):
        """Copies `backend`; `more` names control tokens that it does not declare as added tokens."""
        controls = [token.content for token in backend.get_added_tokens_decoder().values() if _is_control(token)]
        controls = list(dict.fromkeys((*controls, *more)))
        secret = secrets.token_hex(8)
        self._names = {token: f"<{secret}:{number}>" for number, token in enumerate(controls)}
        # Longest first: the Rust side takes the longest of the leftmost matches.
        longest = sorted(controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self.backend = rust.Tokenizer.from_str(json.dumps(_renamed(json.loads(backend.to_str()), self._names)))
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        names = (name for name in self._names.values() if name not in added)
        self.backend.add_special_tokens([rust.AddedToken(name, normalized=False) for name in names])

    def mark(self, frame: str) -> str:
        """Replaces control tokens in `frame` by their secret names."""
        return self._pattern.sub(lambda found: self._names[found[0]], frame)


def _is_control(token: rust.AddedToken) -> bool:
    """Whether an added token is a control token: all special ones, and tags that only lack the flag, such as `<think>`.

    Added tokens that are runs of blanks or signs, or whole words, are text.
    """
    content = token.content
    return bool(content) and (token.special or (any(map(str.isalnum, content)) and not content.strip().isalnum()))


def _renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Renames tokens in the fields of a tokenizer.json; their ids stay the same."""
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
        if token["content"] in names:  # matched before the normalizer, which may change a name
            token = token | {"content": names[token["content"]], "normalized": False}
        added.append(token)
    return fields | {"added_tokens": added, "post_processor": None}
