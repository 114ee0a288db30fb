"""Two systems side by side: which stands left, and what people say of them, as files of `empax rate score`."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import json_text, read_json, system_errors, write_together
from empax.rating.study import ASPECTS

SIDES = ("a", "b")
_KEY = "key.json"
_VALUES = {"a": "1", "b": "2", "tie": "tie"}


def check_compared(systems: Sequence[str], folder: Path) -> None:
    """Raises ConfigError if two systems have one name, or `folder` has votes on others; writes nothing."""
    if len(set(systems)) < len(systems):
        raise ConfigError(f"both systems are called {systems[0]}; give them folders with names of their own.")
    path = folder / _KEY
    if path.exists() and sorted(found := read_json(path)["systems"]) != sorted(systems):
        raise ConfigError(f"{folder} has votes on {' and '.join(found)}; give --votes another folder.")


class Votes:
    """Whose side is whose in a conversation, and the votes on those that are over.

    The name of a conversation and the secret of the study say who stands left, so that a server that was started again
    goes on with what was open. In `folder`, key.json says whose each reply was, and answers-RATER.json what a rater has
    said: they are what `empax rate score` reads. Neither has texts. Several servers may share a folder.

    Raises:
      ConfigError: as `check_compared`.
      DataError: it cannot be written.
    """

    def __init__(self, folder: Path, systems: tuple[str, str]):
        self.folder, self._path = folder, folder / _KEY
        self._key: dict[str, Any] = {
            "study": secrets.token_hex(8), "systems": list(systems), "settings": {"form": "pairs"}, "items": [],
        }  # fmt: skip
        with self._newest_key():
            check_compared(systems, folder)
            if not self._path.exists():
                self._write({})

    def begin(self) -> str:
        """A new conversation; chance says who stands left."""
        return secrets.token_hex(8)

    @contextlib.contextmanager
    def _newest_key(self) -> Iterator[None]:
        """Holds the folder, and knows what other servers have written there."""
        path = self.folder / "LOCK"
        with system_errors(path, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a")
        with lock:
            with contextlib.suppress(OSError):  # a file system without locks is for one server
                fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                self._key = read_json(self._path)
            yield

    def _sides(self, name: str) -> list[str] | None:
        """Who stands left and right; None where there is no such conversation, or it is over."""
        if not re.fullmatch("[0-9a-f]{16}", name) or any(item["id"] == name for item in self._key["items"]):
            return None
        odd = hmac.digest(self._key["study"].encode(), name.encode(), "sha256")[0] % 2
        return self._key["systems"][:: -1 if odd else 1]

    def _write(self, others: Mapping[str, str]) -> None:
        write_together(self.folder, {self._path.name: json_text(self._key), **others})

    def system(self, alias: str) -> str | None:
        """Who stands at "CONVERSATION/SIDE"; None where there is no such place."""
        name, _, side = alias.partition("/")
        sides = self._sides(name)
        return sides[SIDES.index(side)] if sides and side in SIDES else None

    def vote(self, conversation: str, rater: str, said: Mapping[str, Any]) -> dict[str, str] | None:
        """Keeps what somebody says and closes the conversation; who was who, or None where no such one is open.

        Raises:
          ValueError: names what is no answer.
        """
        if not re.fullmatch(r"[A-Za-z0-9-]{1,40}", rater):
            raise ValueError("rater: must be 1 to 40 letters, digits or hyphens.")
        for aspect in ASPECTS:
            if said.get(aspect) not in list(_VALUES):
                raise ValueError(f"answers.{aspect}: must be one of {', '.join(_VALUES)}.")
        path = self.folder / f"answers-{rater}.json"
        with self._newest_key():
            sides = self._sides(conversation)
            if sides is None:
                return None
            number = len(self._key["items"]) + 1
            item = {"number": number, "id": conversation, "systems": sides, "kind": "rated", "of": 0}
            given = read_json(path)["answers"] if path.exists() else {}
            given[str(number)] = {aspect: _VALUES[said[aspect]] for aspect in ASPECTS}
            answers = {"study": self._key["study"], "rater": rater, "answers": given}
            self._key = {**self._key, "items": [*self._key["items"], item]}
            self._write({path.name: json_text(answers)})
        return dict(zip(SIDES, sides, strict=True))
