"""Dialogues as TFDS keeps them, in `array_record` files: what every corpus' builder shares, and reading them back.

TensorFlow is neither needed nor imported.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from empax.core.cache import is_sound, seal
from empax.core.files import system_errors
from empax.core.types import Dialogue, Utterance


class DialogueBuilder(tfds.core.GeneratorBasedBuilder):
    """A TFDS builder with one example a dialogue; a corpus adds `_split_generators` and says what it is.

    `file_format="array_record"` keeps TensorFlow out.
    """

    VERSION = tfds.core.Version("1.0.0")
    ABOUT: ClassVar[dict[str, Any]] = {}
    """Description, homepage and licence, as `tfds.core.DatasetInfo` takes them."""

    IN_ORDER = True
    """Whether keys are numbers and examples are kept in their order; else a hash of the key orders them."""

    HAS_NOTES = False
    """Whether dialogues may have fields that others have not."""

    def _info(self) -> tfds.core.DatasetInfo:
        notes = {"notes": tfds.features.Text()} if self.HAS_NOTES else {}
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "id": tfds.features.Text(),
                    "emotion": tfds.features.Text(),
                    "situation": tfds.features.Text(),
                    "utterances": tfds.features.Sequence(tfds.features.Text()),
                    **notes,
                }
            ),
            disable_shuffling=self.IN_ORDER,
            **self.ABOUT,
        )


def example_of(dialogue: Dialogue, *, notes: bool = False) -> dict[str, Any]:
    """What a builder yields for a dialogue, beside its key; with `notes` if it `HAS_NOTES`."""
    return {
        "id": dialogue.id,
        "emotion": dialogue.emotion,
        "situation": dialogue.situation,
        "utterances": [utterance.text for utterance in dialogue.utterances],
        **({"notes": json.dumps(dialogue.notes)} if notes else {}),
    }


def alternate(texts: Sequence[str]) -> tuple[Utterance, ...]:
    """Turns of two people; the speaker begins."""
    return tuple(Utterance("listener" if i % 2 else "speaker", text) for i, text in enumerate(texts))


def _to_dialogue(row: dict[str, Any]) -> Dialogue:
    return Dialogue(
        id=row["id"].decode(),
        emotion=row["emotion"].decode(),
        situation=row["situation"].decode(),
        utterances=alternate([text.decode() for text in row["utterances"]]),
        notes=json.loads(row["notes"]) if "notes" in row else {},
    )


def load(
    make: Callable[..., DialogueBuilder], folder: Path, splits: Sequence[str], download: Any = None
) -> dict[str, list[Dialogue]]:
    """The dialogues by split; the first call prepares them in `folder`, later calls read what is there.

    Args:
      make: the builder's class, or a partial of it with what it is prepared from.
      folder: one for everything that the corpus is made from, such as a hash of its files.
      splits: names of its splits.
      download: a `tfds.download.DownloadConfig`, for a builder that wants Apache Beam.
    """
    builder = make(data_dir=str(folder), file_format="array_record")
    # The version is part of the path: a changed reader prepares anew.
    prepared = folder / builder.name / str(builder.VERSION)
    if not is_sound(prepared):
        shutil.rmtree(prepared, ignore_errors=True)
        with system_errors(prepared, "written"):
            _prepare(make, folder, download)
        builder = make(data_dir=str(folder), file_format="array_record")
    dialogues = {}
    for split in splits:
        source = builder.as_data_source(split=split)  # pyright: ignore[reportCallIssue]  # its decorator hides the arguments
        # All in one read: one by one is several times slower.
        dialogues[split] = [_to_dialogue(row) for row in source.__getitems__(range(len(source)))]
    return dialogues


def _prepare(make: Callable[..., DialogueBuilder], folder: Path, download: Any) -> None:
    """Writes the TFDS files beside `folder` and renames: several processes may do so at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    tfds.disable_progress_bar()
    try:
        builder = make(data_dir=str(temporary), file_format="array_record")
        builder.download_and_prepare(download_config=download or tfds.download.DownloadConfig(try_download_gcs=False))
        shutil.rmtree(temporary / "downloads", ignore_errors=True)
        version = Path(builder.name) / str(builder.VERSION)
        seal(folder / version, temporary / version)
        try:
            os.rename(temporary / version, folder / version)
        except OSError:
            if not (folder / version).is_dir():  # not a rival that was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
