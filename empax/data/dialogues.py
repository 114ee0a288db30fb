"""Converts dialogues to instances: every answering turn with its whole history."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from empax.core.files import DataError
from empax.core.types import Dialogue, Instance, Utterance

_FEWEST_WORDS = 4  # words of a situation

_FIELDS = ("id", "context", "response", "emotion", "notes")

STAGE_NOTES = ("context_attributes", "response_attributes", "reasons", "facts", "source", "situation", "told")
"""Notes of instances that stages of a run write; all other notes are fields of the corpus."""


def alternate(texts: Sequence[str]) -> tuple[Utterance, ...]:
    """Assigns texts alternately to speaker and listener; the speaker begins."""
    return tuple(Utterance("listener" if i % 2 else "speaker", text) for i, text in enumerate(texts))


def example_of(dialogue: Dialogue, *, notes: bool = False) -> dict[str, Any]:
    """Converts a dialogue to an example of a `data.builder.DialogueBuilder`; `notes` as its `HAS_NOTES`."""
    return {
        "id": dialogue.id,
        "emotion": dialogue.emotion,
        "situation": dialogue.situation,
        "utterances": [utterance.text for utterance in dialogue.utterances],
        **({"notes": json.dumps(dialogue.notes)} if notes else {}),
    }


def to_instances(
    dialogues: Iterable[Dialogue], *, moel_compat: bool = False, every_turn: bool = False
) -> list[Instance]:
    """Makes an instance of every listener turn (even 1-based index), in order, with all turns before it.

    Only the position of a turn counts, not its speaker; readers of a corpus refuse blank turns.

    The note "situation" is the dialogue's if it describes an event: fewer than 4 words are a topic, which many share.

    Args:
      dialogues: dialogues of one split, in the corpus' order.
      moel_compat: extract instances like the code of MoEL (Lin et al. 2019) and its descendants: neighbours with the
        same situation text become one dialogue (with the first one's id and emotion), and the last dialogue of the
        split is lost.
      every_turn: make an instance of every turn except the first; its author is then the listener of the instance.
    """
    if moel_compat:
        dialogues = _as_moel(dialogues)
    instances = []
    for dialogue in dialogues:
        texts = tuple(utterance.text for utterance in dialogue.utterances)
        told = len(dialogue.situation.split()) >= _FEWEST_WORDS
        notes = {"situation": dialogue.situation} if told else {}
        instances += [
            Instance(
                id=f"{dialogue.id}#{index}",
                context=texts[: index - 1],
                response=texts[index - 1],
                emotion=dialogue.emotion,
                notes={**dialogue.notes, **notes},
            )
            for index in range(2, len(texts) + 1, 1 if every_turn else 2)
        ]
    return instances


def _as_moel(dialogues: Iterable[Dialogue]) -> Iterator[Dialogue]:
    held: Dialogue | None = None
    for dialogue in dialogues:
        if held is None or not dialogue.situation or dialogue.situation != held.situation:
            if held is not None:
                yield held
            held = dialogue
        else:
            held = dataclasses.replace(held, utterances=held.utterances + dialogue.utterances)
    # The last dialogue is dropped: MoEL's extraction writes a dialogue only when the next one begins.


def own_fields(instance: Instance) -> dict[str, Any]:
    """Returns the fields of the corpus that are not common to all corpora."""
    return {name: value for name, value in instance.notes.items() if name not in STAGE_NOTES}


def instance_to_row(instance: Instance) -> dict[str, Any]:
    """Converts an instance to one object of a JSON-lines file."""
    return {
        "id": instance.id,
        "context": list(instance.context),
        "response": instance.response,
        "emotion": instance.emotion,
        "notes": dict(instance.notes),
    }


def instance_from_row(row: Mapping[str, Any]) -> Instance:
    """Converts a row of `instance_to_row` back to an instance.

    Raises DataError if a field is missing, unknown or of another type.
    """
    if set(row) != set(_FIELDS):
        raise DataError(f"an instance has the fields {', '.join(_FIELDS)}; found {', '.join(row) or 'none'}.")
    context = row["context"]
    if not isinstance(context, (list, tuple)) or not all(isinstance(turn, str) for turn in context):
        raise DataError(f"instance {row['id']!r}: context must be a list of texts, found {context!r}.")
    wrong = [name for name in ("id", "response", "emotion") if not isinstance(row[name], str)]
    if wrong or not isinstance(row["notes"], Mapping):
        name = wrong[0] if wrong else "notes"
        kind = "a text" if wrong else "an object"
        raise DataError(f"instance {row['id']!r}: {name} must be {kind}, found {row[name]!r}.")
    return Instance(
        id=row["id"], context=tuple(context), response=row["response"], emotion=row["emotion"], notes=dict(row["notes"])
    )
