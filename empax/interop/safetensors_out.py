"""Writer of safetensors: one file or shards with an index, one shard in memory at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, replacing, system_errors, write_json, write_text
from empax.core.lock import writing
from empax.interop.tensors import Tensors

SHARD_BYTES = 5_000_000_000
"""Maximum bytes of tensors in one file, as the Hub's tools expect."""


def write_tensors(folder: Path, tensors: Tensors, *, max_shard_bytes: int = SHARD_BYTES, stem: str = "model") -> None:
    """Writes `STEM.safetensors`, or shards and `STEM.safetensors.index.json` if they exceed `max_shard_bytes`.

    A larger tensor gets a separate file. The index is written last: without it, the shards are ignored.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # imported here because it is slow

    shards = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: math.prod(tensor.shape) * tensor.dtype.itemsize,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in shards.filename_to_tensors.items():
        _write(folder / file, {name: tensors[name] for name in names})
    if shards.is_sharded:
        metadata = shards.metadata | {"total_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values())}
        index = {"metadata": metadata, "weight_map": shards.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def check_new(path: Path) -> None:
    """Raises ConfigError if `path` is a file or a folder that is not empty."""
    if path.is_dir() and (found := sorted(entry.name for entry in path.iterdir())):
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise ConfigError(f"{path} is not empty: it holds {shown}; give another folder, or empty it first.")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; it must be a folder that is new or empty.")


@contextmanager
def new_folder(path: Path, *, card: str = "") -> Iterator[Path]:
    """Yields a folder to fill, which is renamed to `path` at the end: `path` is complete or absent.

    The `card` is the text of its README.md; empty = none.

    Raises:
      ConfigError: see `check_new`; or another process is writing the same folder, and the message names it.
      DataError: the system refuses to write it; the message says why.
    """
    path = path.absolute()
    beside = path.with_name(f".{path.name}.unfinished")
    filled = beside / path.name
    with system_errors(path, "written"):
        check_new(path)
        beside.mkdir(parents=True, exist_ok=True)
        with writing(WorkDir(beside), "folder"):
            try:
                shutil.rmtree(filled, ignore_errors=True)  # left by a killed process
                filled.mkdir()
                yield filled
                if card:
                    write_text(filled / "README.md", card)
                # Temporary files are private to the user; these are meant to be shared.
                mode = filled.stat().st_mode & 0o666
                for file in filled.rglob("*"):
                    if file.is_file():
                        file.chmod(mode)
                filled.replace(path)
            finally:
                shutil.rmtree(beside, ignore_errors=True)


def _write(file: Path, tensors: Tensors) -> None:
    # Contiguous, because the bytes are written in memory order.
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with replacing(file) as temporary:
        try:
            # transformers requires "pt": it denotes the convention of names and layouts, not the writer.
            safetensors.numpy.save_file(arrays, temporary, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # such as a full disk
            raise DataError(f"{file} cannot be written ({error}).") from error
