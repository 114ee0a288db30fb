"""Corpora in files: the built-in dialogues or a few rows as one's own, and an archive of EmpatheticDialogues."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from empax.core.files import write_jsonl
from empax.data import own, sample

HEADER = "conv_id,utterance_idx,context,prompt,speaker_idx,utterance,selfeval,tags\n"


def write_own_corpus(folder: Path, every: int = 1) -> Path:
    """Writes one file of each split, with the dialogues whose place in it `every` divides; gives the folder."""
    for split, dialogues in sample.load_dialogues().items():
        rows = [
            {"id": d.id, "emotion": d.emotion, "utterances": [turn.text for turn in d.utterances]}
            for d in dialogues[::every]
        ]
        write_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def write_rows(folder: Path, *rows: Mapping[str, Any]) -> Path:
    """Writes one file of each split, all with these rows; gives the folder."""
    for split in own.SPLITS:
        write_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def archive_of(
    raw: bytes, names: Iterable[str] = ("train", "valid", "test"), *, mode: str = "w:gz", **others: bytes
) -> bytes:
    """An archive of EmpatheticDialogues, as its authors pack it, with `raw` as each of its files but `others`."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name in names:
            entry, content = tarfile.TarInfo(f"empatheticdialogues/{name}.csv"), others.get(name, raw)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()
