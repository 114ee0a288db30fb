"""TensorBoard's event files, scalars only: three fields of one protocol buffer, framed as TFRecords.

Written here because the packages that write them import PyTorch wherever it is installed, or TensorFlow.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path

from empax.core.files import system_errors

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
      folder: made if missing; files of earlier runs stay.
      purge_step: what earlier files say of this step and later ones is no longer shown.
    """

    def __init__(self, folder: Path, *, purge_step: int = 0) -> None:
        # Readers take files in the order of their names, and want one writer per file.
        self._path = folder / f"events.out.tfevents.{time.time_ns():020d}"
        with system_errors(self._path, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
            self._write(0, _bytes(3, b"brain.Event:2"))
            if purge_step > 0:
                self._write(purge_step, _bytes(7, _number(1, 1)))  # SessionLog with status START

    def add_scalar(self, name: str, value: float, step: int) -> None:
        scalar = _bytes(1, name.encode()) + _tag(2, _FIXED32) + struct.pack("<f", value)
        with system_errors(self._path, "written"):
            self._write(step, _bytes(5, _bytes(1, scalar)))
            self._file.flush()

    def close(self) -> None:
        with system_errors(self._path, "written"):  # as that of any buffered file
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
    """CRC-32C, rotated and offset, as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
