"""Chat templates of instruction-tuned models, taken apart into what stands between the turns."""

from __future__ import annotations

import dataclasses
import datetime
import re
from typing import Any

import jinja2
import jinja2.sandbox

from empax.core.config import ConfigError


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """What a template puts around the texts of a chat.

    `opening` system `first_user` turn (`user_to_assistant` turn `assistant_to_user` turn)* `answer`.

    Attributes:
      opening: before the system's text (what begins every text included).
      first_user: between the system's text and the first turn.
      user_to_assistant: between a turn and the answer to it.
      assistant_to_user: between an answer and the next turn.
      answer: behind the last turn; the model writes on from there.
    """

    opening: str
    first_user: str
    user_to_assistant: str
    assistant_to_user: str
    answer: str


PLAIN = ChatTemplate("", "\n\nThey:\n", "\n\nYou:\n", "\n\nThey:\n", "\n\nYou:\n")
"""For models that know no template. Turns begin a line: behind a colon a subword would have to begin with a space."""

_MARKS = ("\x01system\x01", "\x01first\x01", "\x01answer\x01", "\x01second\x01")


def chat_template(source: str, **tokens: str) -> ChatTemplate:
    """Takes a Hugging Face chat template apart by rendering a chat of marked turns.

    Args:
      source: the Jinja text, `chat_template` in tokenizer_config.json.
      tokens: what it may refer to: `bos_token`, `eos_token`.

    Raises:
      ConfigError: it is no template, or it does not keep the turns of a chat apart and in order.
    """
    system, first, answer, second = _MARKS
    turns = [("user", first), ("assistant", answer), ("user", second)]
    try:
        text = _render(source, [("system", system), *turns], tokens)
    except jinja2.TemplateError:
        # Some templates know no system's turn: its text then opens the user's first.
        try:
            text = _render(source, [("user", f"{system}\n\n{first}"), *turns[1:]], tokens)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the tokenizer's chat template cannot be rendered: {error}") from error
    found = re.fullmatch("".join(f"(.*?){re.escape(mark)}" for mark in _MARKS) + "(.*)", text, re.DOTALL)
    if found is None:
        raise ConfigError("the tokenizer's chat template leaves a turn out or changes the order of turns.")
    return ChatTemplate(*found.groups())


def _render(source: str, turns: list[tuple[str, str]], tokens: dict[str, str]) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    # Some put today's date into the prompt; a run must not depend on the day.
    environment.globals["strftime_now"] = lambda form: datetime.date(2025, 1, 1).strftime(form)
    messages = [{"role": role, "content": content} for role, content in turns]
    values: dict[str, Any] = {"messages": messages, "add_generation_prompt": True, **tokens}
    return environment.from_string(source).render(**values)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
