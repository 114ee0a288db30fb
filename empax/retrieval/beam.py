"""Embedding a corpus with many workers, using Apache Beam: for corpora too large for one machine.

Each worker reads its part of the file, loads the encoder once, and writes its vectors; only file names travel between
machines. All machines must have access to the file, the folder, and the files of the encoder.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from jaxtyping import Float

from empax.core.files import DataError, parse_jsonl, replacing
from empax.core.protocols import InstanceEncoder
from empax.data.dialogues import instance_from_row

MakeEncoder = Callable[[], InstanceEncoder]
"""Loads the encoder on a worker; to be picklable, a module-level function or a `functools.partial` of one."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Lines of a file: how many lines and bytes are before them, and how many they are."""

    before: int
    offset: int
    rows: int

    def file(self, folder: Path) -> Path:
        """Returns the path of the part's vectors."""
        return folder / f"part-{self.before:06d}.npy"


def parts_of(path: Path, rows: int) -> list[Part]:
    """Splits a file into parts of `rows` lines; the last may have fewer."""
    found, before, offset = [], 0, 0
    with path.open("rb") as file:
        while lines := list(itertools.islice(file, rows)):
            found.append(Part(before, offset, len(lines)))
            before, offset = before + len(lines), offset + sum(map(len, lines))
    return found


class EmbedPart(beam.DoFn):
    """Embeds the exemplars of a part and writes the vectors to its file."""

    def __init__(self, path: Path, make_encoder: MakeEncoder, folder: Path):
        self._path, self._make_encoder, self._folder = path, make_encoder, folder

    def setup(self) -> None:
        self._encoder = self._make_encoder()

    def process(self, part: Part) -> Iterator[str]:
        with self._path.open("rb") as file:
            file.seek(part.offset)
            lines = [file.readline().decode() for _ in range(part.rows)]
        rows = parse_jsonl(enumerate(lines, start=part.before + 1), name=str(self._path))
        vectors = self._encoder.embed_keys([instance_from_row(row) for _, row in rows])
        target = part.file(self._folder)
        with replacing(target) as temporary:
            np.save(temporary, vectors)
        yield str(target)


def embed_file(
    path: Path, make_encoder: MakeEncoder, folder: Path, *, options: Sequence[str] = (), rows_per_part: int = 10_000
) -> Float[np.ndarray, "N D"]:
    """Embeds all exemplars of a file and returns the vectors in its order, memory-mapped.

    Parts that already exist in `folder` are kept, so a failed pipeline continues where it stopped.

    The file has one instance per line, as written by the stage "prepare"; each encoder and file needs a separate
    `folder`. `options` are Beam's, ("--runner=FlinkRunner", ...); none = the direct runner, in this process. Raises
    DataError if the file is empty, or a part's vectors have the wrong shape.
    """
    result, parts = folder / "embeddings.npy", parts_of(path, rows_per_part)
    if not parts:
        raise DataError(f"{path} has no lines: there is nothing to embed.")
    if not result.exists():
        missing = [part for part in parts if not part.file(folder).exists()]
        with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
            embed = beam.ParDo(EmbedPart(path, make_encoder, folder))
            pipeline | beam.Create(missing) | beam.Reshuffle() | embed  # pyright: ignore[reportUnusedExpression]
        with replacing(result) as temporary:
            _join(temporary, parts, folder)
    return np.load(result, mmap_mode="r")


def _join(target: Path, parts: Sequence[Part], folder: Path) -> None:
    """Concatenates the parts into one file; holds only one part in memory."""
    first = np.load(parts[0].file(folder), mmap_mode="r")
    shape = (sum(part.rows for part in parts), first.shape[1])
    joined = np.lib.format.open_memmap(target, mode="w+", dtype=first.dtype, shape=shape)
    start = 0
    for part in parts:
        vectors = np.load(part.file(folder))
        if vectors.shape != (part.rows, shape[1]):
            raise DataError(
                f"{part.file(folder)} holds {vectors.shape}, must be {(part.rows, shape[1])}; delete it and run again."
            )
        joined[start : start + part.rows] = vectors
        start += part.rows
    joined.flush()
