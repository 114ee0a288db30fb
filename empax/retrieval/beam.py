"""Embedding a corpus with many workers, by Apache Beam: for corpora that outgrow one machine.

A worker reads its own part of the file, loads the encoder once, and writes its own vectors: what travels between
machines is names of files. All must see the file, the folder, and what the encoder is loaded from.
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

from empax.core.files import DataError, parse_jsonl, write_atomically
from empax.core.protocols import InstanceEncoder
from empax.data.dialogues import instance_from_row

MakeEncoder = Callable[[], InstanceEncoder]
"""Loads the encoder on a worker; to be sent there, it is a function of a module or a `functools.partial` of one."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Lines of a file.

    Attributes:
      number: from 0.
      offset: bytes before the first line.
      rows: how many lines.
    """

    number: int
    offset: int
    rows: int

    def file(self, folder: Path) -> Path:
        """Where its vectors go."""
        return folder / f"part-{self.number:06d}.npy"


def parts_of(path: Path, rows: int) -> list[Part]:
    """Cuts a file into parts of `rows` lines; the last may have fewer."""
    found, offset = [], 0
    with path.open("rb") as file:
        while lines := list(itertools.islice(file, rows)):
            found.append(Part(len(found), offset, len(lines)))
            offset += sum(map(len, lines))
    return found


class EmbedPart(beam.DoFn):
    """The vectors of a part's exemplars, written to its file."""

    def __init__(self, path: Path, make_encoder: MakeEncoder, folder: Path):
        self._path, self._make_encoder, self._folder = path, make_encoder, folder

    def setup(self) -> None:
        self._encoder = self._make_encoder()

    def process(self, part: Part) -> Iterator[str]:
        with self._path.open("rb") as file:
            file.seek(part.offset)
            lines = [file.readline().decode() for _ in range(part.rows)]
        rows = parse_jsonl(enumerate(lines, start=1), name=str(self._path))
        vectors = self._encoder.embed_keys([instance_from_row(row) for _, row in rows])
        target = part.file(self._folder)
        write_atomically(target, lambda temporary: np.save(temporary, vectors))
        yield str(target)


def embed_file(
    path: Path, make_encoder: MakeEncoder, folder: Path, *, options: Sequence[str] = (), rows_per_part: int = 10_000
) -> Float[np.ndarray, "N D"]:
    """The vectors of all exemplars in a file, in its order, memory-mapped.

    Parts that are in `folder` already are not made again: a pipeline that failed goes on where it stopped.

    Args:
      path: one instance a line, as the stage "prepare" writes them.
      make_encoder: see `MakeEncoder`.
      folder: where parts and result go; one for each encoder and file.
      options: of Beam, ("--runner=FlinkRunner", ...); none = its direct runner, in this process.
      rows_per_part: what a worker does at a time.

    Raises:
      DataError: the file is empty, or a part's vectors are not what they should be.
    """
    result, parts = folder / "embeddings.npy", parts_of(path, rows_per_part)
    if not parts:
        raise DataError(f"{path} has no lines: there is nothing to embed.")
    if not result.exists():
        missing = [part for part in parts if not part.file(folder).exists()]
        with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
            embed = beam.ParDo(EmbedPart(path, make_encoder, folder))
            pipeline | beam.Create(missing) | beam.Reshuffle() | embed  # pyright: ignore[reportUnusedExpression]
        write_atomically(result, lambda temporary: _join(temporary, parts, folder))
    return np.load(result, mmap_mode="r")


def _join(target: Path, parts: Sequence[Part], folder: Path) -> None:
    """Writes the parts one behind the other; never holds more than one of them."""
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
