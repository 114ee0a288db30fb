"""Output of a run during training: metrics.jsonl, a progress bar, and TensorBoard's event files.

Event files hold scalars only: three fields of one protocol buffer, framed as TFRecords. This is our own writer, since
other packages import PyTorch wherever it is installed, or TensorFlow.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from empax.core.files import metric_rows, system_errors, write_text
from empax.core.progress import Progress
from empax.training.sinks import Sink

_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits reversed
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


def _crc_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        return value

    return tuple(entry(value) for value in range(256))


_CRC_TABLE = _crc_table()


class EventFile:
    """Appends scalars to a new event file in `folder`.

    Args:
      folder: created if missing; files of earlier runs stay.
      purge_step: hides entries of earlier files from this step on.
    """

    def __init__(self, folder: Path, *, purge_step: int = 0) -> None:
        # Readers sort files by name and expect one writer per file.
        self._path = folder / f"events.out.tfevents.{time.time_ns():020d}"
        with system_errors(self._path, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
            self._write(0, _bytes(3, b"brain.Event:2"))
            self._write(purge_step, _bytes(7, _number(1, 1)))  # SessionLog with status START

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with system_errors(self._path, "written"):
            for name, value in values.items():
                scalar = _bytes(1, name.encode()) + _tag(2, _FIXED32) + struct.pack("<f", value)
                self._write(step, _bytes(5, _bytes(1, scalar)))
            self._file.flush()

    def close(self) -> None:
        with system_errors(self._path, "written"):  # closing flushes the buffer
            self._file.close()

    def _write(self, step: int, payload: bytes) -> None:
        event = _tag(1, _FIXED64) + struct.pack("<d", time.time()) + _number(2, step) + payload
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _number(field: int, value: int) -> bytes:
    return _tag(field, _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(value)) + value


def _masked_crc(data: bytes) -> bytes:
    """Computes CRC-32C, rotated and offset as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


log = logging.getLogger("empax")


class MetricsLog:
    """Appends one JSON object per logged step to `path`, and sends the same metrics to TensorBoard and to trackers.

    A row is {"stage", "step", "split", then the metrics}. Opening drops rows of this stage after `resume_step`: they
    will be written again, so the file equals that of an uninterrupted run. Trackers cannot drop rows and do not get
    them again.

    Args:
      path: the run's metrics.jsonl, shared by all stages.
      resume_step: step that the run resumes from; 0 drops every row of the stage.
      rows: lines of the stage so far, from a checkpoint; None = the lines of the file.
      tensorboard: folder for the stage's event files; None = no TensorBoard.
      trackers: further receivers of the metrics, each as "SPLIT/METRIC"; closed with the log.
    """

    def __init__(
        self,
        path: Path,
        *,
        stage: str,
        resume_step: int = 0,
        rows: Sequence[str] | None = None,
        tensorboard: Path | None = None,
        trackers: Sequence[Sink] = (),
    ) -> None:
        self._stage, self._trackers = stage, trackers
        self._path = path
        with system_errors(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.rows, self._tracked = _drop_rows(path, stage, resume_step, rows)
            """Lines of the stage so far; steps and splits of the dropped lines."""
            self._file = path.open("a", encoding="utf-8")
        self._board = None if tensorboard is None else EventFile(tensorboard, purge_step=resume_step + 1)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes one row; on return it is in the file, even if this process is killed."""
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no nan
        row: dict[str, Any] = {"stage": self._stage, "step": step, "split": split, **known}
        self.rows.append(json.dumps(row, ensure_ascii=False))
        with system_errors(self._path, "written"):
            self._file.write(self.rows[-1] + "\n")
            self._file.flush()
        named = {f"{split}/{name}": value for name, value in values.items()}
        if self._board is not None:
            self._board.log(step, named)
        if (step, split) not in self._tracked:
            for tracker in self._trackers:
                tracker.log(step, named)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        log.info("%s  step %d  %s  %s", self._stage, step, split, shown)

    def close(self) -> None:
        try:
            with system_errors(self._path, "written"):  # closing flushes the buffer
                self._file.close()
        finally:
            for tracker in self._trackers:
                tracker.close()
            if self._board is not None:
                self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def _drop_rows(
    path: Path, stage: str, resume_step: int, rows: Sequence[str] | None
) -> tuple[list[str], set[tuple[int, str]]]:
    """Keeps the stage's rows up to `resume_step`, or `rows`; returns them, and steps and splits of the dropped ones."""
    found = metric_rows(path)
    others = [line for line, row in found if row["stage"] != stage]
    mine = [(line, row) for line, row in found if row["stage"] == stage]
    own = [line for line, row in mine if row["step"] <= resume_step]
    later = {(row["step"], str(row.get("split"))) for _, row in mine if row["step"] > resume_step}
    if rows is not None and own != list(rows):
        log.warning("%s: %s has changed since it was written; restoring its rows from the checkpoint.", stage, path)
        own = list(rows)
    kept = "".join(f"{line}\n" for line in (*others, *own))
    if kept.encode() != (path.read_bytes() if path.exists() else b""):
        write_text(path, kept)
    return own, later


class ProgressBar(Progress):
    """Progress of a training stage, with its loss and speed after the bar."""

    def __init__(self, stage: str, *, steps: int, initial: int) -> None:
        super().__init__(stage, total=steps, unit="steps", initial=initial)

    def show(self, *, loss: float, examples_per_second: float) -> None:
        self.note(f"loss {loss:.4g}, {examples_per_second:.4g} examples/s")
