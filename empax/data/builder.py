"""TFDS builders of the corpora, which store dialogues in `array_record` files, and reading these files.

TensorFlow is neither needed nor imported. TFDS itself takes a third of a second to import, so callers import this
module only where they load a corpus.
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

from empax.core.cache import is_sound, seal, tell_unwritable
from empax.core.files import system_errors
from empax.core.text_files import SystemFileError
from empax.core.types import Dialogue
from empax.data.dialogues import alternate


class DialogueBuilder(tfds.core.GeneratorBasedBuilder):
    """A TFDS builder with one example per dialogue (`data.dialogues.example_of`); each corpus has a subclass.

    `file_format="array_record"` avoids TensorFlow. `examples` returns the examples of each split, like TFDS'
    `_split_generators`; it is needed to prepare, not to read.
    """

    VERSION = tfds.core.Version("1.0.0")
    ABOUT: ClassVar[dict[str, Any]] = {}
    """Description, homepage and licence, as arguments of `tfds.core.DatasetInfo`."""

    IN_ORDER = True
    """Whether keys are numbers and examples keep their order; else they are ordered by a hash of the key."""

    HAS_NOTES = False
    """Whether dialogues may have further fields."""

    def __init__(self, *, examples: Callable[[], dict[str, Any]] = dict, **kwargs: Any):
        self._examples = examples
        super().__init__(**kwargs)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # the loader of a corpus finds its files, so that its errors can give advice
        return self._examples()

    def _generate_examples(self, *_: Any) -> Any:
        raise NotImplementedError  # TFDS requires the method; `examples` replaces it

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


class EmpatheticDialogues(DialogueBuilder):
    """EmpatheticDialogues, in the archive's order."""

    # TFDS has a catalogue entry "empathetic_dialogues"; ours must not shadow it.
    name = "empax_empathetic_dialogues"
    ABOUT: ClassVar[dict[str, Any]] = {
        "description": "Conversations grounded in one of 32 emotions; odd utterances are the speaker's.",
        "homepage": "https://github.com/facebookresearch/EmpatheticDialogues",
        "license": "CC BY-NC 4.0",
    }
    VERSION = tfds.core.Version("1.2.0")


class OwnDialogues(DialogueBuilder):
    """JSON-lines files of dialogues, ordered by a hash of file and line."""

    name = "empax_own_dialogues"
    ABOUT: ClassVar[dict[str, Any]] = {"description": "Dialogues from a folder of JSON-lines files."}
    IN_ORDER = False
    HAS_NOTES = True
    VERSION = tfds.core.Version("1.2.0")


def _to_dialogue(row: dict[str, Any]) -> Dialogue:
    return Dialogue(
        id=row["id"].decode(),
        emotion=row["emotion"].decode(),
        situation=row["situation"].decode(),
        utterances=alternate([text.decode() for text in row["utterances"]]),
        notes=json.loads(row["notes"]) if "notes" in row else {},
    )


def load(
    make: Callable[..., DialogueBuilder], folder: Path, splits: Sequence[str], beam: Any = None
) -> dict[str, list[Dialogue]]:
    """Loads the dialogues by split; the first call prepares them in `folder`, later calls read them there.

    If `folder` is not writable, logs a warning and prepares them in a temporary folder, but not with Beam, whose
    workers may be on other machines.

    `make` is a partial of the builder's class with its examples. Each version of a corpus needs a separate `folder`.
    `beam` is Apache Beam's `PipelineOptions`, for examples that Beam reads.
    """
    builder = make(data_dir=str(folder), file_format="array_record")
    # The version is part of the path: a changed reader prepares the data again.
    prepared = folder / builder.name / str(builder.VERSION)
    if not is_sound(prepared):
        shutil.rmtree(prepared, ignore_errors=True)
        try:
            with system_errors(prepared, "written"):
                _prepare(make, folder, beam)
        except SystemFileError as error:
            if beam:
                raise
            tell_unwritable(error)
            with tempfile.TemporaryDirectory() as elsewhere:
                _prepare(make, Path(elsewhere), beam)
                return _read(make, Path(elsewhere), splits)
    return _read(make, folder, splits)


def _read(make: Callable[..., DialogueBuilder], folder: Path, splits: Sequence[str]) -> dict[str, list[Dialogue]]:
    builder = make(data_dir=str(folder), file_format="array_record")
    dialogues = {}
    for split in splits:
        source = builder.as_data_source(split=split)  # pyright: ignore[reportCallIssue]  # its decorator hides the arguments
        # All in one read: single reads are several times slower.
        dialogues[split] = [_to_dialogue(row) for row in source.__getitems__(range(len(source)))]
    return dialogues


def _prepare(make: Callable[..., DialogueBuilder], folder: Path, beam: Any) -> None:
    """Writes the TFDS files beside `folder` and renames them; several processes may do so at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    tfds.disable_progress_bar()
    try:
        builder = make(data_dir=str(temporary), file_format="array_record")
        config = tfds.download.DownloadConfig(try_download_gcs=False, beam_options=beam)
        builder.download_and_prepare(download_config=config)
        shutil.rmtree(temporary / "downloads", ignore_errors=True)
        version = Path(builder.name) / str(builder.VERSION)
        seal(folder / version, temporary / version)
        try:
            os.rename(temporary / version, folder / version)
        except OSError:
            if not (folder / version).is_dir():  # unless another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
