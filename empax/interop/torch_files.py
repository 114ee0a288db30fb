"""Reader of PyTorch's zip files of weights without PyTorch, and without running code in them.

Such a file holds a pickle, which lists the tensors, and the raw bytes of their storages. `interop.state_dicts` turns
the pickle into tokens. This module turns the tokens into tensors, after checking their numbers against the file.
"""

from __future__ import annotations

import collections
import math
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.files import DataError
from empax.data.model_files import check_whole
from empax.interop import state_dicts
from empax.interop.state_dicts import BadPickleError, Call, RefusedPickleError, Storage
from empax.interop.tensors import Checksum, MappedTensor, dtypes_of

_STORAGES = dtypes_of("""
    FloatStorage=float32 DoubleStorage=float64 HalfStorage=float16 BFloat16Storage=bfloat16 LongStorage=int64
    IntStorage=int32 ShortStorage=int16 CharStorage=int8 ByteStorage=uint8 BoolStorage=bool""")

_ADVICE = "In an environment with PyTorch, load it and save its tensors as safetensors."
_MOST_EXPANDED = 1 << 26
"""Bytes that a tensor may take by repeating elements; a larger tensor may not exceed its storage."""


def read_torch(file: Path) -> dict[str, MappedTensor]:
    """Returns the tensors of a state dict that `torch.save` wrote, by name.

    A state dict under "model" or "state_dict" is unwrapped; entries that are not tensors are ignored.

    Raises:
      DataError: the file is truncated, older than PyTorch 1.6, holds no state dict, or asks for anything that a state
        dict does not need. Reading a tensor raises it too if its bytes are damaged.
    """
    archive = _Archive(file)
    try:
        root = state_dicts.read_state_dict(archive.pickle(), frozenset(_STORAGES))
        for key in ("model", "state_dict"):
            if isinstance(root, dict) and isinstance(root.get(key), dict):
                root = root[key]
        if not isinstance(root, dict):
            raise DataError(f"{file} holds a {type(root).__name__}, not a state dict.")
        found = {name: archive.tensor(name, value) for name, value in root.items() if isinstance(name, str)}
    except RefusedPickleError as error:
        raise DataError(
            f"{file} {error}, which no weights file needs and which could be an attack: refused. If you trust the "
            f"file: {_ADVICE}"
        ) from error
    except BadPickleError as error:
        raise DataError(f"{file} holds a broken pickle ({error}); fetch it again.") from error
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    if not tensors:
        raise DataError(f"{file} holds a dict of {len(root)} entries, but none is a tensor.")
    return tensors


class _Archive:
    """The zip file: its pickle, and the storages as parts of the file."""

    def __init__(self, file: Path):
        check_whole(file)
        self._file = file
        self._size = file.stat().st_size
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        # Besides BadZipFile: other exceptions of its parser on a malformed directory.
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError, EOFError) as error:
            raise DataError(_not_a_zip(file)) from error
        names = [info.filename for info in infos]
        if twice := [name for name, times in collections.Counter(names).items() if times > 1]:
            raise DataError(f"{file} holds {twice[0]} more than once; fetch it again.")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise DataError(f"{file} is a zip file, but not one of PyTorch's: it has {len(pickles)} data.pkl.")
        self._pickle = pickles[0]
        self._folder = pickles[0].removesuffix("data.pkl")
        self._infos: Mapping[str, zipfile.ZipInfo] = dict(zip(names, infos, strict=True))
        self._storages: dict[str, Checksum] = {}
        order = f"{self._folder}byteorder"
        if order in self._infos and self._read(order) != b"little":
            raise DataError(f"{file} was written on a big-endian machine. {_ADVICE}")

    def pickle(self) -> bytes:
        return self._read(self._pickle)

    def _read(self, name: str) -> bytes:
        entry = self._entry(name)
        entry.check()
        with self._file.open("rb") as stream:
            stream.seek(entry.offset)
            return stream.read(entry.num_bytes)

    def _entry(self, name: str) -> Checksum:
        """Locates an entry by both of its headers; files may be written without checksums."""
        info = self._infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise DataError(f"{self._file}: {name} is compressed or encrypted, which PyTorch never does. {_ADVICE}")
        head = b""
        if 0 <= info.header_offset <= self._size:
            with self._file.open("rb") as stream:
                stream.seek(info.header_offset)
                head = stream.read(30)
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise DataError(f"{self._file} is damaged: {name} is not where its directory says; fetch it again.")
        # The local header's name and extra field may differ in length from those of the central directory.
        offset = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        if offset + info.file_size > self._size:
            raise DataError(f"{self._file} is cut short: {name} ends after the file does; fetch it again.")
        return Checksum(self._file, offset, info.file_size, info.CRC)

    def _storage(self, key: Any) -> Checksum:
        """Returns the storage with the pickle's `key`; tensors that share it share its checksum."""
        if (
            type(key) is not str
            or re.fullmatch(r"\w{1,64}", key) is None
            or f"{self._folder}data/{key}" not in self._infos
        ):
            raise BadPickleError("it refers to a storage that is not in the file")
        if key not in self._storages:
            self._storages[key] = self._entry(f"{self._folder}data/{key}")
        return self._storages[key]

    def tensor(self, name: str, value: Any) -> MappedTensor | None:
        """Returns the tensor that a value of the state dict describes; None if it describes none.

        Raises:
          DataError: the tensor is impossible or not supported.
        """
        if type(value) is Call and value.function == state_dicts.PARAMETER:
            if not value.arguments:
                raise BadPickleError(f"{name} is a parameter of nothing")
            value = value.arguments[0]
        if type(value) is not Call or value.function != state_dicts.TENSOR:
            return None
        if len(value.arguments) not in (6, 7):
            raise BadPickleError(f"{name} is a tensor of {len(value.arguments)} arguments")
        storage, offset, size, stride, _, _, *metadata = value.arguments  # the others: requires_grad, hooks
        dtype = _dtype(storage)
        if metadata and metadata[0]:
            raise DataError(f"{self._file}: {name} is stored as negative, which is not read here. {_ADVICE}")
        if not (_is_sizes((offset,)) and _is_sizes(size) and _is_sizes(stride) and len(size) == len(stride)):
            raise DataError(f"{self._file} describes an impossible tensor: {name} has no sizes or strides.")
        entry = self._storage(storage.key)
        if not _is_sizes((storage.size,)) or storage.size * dtype.itemsize != entry.num_bytes:
            raise DataError(f"{self._file} is damaged: the storage of {name} has another size; fetch it again.")
        # First relative to the storage: nothing may lie beyond it.
        first = offset * dtype.itemsize
        try:
            tensor = MappedTensor(self._file, entry.offset + first, dtype, size, stride, entry)
        except ValueError as error:
            raise DataError(f"{self._file} describes an impossible tensor ({error}); fetch it again.") from error
        if tensor.end > entry.offset + entry.num_bytes:
            raise DataError(f"{self._file}: {name} of shape {size} reaches beyond its storage; fetch it again.")
        if math.prod(size) * dtype.itemsize > max(entry.num_bytes, _MOST_EXPANDED):
            raise DataError(f"{self._file}: {name} of shape {size} is far larger than its storage; refused.")
        return tensor


def _dtype(storage: Any) -> np.dtype:
    """Returns the type of a tensor's elements."""
    if type(storage) is not Storage:
        raise BadPickleError("a tensor without a storage")
    if storage.kind.module != "torch" or storage.kind.name not in _STORAGES:
        raise BadPickleError("a tensor of unknown type")
    return _STORAGES[storage.kind.name]


def _is_sizes(values: Any) -> bool:
    """Whether `values` is a tuple of numbers valid as shape or strides; NumPy supports at most 64 axes."""
    return type(values) is tuple and len(values) <= 64 and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _not_a_zip(file: Path) -> str:
    with file.open("rb") as stream:
        start = stream.read(2)
    if start == b"PK":
        return f"{file} is not a whole zip file; fetch the model again."
    if start[:1] == b"\x80":
        return f"{file} has PyTorch's format from before version 1.6, which is not read here. {_ADVICE}"
    return f"{file} is not a file that torch.save wrote; fetch the model again."
