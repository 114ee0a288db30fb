"""Blinded comparison of two systems: assignment to sides, and people's votes as files for `empax rate score`."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import json_text, read_json, system_errors, write_together
from empax.rating.answers import read_key
from empax.rating.study import ASPECTS

SIDES = ("a", "b")
_KEY = "key.json"
_VALUES = {"a": "1", "b": "2", "tie": "tie"}


def check_compared(systems: Sequence[str], folder: Path) -> None:
    """Checks a comparison before any work; writes nothing.

    Raises:
      ConfigError: two systems have one name, or `folder` has votes on others.
      DataError: the key.json in `folder` is another file.
    """
    if len(set(systems)) < len(systems):
        raise ConfigError(f"both systems are called {systems[0]}; give their folders different names.")
    path = folder / _KEY
    if path.exists() and sorted(found := read_key(path).systems) != sorted(systems):
        raise ConfigError(f"{folder} has votes on {' and '.join(found)}; give --votes another folder.")


class Votes:
    """The assignment of systems to sides in conversations, and the votes on finished conversations.

    The name of a conversation and the secret of the study determine the sides, so that a restarted server continues
    open conversations. In `folder`, key.json holds the system of each reply, and answers-RATER.json the votes of a
    rater; `empax rate score` reads both. Neither holds texts. Several threads and servers may share a folder.

    Raises:
      ConfigError, DataError: as in `check_compared`; also if the folder cannot be written.
    """

    def __init__(self, folder: Path, systems: tuple[str, str]):
        self.folder, self._path, self._turn = folder, folder / _KEY, threading.Lock()
        self._key: dict[str, Any] = {
            "study": secrets.token_hex(8), "systems": list(systems), "settings": {"form": "pairs"}, "items": [],
        }  # fmt: skip
        with self._newest_key():
            check_compared(systems, folder)
            if not self._path.exists():
                self._write({})

    def begin(self) -> str:
        """Returns the name of a new conversation, whose sides are random."""
        return secrets.token_hex(8)

    @contextlib.contextmanager
    def _newest_key(self) -> Iterator[None]:
        """Locks the folder and reads the key as other servers have left it."""
        path = self.folder / "LOCK"
        with system_errors(path, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a")
        with self._turn, lock:
            with contextlib.suppress(OSError):  # a file system without locks supports one server
                fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                self._key = read_json(self._path)
            yield

    def _sides(self, name: str) -> list[str] | None:
        """Returns the left and the right system; None if the conversation does not exist or is finished."""
        if not re.fullmatch("[0-9a-f]{16}", name) or any(item["id"] == name for item in self._key["items"]):
            return None
        odd = hmac.digest(self._key["study"].encode(), name.encode(), "sha256")[0] % 2
        return self._key["systems"][:: -1 if odd else 1]

    def _write(self, others: Mapping[str, str]) -> None:
        write_together(self.folder, {self._path.name: json_text(self._key), **others})

    def system(self, alias: str) -> str | None:
        """Returns the system at "CONVERSATION/SIDE"; None if there is none."""
        name, _, side = alias.partition("/")
        sides = self._sides(name)
        return sides[SIDES.index(side)] if sides and side in SIDES else None

    def vote(self, conversation: str, rater: str, said: Mapping[str, Any]) -> dict[str, str] | None:
        """Saves a vote and closes the conversation; returns the systems by side, or None if it is not open.

        Raises:
          DataError: the folder cannot be read or written.
          ValueError: the rater or an answer is invalid; the message names it.
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
