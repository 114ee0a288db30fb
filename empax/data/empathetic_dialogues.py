"""EmpatheticDialogues (Rashkin et al. 2019): reads dialogues from the official archive, through TFDS.

The archive is a `.tar.gz` of `empatheticdialogues/{train,valid,test}.csv`. It is read from a folder that the user
names, or downloaded once; TFDS converts it to `array_record` files, which later runs read.
"""

from __future__ import annotations

import bz2
import dataclasses
import functools
import gzip
import hashlib
import http.client
import io
import lzma
import os
import re
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.files import hash_file, replacing
from empax.core.inputs import note, note_known
from empax.core.paths import expand
from empax.core.settings import cache_dir
from empax.core.text_files import DataError, check_length, check_regular, located, split_lines
from empax.core.types import EMOTIONS, Dialogue, Instance
from empax.data.corpora import SETTING, data_folder
from empax.data.dialogues import alternate, example_of, to_instances

ARCHIVE_NAME = "empatheticdialogues.tar.gz"
ARCHIVE_URL = f"https://dl.fbaipublicfiles.com/parlai/empatheticdialogues/{ARCHIVE_NAME}"
ARCHIVE_SHA256 = "56f234d77b7dd1f005fd365bb17769cfe346c3c84295b69bc069c8ccb83be03d"
DOWNLOAD_TIMEOUT_SECONDS = 60

SPLITS = {"train": "train", "validation": "valid", "test": "test"}
"""Our name of each split, and the archive's."""

_COLUMNS = ("conv_id", "utterance_idx", "context", "prompt", "speaker_idx", "utterance")  # the first columns
_WIDTHS = (8, 9)  # some versions end each row with candidate responses
_BLANKS = re.compile(r" {2,}")
_SELFEVAL = re.compile(r"(\d(\|\d)*(_\d(\|\d)*)+)?")
"""Content of the 7th column: the two workers' ratings, "5|5|5_2|2|5", or nothing."""

_GZIP, _XZ, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\0", b"BZh"
_MAX_BYTES = 512 << 20
"""Maximum size of a decompressed archive; the official one has about a quarter of it."""

_BROKEN = "{} cannot be read ({}): it is cut short or no .tar.gz; copy or download it again."

_POINT_TO_FOLDER = (
    f"put {ARCHIVE_NAME} into a folder and name that folder with --config.data.dir=FOLDER or EMPAX_DATA_DIR=FOLDER"
)


def find_archive(data_dir: str | os.PathLike[str] | None = None, *, setting: str = SETTING) -> Path:
    """Returns the archive: in `data_dir`, else in EMPAX_DATA_DIR, else downloaded into the cache (28 MB).

    Only a downloaded archive must have the pinned SHA-256; a local one is not checked. `data_dir` is the archive, a
    folder that holds it, or one that holds it under `empathetic_dialogues/`. Raises DataError if the user's folder has
    no archive, there is no network, or the download is not the official archive.
    """
    folder, origin = data_folder(data_dir, setting)
    if not folder:
        return _downloaded(cache_dir() / "downloads" / ARCHIVE_NAME)
    root = expand(folder)
    places = [root / ARCHIVE_NAME, root / "empathetic_dialogues" / ARCHIVE_NAME]
    for place in (root, *places):
        if place.is_file():
            note("EmpatheticDialogues", place)
            return place
    raise DataError(
        f"{origin} = {str(folder)!r} holds no EmpatheticDialogues: neither {places[0]} nor {places[1]} exists. "
        f"Point it to the folder with {ARCHIVE_NAME}; a run without this setting downloads it from {ARCHIVE_URL}."
    )


def given_archive(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the user's archive; None if the official one would be downloaded, which needs no check.

    Raises DataError as `find_archive` does.
    """
    if data_folder(data_dir)[0]:
        return find_archive(data_dir)
    note_known("EmpatheticDialogues", ARCHIVE_URL, ARCHIVE_SHA256)
    return None


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The whole corpus: its name with its hash, the instances of all splits by id, and those of the training split."""

    name: str
    instances: Mapping[str, Instance]
    training: Sequence[Instance]


def load_corpus(data: str) -> Corpus:
    """Loads the corpus; `data` is the flag `--data`."""
    archive = find_archive(data, setting="--data")
    splits = {split: to_instances(read_dialogues(archive, split)) for split in SPLITS}
    instances = {i.id: i for split in splits.values() for i in split}
    return Corpus(f"EmpatheticDialogues (sha256 {hash_file(archive)[:16]})", instances, splits["train"])


def archive_hash(data_dir: str | os.PathLike[str] | None = None) -> str:
    """Returns the SHA-256 of the archive from `find_archive`, for the record of a run."""
    return hash_file(find_archive(data_dir))


def _downloaded(path: Path) -> Path:
    if not path.is_file():
        with replacing(path) as temporary:
            _download(temporary)
        return path
    found = hash_file(path)
    if found != ARCHIVE_SHA256:
        raise DataError(
            f"{path} has SHA-256 {found}, the official archive has {ARCHIVE_SHA256}; delete it to download it again, "
            f"or, if you want another version, {_POINT_TO_FOLDER}."
        )
    return path


def _download(path: Path) -> None:
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(ARCHIVE_URL, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer, path.open("wb") as file:
            while chunk := answer.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"could not download {ARCHIVE_URL} ({error}). Without network, {_POINT_TO_FOLDER}.") from error
    if digest.hexdigest() != ARCHIVE_SHA256:
        raise DataError(
            f"{ARCHIVE_URL} gave SHA-256 {digest.hexdigest()}, expected {ARCHIVE_SHA256}; nothing was kept. "
            f"Run again to download it again, or {_POINT_TO_FOLDER}."
        )


def read_dialogues(archive: Path, split: str) -> Iterator[Dialogue]:
    """Yields the dialogues of one split ("train", "validation", "test") in the archive's order.

    Quoting is off: the files escape a comma inside a text as `_comma_` and use quotes freely. Utterances are
    ordered by `utterance_idx`; odd ones are the speaker's, even ones the listener's (`speaker_idx` holds worker
    numbers in the official archive).

    In texts for training and validation, several blanks become one. People typed two in 8.6% of the replies; T5's and
    BERT's tokenizers ignore them, but a GPT-2, a BART or a Llama would learn them. Validation has none either, since it
    selects checkpoints: the better a model learns, the less likely is a second blank. The test split stays as it is:
    its hash identifies the rows.

    Raises DataError if the archive is truncated or lacks the file, a row has a wrong number of columns, an unknown
    emotion or a blank utterance, or utterances are not numbered 1, 2, 3, ... within their conversation.
    """
    member = f"empatheticdialogues/{SPLITS[split]}.csv"
    rows: dict[str, dict[int, list[str]]] = {}
    number = 0
    for number, line in split_lines(_member(archive, member), f"{archive}: {member}"):
        row = line.split(",")
        where = f"{archive}: {member}, line {number}"
        if number == 1 and tuple(row[: len(_COLUMNS)]) != _COLUMNS:
            raise DataError(f"{where}: the columns are {', '.join(row)}; they must begin with {', '.join(_COLUMNS)}.")
        if number > 1 and line.strip():
            index = _checked_index(row, where)
            turns = rows.setdefault(row[0], {})
            if index in turns:
                raise DataError(f"{where}: conversation {row[0]!r} has a second utterance {index}.")
            turns[index] = row
    if not rows:
        raise DataError(f"{archive}: {member}, line {number}: the file ends without a dialogue.")
    for name, turns in rows.items():
        if sorted(turns) != list(range(1, len(turns) + 1)):
            raise DataError(f"{archive}: {member}: conversation {name!r} has utterances {sorted(turns)}, not 1, 2, ...")
        ordered = [turns[index] for index in sorted(turns)]
        texts = [_text(field) for field in (ordered[0][3], *(row[5] for row in ordered))]
        situation, *said = [_BLANKS.sub(" ", text) for text in texts] if split != "test" else texts
        yield Dialogue(id=name, emotion=ordered[0][2], situation=situation, utterances=alternate(said))


def _member(archive: Path, name: str) -> bytes:
    """Returns the contents of one file of the archive.

    The whole archive is decompressed first: its checksum is at the end, which tarfile would not reach.
    """
    raw = _decompressed(archive)
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            found = [info for info in tar if info.name.removeprefix("./") == name]
            # Neither a link nor a sparse file, which may claim any size.
            if found and (not found[-1].isreg() or found[-1].issparse()):
                raise DataError(f"{archive}: {name} is not a plain file in it.")
            file = tar.extractfile(found[-1]) if found else None
            if file is not None:
                return file.read()
    except DataError:
        raise
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError, OSError, EOFError) as error:
        raise DataError(_BROKEN.format(archive, error)) from error
    raise DataError(f"{archive} holds no {name}; it must be the official {ARCHIVE_NAME} or have the same layout.")


def _decompressed(archive: Path) -> bytes:
    check_regular(archive)
    try:
        with archive.open("rb") as plain:
            start = plain.read(len(_XZ))
        open_ = {_GZIP: gzip.open, _XZ: lzma.open, _BZIP2: bz2.open}
        how = next((how for magic, how in open_.items() if start.startswith(magic)), Path.open)
        with how(archive, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(_BROKEN.format(archive, error)) from error
    if len(raw) > _MAX_BYTES:
        raise DataError(f"{archive} holds more than {_MAX_BYTES >> 20} MiB; it is not the official {ARCHIVE_NAME}.")
    return raw


def _checked_index(row: list[str], where: str) -> int:
    if len(row) not in _WIDTHS:
        raise DataError(f"{where}: {len(row)} columns, must be 8 or 9; found {','.join(row)[:200]!r}.")
    if len(row) == max(_WIDTHS) and (not _SELFEVAL.fullmatch(row[6]) or (row[7] and _SELFEVAL.fullmatch(row[7]))):
        raise DataError(
            f"{where}: 9 columns, but the 7th to 9th are not selfeval, tags, candidates; found {row[6][:60]!r}, "
            f"{row[7][:60]!r}, {row[8][:60]!r}. A comma inside a text must be written _comma_."
        )
    located(check_length, *row, place=where)
    if row[2] not in EMOTIONS:
        raise DataError(f"{where}: unknown emotion {row[2]!r}; it must be one of {', '.join(EMOTIONS)}.")
    if not _text(row[5]):
        raise DataError(f"{where}: utterance {row[1]} of conversation {row[0]!r} is blank.")
    if not row[1].isdecimal() or len(row[1]) > 4:
        raise DataError(f"{where}: utterance_idx is {row[1][:60]!r}, must be a whole number below 10000.")
    return int(row[1])


def _text(field: str) -> str:
    return field.replace("_comma_", ",").strip()


def _split_examples(archive: Path) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Returns the builder's examples of each split, in the archive's order."""
    return {split: enumerate(map(example_of, read_dialogues(archive, split))) for split in SPLITS}


def load_dialogues(data_dir: str | os.PathLike[str] | None = None) -> dict[str, list[Dialogue]]:
    """Loads the dialogues by split ("train", "validation", "test"), each in the archive's order.

    The first call writes `array_record` files to the cache, under the archive's hash; later calls read them. Raises
    DataError as `find_archive` and `read_dialogues` do.
    """
    archive = find_archive(data_dir)
    folder = cache_dir() / "tfds" / f"empathetic_dialogues-{hash_file(archive)[:16]}"
    from empax.data.builder import EmpatheticDialogues, load

    examples = functools.partial(_split_examples, archive)
    return load(functools.partial(EmpatheticDialogues, examples=examples), folder, tuple(SPLITS))
