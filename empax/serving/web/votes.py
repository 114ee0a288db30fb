"""Two systems side by side: which stands left, and what people say of them, as files of `empax rate score`."""

from __future__ import annotations

import collections
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import json_text, read_json, write_together
from empax.rating.study import ASPECTS

SIDES = ("a", "b")
_VALUES = {"a": "1", "b": "2", "tie": "tie"}
_MOST_OPEN = 10_000


class Votes:
    """The conversations that are open, and the votes on those that are closed.

    In `folder`, key.json says whose each reply was, and answers-RATER.json what a rater has said: they are what `empax
    rate score` reads. Neither has texts.

    Raises:
      ConfigError: the folder has votes on other systems.
    """

    def __init__(self, folder: Path, systems: tuple[str, str]):
        self.folder, self.systems = folder, systems
        self._open = collections.OrderedDict[str, tuple[str, str]]()
        path = folder / "key.json"
        self._key: dict[str, Any] = read_json(path) if path.exists() else {
            "study": secrets.token_hex(8), "systems": list(systems), "settings": {"form": "pairs"}, "items": [],
        }  # fmt: skip
        if sorted(self._key["systems"]) != sorted(systems):
            raise ConfigError(
                f"{folder} has votes on {' and '.join(self._key['systems'])}; give --votes another folder."
            )

    def begin(self) -> str:
        """A new conversation; chance says who stands left."""
        name = secrets.token_hex(8)
        first, second = self.systems
        self._open[name] = (first, second) if secrets.randbelow(2) else (second, first)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return name

    def system(self, alias: str) -> str | None:
        """Who stands at "CONVERSATION/SIDE"; None where there is no such place."""
        name, _, side = alias.partition("/")
        sides = self._open.get(name)
        return sides[SIDES.index(side)] if sides and side in SIDES else None

    def vote(self, conversation: str, rater: str, said: Mapping[str, Any]) -> dict[str, str] | None:
        """Keeps what somebody says and closes the conversation; who was who, or None where no such one is open.

        Raises:
          ValueError: names what is no answer.
        """
        if not re.fullmatch(r"[A-Za-z0-9-]{1,40}", rater):
            raise ValueError("rater: must be 1 to 40 letters, digits or hyphens.")
        for aspect in ASPECTS:
            if said.get(aspect) not in _VALUES:
                raise ValueError(f"answers.{aspect}: must be one of {', '.join(_VALUES)}.")
        if conversation not in self._open:
            return None
        sides, path = self._open[conversation], self.folder / f"answers-{rater}.json"
        number = len(self._key["items"]) + 1
        item = {"number": number, "id": conversation, "systems": list(sides), "kind": "rated", "of": 0}
        key = {**self._key, "items": [*self._key["items"], item]}
        given = read_json(path)["answers"] if path.exists() else {}
        given[str(number)] = {aspect: _VALUES[said[aspect]] for aspect in ASPECTS}
        answers = {"study": key["study"], "rater": rater, "answers": given}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_together(self.folder, {"key.json": json_text(key), path.name: json_text(answers)})
        self._key = key
        del self._open[conversation]
        return dict(zip(SIDES, sides, strict=True))
