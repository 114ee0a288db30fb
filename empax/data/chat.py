"""Chat templates of instruction-tuned models: reading them from files, and extracting the text around the turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.model_files import check_whole, is_listed, read_model_json
from empax.data.tokenizers import PAD_TOKEN

log = logging.getLogger("empax")

TEMPLATE, MORE, FIELD = "chat_template.jinja", "additional_chat_templates", "chat_template"

_DEFAULT = "default"
_JSON_FILES = ("tokenizer_config.json", "chat_template.json")
"""Files with a field for templates; the second was that of processors before templates had their own file."""

CPU_SECONDS, MEMORY_BYTES, WAIT_SECONDS = 5, 256 << 20, 120
"""Limits of a template: CPU time, memory, and wall-clock time (long, since the machine may be busy)."""

_MOST_CHARACTERS = 200_000


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The text that a template puts around the texts of a chat.

    `opening` system `first_user` turn (`user_to_assistant` turn `assistant_to_user` turn)* `answer`; with `system_last`
    `opening` (turn `user_to_assistant` turn `assistant_to_user`)* system `first_user` turn `answer`.

    A frame without control tokens (Llama 2's `[/INST]`) is text, which a user can also write.

    Attributes:
      opening: before the system message (the beginning of every text included).
      first_user: between the system message and the turn that follows it.
      user_to_assistant: between a turn and its answer.
      assistant_to_user: between an answer and the next turn.
      answer: after the last turn; the model continues from there.
      system_last: whether the system message is in the last turn (Mistral) instead of before the first turn.
    """

    opening: str
    first_user: str
    user_to_assistant: str
    assistant_to_user: str
    answer: str
    system_last: bool = False

    def mapped(self, change: Callable[[str], str]) -> ChatTemplate:
        """Applies `change` to every frame."""
        frames = [change(frame) for frame in dataclasses.astuple(self)[:-1]]
        return ChatTemplate(*frames, system_last=self.system_last)

    def opened(self, system: str) -> str:
        """Returns the beginning of every chat: the opening, and the system message unless `system_last`."""
        return self.opening if self.system_last else self.opening + system

    def continued(self, turns: Sequence[str], system: str) -> str:
        """Returns the rest after `opened`: the turns, which begin and end with the user's, and the answer's frame."""
        earlier = ""
        for user, assistant in zip(turns[:-1:2], turns[1::2], strict=True):
            earlier += user + self.user_to_assistant + assistant + self.assistant_to_user
        if self.system_last:
            return earlier + system + self.first_user + turns[-1] + self.answer
        return self.first_user + earlier + turns[-1] + self.answer


PLAIN = ChatTemplate("", "\n\nThey:\n", "\n\nYou:\n", "\n\nThey:\n", "\n\nYou:\n")
"""For models without a template. Turns begin a line: after a colon, a subword would have to begin with a space."""

# With upper-case and lower-case letters, to detect templates that change the case of turns.
_SYSTEM, *_TURNS = (f"\x01Mark{number}\x01" for number in range(6))
_SIZES = (3, 1, 5)


_TEMPLATE = "the tokenizer's chat template"
_REFUSED = "{} {}. Give the model another template, or none (chat_template.jinja, or else tokenizer_config.json)."


@functools.lru_cache(maxsize=32)
def chat_template(source: str, *, where: str = _TEMPLATE, **tokens: str) -> ChatTemplate:
    """Extracts the frames of a Hugging Face chat template by rendering chats with marked turns.

    `source` is the Jinja text, `where` the file to name in messages, `tokens` are special tokens that the text may
    refer to: `bos_token`, `eos_token`.

    Raises ConfigError if it is not a template, takes too much time or memory, or does not keep the turns of a chat
    separate and in order.
    """
    with_system = [[("system", _SYSTEM), *_chat(_TURNS[:size])] for size in _SIZES]
    # Some templates do not support a system message, or drop it: its text is then put before the user's first turn.
    without = [_chat([f"{_SYSTEM}\n\n{_TURNS[0]}", *_TURNS[1:size]]) for size in _SIZES]
    rendered = _render(source, [*with_system, *without], tokens, where)
    with contextlib.suppress(ConfigError):
        return _frames(rendered[:3], _SYSTEM, where)
    return _frames(rendered[3:], _SYSTEM, where)


@functools.lru_cache(maxsize=32)
def without_system(source: str, *, where: str = _TEMPLATE, **tokens: str) -> ChatTemplate:
    """Returns a template's frames for chats without a system message; a default system message is in `opening`.

    Arguments and errors as in `chat_template`.
    """
    rendered = _render(source, [_chat(_TURNS[:size]) for size in _SIZES], tokens, where)
    return _frames(rendered, "", where)


@functools.lru_cache(maxsize=32)
def single_turn(source: str, *, where: str = _TEMPLATE, **tokens: str) -> tuple[str, str]:
    """Returns the text that a template puts before and after the single turn of a new chat.

    Arguments and errors as in `chat_template`.
    """
    (rendered,) = _render(source, [[("user", _TURNS[0])]], tokens, where)
    if "error" in rendered:
        _refuse(where, f"cannot be rendered: {rendered['error']}")
    parts = _between(rendered["text"], _TURNS[0])
    if not parts:
        _refuse(where, "leaves a turn out, repeats or changes it")
    return parts[0], parts[1]


def _chat(turns: Sequence[str]) -> list[tuple[str, str]]:
    return [("assistant" if place % 2 else "user", turn) for place, turn in enumerate(turns)]


def _refuse(where: str, problem: str) -> NoReturn:
    raise ConfigError(_REFUSED.format(where, problem))


def _frames(rendered: Sequence[Mapping[str, str]], system: str, where: str) -> ChatTemplate:
    """Returns the frames in chats of three, one and five turns (`_SIZES`); raises ConfigError if they have none.

    `system` is the mark of the system message; empty if the chats have none.
    """
    if "error" in rendered[0]:
        _refuse(where, f"cannot be rendered: {rendered[0]['error']}")
    text, found = rendered[0]["text"], None
    first, answer, second = _TURNS[:3]
    if not system:
        if parts := _between(text, first, answer, second):
            opening, to_assistant, to_user, ending = parts
            found = ChatTemplate(opening, "", to_assistant, to_user, ending)
    elif parts := _between(text, system, first, answer, second):
        found = ChatTemplate(*parts, system_last=False)
    elif parts := _between(text, first, answer, system, second):
        opening, to_assistant, to_user, before_turn, ending = parts
        found = ChatTemplate(opening, before_turn, to_assistant, to_user, ending, system_last=True)
    if found is None:
        _refuse(where, "leaves a turn out, repeats or changes one, or changes the order of turns")
    wanted = [found.opened(system) + found.continued(_TURNS[:size], system) for size in _SIZES]
    if wanted != [chat.get("text") for chat in rendered]:
        _refuse(where, "frames turns differently in chats of one, three and five turns")
    return found


def _between(text: str, *marks: str) -> list[str]:
    """Returns the texts around the marks; none unless each mark occurs once and in order."""
    found = re.fullmatch("".join(f"(.*?){re.escape(mark)}" for mark in marks) + "(.*)", text, re.DOTALL)
    parts = list(found.groups()) if found else []
    return [] if any(mark in part for part in parts for mark in marks) else parts


def _render(
    source: str, chats: Sequence[Sequence[tuple[str, str]]], tokens: dict[str, str], where: str
) -> list[dict[str, str]]:
    """Returns each chat under "text", or the reason for a failure under "error"."""
    request = {
        "source": source,
        "chats": [[{"role": role, "content": content} for role, content in chat] for chat in chats],
        "tokens": {"pad_token": PAD_TOKEN, **tokens},
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": MEMORY_BYTES,
        "most_characters": _MOST_CHARACTERS,
    }
    program = str(Path(__file__).with_name("chat_rendering.py"))
    try:
        # -P: files beside the program cannot be imported as modules.
        done = subprocess.run(
            [sys.executable, "-P", program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{where} was stopped: it took more than {WAIT_SECONDS} s for a short chat.") from error
    if done.returncode == -signal.SIGXCPU:
        raise ConfigError(f"{where} was stopped: it computed more than {CPU_SECONDS} s for a short chat.")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{where} ended the process that renders it: {reason}.")
    return json.loads(done.stdout)


def read_chat_template(folder: Path) -> str | None:
    """Reads the template of a folder, of several the one named "default"; None if there is none.

    Template files take precedence over fields of JSON files, as in transformers. Raises DataError if a file is broken,
    or a field holds no templates.
    """
    templates = {_DEFAULT: folder / TEMPLATE} if is_listed(folder / TEMPLATE) else {}
    templates |= {file.stem: file for file in sorted((folder / MORE).glob("*.jinja"))}
    if templates:
        return default_template({name: _text(file) for name, file in templates.items()}, str(folder))
    for name in _JSON_FILES:
        fields = read_model_json(folder / name) if is_listed(folder / name) else {}
        if fields.get(FIELD) is not None:
            return default_template(fields[FIELD], str(folder / name))
    return None


def default_template(found: Any, where: str) -> str | None:
    """Returns the chat template: a single text, or the default of several (a mapping or a list of named objects).

    Several templates without one named "default" give None and a warning, since a dialogue cannot choose one. Raises
    DataError if `found` has another form; `where` names the file.
    """
    if isinstance(found, str):
        return found
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        found = {one.get("name"): one.get("template") for one in found}
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise DataError(
            f"{where}: {FIELD} must be a text, a list of objects with a name and a template, or an object of templates "
            "by name; correct it, or fetch the model again."
        )
    if found and _DEFAULT not in found:
        log.warning(
            "%s names its chat templates %s; texts are read without a template. To use one, name it %r.",
            where,
            ", ".join(map(repr, found)),
            _DEFAULT,
        )
    return found.get(_DEFAULT)


def _text(file: Path) -> str:
    check_whole(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error}); save it as UTF-8, or fetch the model again.") from error
