"""Chat templates of instruction-tuned models, taken apart into what stands between the turns."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from empax.core.config import ConfigError
from empax.data.tokenizers import PAD_TOKEN

CPU_SECONDS, MEMORY_BYTES, WAIT_SECONDS = 5, 256 << 20, 120
"""What a template may take: computing time, memory, and time by the clock (long: the machine may be busy)."""

_MOST_CHARACTERS = 200_000


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """What a template puts around the texts of a chat.

    `opening` system `first_user` turn (`user_to_assistant` turn `assistant_to_user` turn)* `answer`; with `system_last`
    `opening` (turn `user_to_assistant` turn `assistant_to_user`)* system `first_user` turn `answer`.

    A frame that has no control token (Llama 2's `[/INST]`) is text, which a user can write too.

    Attributes:
      opening: before the system's text (what begins every text included).
      first_user: between the system's text and the turn that follows it.
      user_to_assistant: between a turn and the answer to it.
      assistant_to_user: between an answer and the next turn.
      answer: behind the last turn; the model writes on from there.
      system_last: whether the system's text stands in the last turn (Mistral) instead of in front of the first one.
    """

    opening: str
    first_user: str
    user_to_assistant: str
    assistant_to_user: str
    answer: str
    system_last: bool = False

    def mapped(self, change: Callable[[str], str]) -> ChatTemplate:
        """The same with `change` applied to every frame."""
        frames = [change(frame) for frame in dataclasses.astuple(self)[:-1]]
        return ChatTemplate(*frames, system_last=self.system_last)

    def opened(self, system: str) -> str:
        """What every chat begins with: the opening, and the system's text if it stands there."""
        return self.opening if self.system_last else self.opening + system

    def continued(self, turns: Sequence[str], system: str) -> str:
        """What follows `opened`: the turns, the user's first and last, and the frame of the answer."""
        earlier = ""
        for user, assistant in zip(turns[:-1:2], turns[1::2], strict=True):
            earlier += user + self.user_to_assistant + assistant + self.assistant_to_user
        if self.system_last:
            return earlier + system + self.first_user + turns[-1] + self.answer
        return self.first_user + earlier + turns[-1] + self.answer


PLAIN = ChatTemplate("", "\n\nThey:\n", "\n\nYou:\n", "\n\nThey:\n", "\n\nYou:\n")
"""For models that know no template. Turns begin a line: behind a colon a subword would have to begin with a space."""

# With letters of either case: a template that changes the case of turns is to be noticed.
_SYSTEM, *_TURNS = (f"\x01Mark{number}\x01" for number in range(6))
_SIZES = (3, 1, 5)


def chat_template(
    source: str, *, where: str = "the tokenizer's chat template", pad_token: str = PAD_TOKEN, **tokens: str
) -> ChatTemplate:
    """Takes a Hugging Face chat template apart by rendering chats of marked turns.

    Args:
      source: the Jinja text, `chat_template` in tokenizer_config.json.
      where: what messages call it: its file.
      pad_token: as `tokens`.
      tokens: what it may refer to: `bos_token`, `eos_token`.

    Raises:
      ConfigError: it is no template, takes too much time or memory, or does not keep the turns of a chat apart and in
        order.
    """
    return _taken_apart(source, where, tuple(sorted({"pad_token": pad_token, **tokens}.items())))


def single_turn(
    source: str, *, where: str = "the tokenizer's chat template", pad_token: str = PAD_TOKEN, **tokens: str
) -> tuple[str, str]:
    """What a template puts before and behind the one turn of a chat that a user has just begun.

    Arguments and errors as in `chat_template`.
    """
    return _around_turn(source, where, tuple(sorted({"pad_token": pad_token, **tokens}.items())))


def without_system(
    source: str, *, where: str = "the tokenizer's chat template", pad_token: str = PAD_TOKEN, **tokens: str
) -> ChatTemplate:
    """A template's frames for chats that say nothing as the system; what it says there by itself is in `opening`.

    Arguments and errors as in `chat_template`.
    """
    return _alternating(source, where, tuple(sorted({"pad_token": pad_token, **tokens}.items())))


@functools.lru_cache(maxsize=32)
def _alternating(source: str, where: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    rendered = _render(source, [_chat(_TURNS[:size]) for size in _SIZES], dict(tokens), where)
    if "error" in rendered[0]:
        problem = f"cannot be rendered: {rendered[0]['error']}"
    else:
        text = rendered[0]["text"]
        found = re.fullmatch("(.*?)" + "(.*?)".join(map(re.escape, _TURNS[:3])) + "(.*)", text, re.DOTALL)
        problem = "leaves a turn out, repeats or changes one, or changes the order of turns"
        if found is not None and not any(mark in part for part in found.groups() for mark in _TURNS):
            opening, to_assistant, to_user, ending = found.groups()
            frames = ChatTemplate(opening, "", to_assistant, to_user, ending)
            wanted = [opening + frames.continued(_TURNS[:size], "") for size in _SIZES]
            if wanted == [text.get("text") for text in rendered]:
                return frames
            problem = "frames a turn otherwise in a chat of one, three or five turns"
    raise ConfigError(f"{where} {problem}. Give the model another template, or none (tokenizer_config.json).")


@functools.lru_cache(maxsize=32)
def _around_turn(source: str, where: str, tokens: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    (rendered,) = _render(source, [[("user", _TURNS[0])]], dict(tokens), where)
    if "error" in rendered:
        problem = f"cannot be rendered: {rendered['error']}"
    elif rendered["text"].count(_TURNS[0]) != 1:
        problem = "leaves a turn out, repeats or changes it"
    else:
        before, _, behind = rendered["text"].partition(_TURNS[0])
        return before, behind
    raise ConfigError(f"{where} {problem}. Give the model another template, or none (tokenizer_config.json).")


@functools.lru_cache(maxsize=32)
def _taken_apart(source: str, where: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    with_system = [[("system", _SYSTEM), *_chat(_TURNS[:size])] for size in _SIZES]
    # Some templates know no system's turn, or leave it out: its text then opens the user's first.
    without = [_chat([f"{_SYSTEM}\n\n{_TURNS[0]}", *_TURNS[1:size]]) for size in _SIZES]
    rendered = _render(source, [*with_system, *without], dict(tokens), where)
    problem = ""
    for texts in (rendered[:3], rendered[3:]):
        if "error" in texts[0]:
            problem = f"cannot be rendered: {texts[0]['error']}"
            continue
        found = _frames(texts[0]["text"])
        if found is None:
            problem = "leaves a turn out, repeats or changes one, or changes the order of turns"
            continue
        wanted = [found.opened(_SYSTEM) + found.continued(_TURNS[:size], _SYSTEM) for size in _SIZES]
        if wanted == [text.get("text") for text in texts]:
            return found
        problem = "frames a turn otherwise in a chat of one, three or five turns"
    raise ConfigError(f"{where} {problem}. Give the model another template, or none (tokenizer_config.json).")


def _chat(turns: Sequence[str]) -> list[tuple[str, str]]:
    return [("assistant" if place % 2 else "user", turn) for place, turn in enumerate(turns)]


def _frames(text: str) -> ChatTemplate | None:
    """What stands between the marks of a chat of three turns; None if they are not there once each and in order."""
    first, answer, second = _TURNS[:3]
    for marks, system_last in (((_SYSTEM, first, answer, second), False), ((first, answer, _SYSTEM, second), True)):
        found = re.fullmatch("".join(f"(.*?){re.escape(mark)}" for mark in marks) + "(.*)", text, re.DOTALL)
        if found is None or any(mark in part for part in found.groups() for mark in marks):
            continue
        parts = list(found.groups())
        if system_last:  # the frame around the system's text comes where `ChatTemplate` has it
            opening, to_assistant, to_user, before_turn, ending = parts
            parts = [opening, before_turn, to_assistant, to_user, ending]
        return ChatTemplate(*parts, system_last=system_last)
    return None


def _render(
    source: str, chats: Sequence[Sequence[tuple[str, str]]], tokens: dict[str, str], where: str
) -> list[dict[str, str]]:
    """Each chat under "text", or the reason why there is none under "error"."""
    request = {
        "source": source,
        "chats": [[{"role": role, "content": content} for role, content in chat] for chat in chats],
        "tokens": tokens,
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": MEMORY_BYTES,
        "most_characters": _MOST_CHARACTERS,
    }
    program = str(Path(__file__).with_name("chat_rendering.py"))
    try:
        # -P: files beside the program are no modules of it.
        done = subprocess.run(
            [sys.executable, "-P", program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{where} was ended: it took more than {WAIT_SECONDS} s for a short chat.") from error
    if done.returncode == -signal.SIGXCPU:
        raise ConfigError(f"{where} was ended: it computed more than {CPU_SECONDS} s for a short chat.")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{where} ended the process that renders it: {reason}.")
    return json.loads(done.stdout)
