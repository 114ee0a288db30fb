"""PyTorch's zip files of weights, read without PyTorch and without running anything that is in them.

Such a file holds a pickle, which may ask for any function of Python to be called, and the raw bytes of the storages
that tensors look into. Here a pickle gets what a state dict needs, under names of our own, and nothing else.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from empax.core.files import DataError
from empax.interop.tensors import MappedTensor

_STORAGES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}

_MALFORMED = (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What the pickle machine raises on a stream that is no pickle, or one that misuses what it was given."""

_ADVICE = "In an environment with PyTorch, load it and save its tensors as safetensors."


def read_torch(file: Path) -> dict[str, MappedTensor]:
    """The tensors of a state dict that `torch.save` wrote, by name.

    A state dict under "model" or "state_dict" is taken out; entries that are no tensors are passed over.

    Raises:
      DataError: the file is cut short, in the format of before PyTorch 1.6, holds no state dict, or asks for
        anything that a state dict does not need.
    """
    root = _unpickle(file)
    for key in ("model", "state_dict"):
        if isinstance(root, dict) and isinstance(root.get(key), dict):
            root = root[key]
    if not isinstance(root, dict):
        raise DataError(f"{file} holds no state dict but a {type(root).__name__}.")
    tensors = {name: value for name, value in root.items() if isinstance(name, str) and isinstance(value, MappedTensor)}
    if not tensors:
        raise DataError(f"{file} holds a dict of {len(root)} entries, but no tensor among them.")
    return tensors


def _unpickle(file: Path) -> Any:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise DataError(f"{file} is a zip file, but none of PyTorch's: it has {len(pickles)} data.pkl.")
            folder = pickles[0].removesuffix("data.pkl")
            packed = [name for name, entry in entries.items() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise DataError(f"{file}: {packed[0]} is compressed, which PyTorch never does. {_ADVICE}")
            if f"{folder}byteorder" in entries and archive.read(f"{folder}byteorder") != b"little":
                raise DataError(f"{file} was written on a big-endian machine. {_ADVICE}")
            places = _Places(file, folder, entries)
            return _StateDictUnpickler(io.BytesIO(archive.read(pickles[0])), file, places).load()
    except DataError:
        raise
    except zipfile.BadZipFile as error:
        raise DataError(_not_a_zip(file)) from error
    except _MALFORMED as error:
        raise DataError(f"{file} holds a broken pickle ({type(error).__name__}: {error}); fetch it again.") from error


def _not_a_zip(file: Path) -> str:
    with file.open("rb") as stream:
        start = stream.read(2)
    if start == b"PK":
        return f"{file} is not a whole zip file; fetch the model again."
    if start[:1] == b"\x80":
        return f"{file} is in PyTorch's format of before version 1.6, which is not read here. {_ADVICE}"
    return f"{file} is not a file that torch.save wrote; fetch the model again."


class _Sealed:
    """What a pickle is handed may be called or passed on, but not changed."""

    def __setstate__(self, state: Any) -> NoReturn:
        raise DataError(f"A pickle tries to change a {type(self).__name__}, which no file of weights does.")


class _Dict(dict[Any, Any]):
    """In place of collections.OrderedDict."""

    def __setstate__(self, state: Any) -> None:
        """State dicts carry `_metadata`, which nobody here needs."""


class _Inert:
    """In place of objects that checkpoints carry beside the weights: takes anything, keeps nothing."""

    def __init__(self, *arguments: Any):
        del arguments

    def __setstate__(self, state: Any) -> None:
        """Forgets it."""


@dataclasses.dataclass(frozen=True)
class _StorageType(_Sealed):
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _Storage(_Sealed):
    """A storage's bytes in the file."""

    offset: int
    num_bytes: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the storages lie in the file."""

    file: Path
    folder: str
    entries: Mapping[str, zipfile.ZipInfo]

    def find(self, key: str, dtype: np.dtype) -> _Storage:
        entry = self.entries[f"{self.folder}data/{key}"]
        with self.file.open("rb") as stream:
            stream.seek(entry.header_offset)
            # The local header's name and extra field may differ in length from those of the central directory.
            name, extra = struct.unpack_from("<HH", stream.read(30), 26)
        return _Storage(entry.header_offset + 30 + name + extra, entry.file_size, dtype)


@dataclasses.dataclass(frozen=True)
class _RebuildTensor(_Sealed):
    """In place of torch._utils._rebuild_tensor_v2."""

    file: Path

    def __call__(self, storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> MappedTensor:
        del rest  # requires_grad, hooks
        shape, strides = tuple(map(int, size)), tuple(map(int, stride))
        if not isinstance(storage, _Storage) or len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
            raise DataError(f"{self.file} describes a tensor that cannot be: shape {shape}, strides {strides}.")
        first = storage.offset + offset * storage.dtype.itemsize
        tensor = MappedTensor(self.file, first, storage.dtype, shape, strides)
        if tensor.end > storage.offset + storage.num_bytes:
            raise DataError(f"{self.file}: a tensor of shape {shape} reaches beyond its storage; fetch it again.")
        return tensor


class _RebuildParameter(_Sealed):
    """In place of torch._utils._rebuild_parameter."""

    def __call__(self, data: Any, requires_grad: bool = True, hooks: Any = None) -> Any:
        del requires_grad, hooks
        return data


class _StateDictUnpickler(pickle.Unpickler):
    """Knows what state dicts need; every other name is refused before anything is made of it."""

    def __init__(self, stream: io.BytesIO, file: Path, places: _Places):
        super().__init__(stream, encoding="utf-8")
        self._file = file
        self._places = places
        self._known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): _Dict,
            ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(file),
            ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
            # Training checkpoints keep their command line and devices beside the weights.
            ("argparse", "Namespace"): _Inert,
            ("torch", "device"): _Inert,
        }
        self._known |= {("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()}

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in self._known:
            raise DataError(
                f"{self._file} asks for {module_name}.{global_name}, which a file of weights does not need and which "
                f"could run code: refused. If you trust the file: {_ADVICE}"
            )
        return self._known[module_name, global_name]

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _StorageType)):
            raise DataError(f"{self._file} refers to {pid!r}, which is no storage of a tensor.")
        return self._places.find(str(pid[2]), pid[1].dtype)
