"""The built-in dialogues as files of one's own, for tests of `data.name = "jsonl"`."""

from __future__ import annotations

from pathlib import Path

from empax.core.files import write_jsonl
from empax.data import sample


def write_own_corpus(folder: Path, every: int = 1) -> Path:
    """Writes one file of each split, with the dialogues whose place in it `every` divides; gives the folder."""
    for split, dialogues in sample.load_dialogues().items():
        rows = [
            {"id": d.id, "emotion": d.emotion, "utterances": [turn.text for turn in d.utterances]}
            for d in dialogues[::every]
        ]
        write_jsonl(folder / f"{split}.jsonl", rows)
    return folder
