"""Error rates of the two classifiers of messages, for docs/intended-use.md: `python -m tools.safety_rates [DATA]`.

Classifies each half of the examples in safety_examples.txt with a second classifier fitted, with its threshold, to the
other half alone. With DATA, also classifies the speakers' turns of EmpatheticDialogues' test split as chat does. Prints
Markdown with 95% intervals (Wilson 1927).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from empax.core.command import in_one_line
from empax.data import empathetic_dialogues
from empax.evaluation.reply_checks import wilson_low
from empax.pipeline.run import quiet_logging
from empax.serving.nearest import Example, Nearest, load_encoder, load_nearest, read_examples
from empax.serving.safety import in_list


def by_other_half(examples: Sequence[Example]) -> Bool[np.ndarray, " N"]:
    """Classifies each example with the second classifier, fitted to the other half alone."""
    found = np.zeros(len(examples), bool)
    for half in (0, 1):
        asked = [i for i, example in enumerate(examples) if example.half == half]
        reader = Nearest.of(load_encoder(), [example for example in examples if example.half != half])
        found[asked] = reader.are_dangerous([examples[i].text for i in asked])
    return found


def table(examples: Sequence[Example], listed: Bool[np.ndarray, " N"], near: Bool[np.ndarray, " N"]) -> list[str]:
    """Returns Markdown rows: the missed share of each kind of danger, and the answered share of each harmless kind."""
    lines = ["| | sentences | list alone | both readers |", "| --- | --- | --- | --- |"]
    for dangerous, title in ((True, "missed"), (False, "answered without need")):
        kinds = dict.fromkeys(example.kind for example in examples if example.dangerous == dangerous)
        for kind in ("", *kinds):
            rows = [i for i, e in enumerate(examples) if e.dangerous == dangerous and kind in ("", e.kind)]
            wrong = [[(said[i] != dangerous) for i in rows] for said in (listed, listed | near)]
            cells = [_percent(int(sum(row)), len(rows)) for row in wrong]
            name = kind or f"**{title}**"
            lines.append(f"| {name} | {len(rows)} | {cells[0]} | {cells[1]} |")
    return lines


def _percent(hits: int, count: int) -> str:
    share, low, high = hits / count, wilson_low(hits, count), 1.0 - wilson_low(count - hits, count)
    return f"{100 * share:.1f}% ({100 * low:.1f}–{100 * high:.1f})"


@in_one_line
def main(data: str = "") -> None:
    """Prints the table; without `data` the messages of EmpatheticDialogues are not read."""
    quiet_logging()
    turns: list[str] = []
    if data:  # before the examples, which take longer
        dialogues = empathetic_dialogues.load_dialogues(data)["test"]
        turns = sorted(
            {turn.text for dialogue in dialogues for turn in dialogue.utterances if turn.speaker == "speaker"}
        )
    examples = read_examples()
    listed = np.array([in_list(example.text) for example in examples])
    print("\n".join(table(examples, listed, by_other_half(examples))))
    if turns:
        said = np.array([in_list(turn) for turn in turns])
        reader = load_nearest()
        assert reader is not None  # by_other_half has used its wheel
        both = said | reader.are_dangerous(turns)
        print(
            f"\nOf {len(turns):,} different speakers' turns of EmpatheticDialogues' test split the list answers "
            f"{_percent(int(said.sum()), len(turns))}, both readers {_percent(int(both.sum()), len(turns))}."
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
