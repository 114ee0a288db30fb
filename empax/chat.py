"""Chats with a finished run: `python -m empax.chat --workdir=DIR`. Shows the evidence behind every reply.

Messages that suggest self-harm or danger get a fixed answer that names help; `--nosafety` turns that off. The
intended use of chat: docs/intended-use.md.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.memory import keep_freed_memory
from empax.core.paths import expand
from empax.core.text_files import visible

_WORKDIR = flags.DEFINE_string("workdir", None, "The work directory of a finished run.", required=True)
_EXEMPLARS = flags.DEFINE_integer("exemplars", 3, "How many exemplars to show.", lower_bound=0)
_SAFETY = flags.DEFINE_boolean(
    "safety", True, "Whether messages that seem to speak of self-harm or danger get a fixed answer, not the model's."
)


def describe(prediction: Any, seconds: float, exemplars: int) -> str:
    """Formats a reply with attributes (its own where no others are known), exemplars, facts, reasons and intents."""
    if "answered_by" in prediction.notes:
        return f"empax> {prediction.response}\n       [a fixed answer, not the model's]"
    from empax.serving.session import why_of  # imported here so that --help answers at once

    why = why_of(prediction)
    attributes = ", ".join(f"{name} {level}" for name, level in why.get("attributes", {}).items())
    mood = f"you seem {why['emotion']}; " if "emotion" in why else ""
    lines = [f"empax> {prediction.response}", f"       [{mood}{attributes or '-'}]"]
    for exemplar in why.get("exemplars", ())[:exemplars]:
        lines.append(f"       ({exemplar['emotion']}) {exemplar['said']!r} -> {exemplar['reply']!r}")
    lines += [f"       knows: {fact}" for fact in why.get("facts", ())]
    if "reasons" in why:
        lines.append(f"       reasons: {why['reasons']}")
    if "intents" in why:
        lines.append(f"       intents: {' -> '.join(why['intents'])}")
    return "\n".join([*lines, f"       {seconds:.2f} s"])


@in_one_line
def main(argv: list[str]) -> None:
    keep_freed_memory()
    # Imported here so that --help answers at once.
    from empax.pipeline.run import quiet_logging
    from empax.serving.safety import announcement, answer_to_danger
    from empax.serving.session import Session

    quiet_logging()
    session = Session.load(expand(_WORKDIR.value), before=answer_to_danger if _SAFETY.value else None)
    session.reply(["Hello."])  # compiles
    print(announcement() if _SAFETY.value else "The model answers everything: --nosafety.", flush=True)
    converse(session, _EXEMPLARS.value)


def converse(session: Any, exemplars: int) -> None:
    """Answers line by line until the end of standard input."""
    print("Tell me what happened. An empty line starts over, Ctrl-D ends.", flush=True)
    context: list[str] = []
    while True:
        try:
            text = input("you> ").strip()
        except EOFError:
            print()
            return
        if not text:
            context = []
            continue
        begin = time.perf_counter()
        prediction = session.reply([*context, text])
        print(visible(describe(prediction, time.perf_counter() - begin, exemplars)), flush=True)
        context += [text, prediction.response or "..."]


command_line = functools.partial(run_command, main, __name__)


if __name__ == "__main__":
    command_line()
