"""What the fuzz tests of model files run in a process of their own: write an input, read it as a user would."""

import contextlib
import json
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from empax.core.files import DataError
from empax.data.gguf import read_gguf
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.huggingface import load_config, load_pretrained, model_config
from empax.interop.readers import open_tensors


@contextlib.contextmanager
def _folder(files: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        yield Path(folder)


def _values(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """All tensors of a file, each read whole."""
    arrays = {name: np.asarray(tensor) for name, tensor in open_tensors(path).items()}
    return {name: (array.shape, array.dtype.name, array.tobytes()) for name, array in arrays.items()}


def read_weights(name: str, content: bytes, original: bytes | None) -> str:
    """Opens and reads a file of weights; `original`: the undamaged one, of a format with checksums."""
    with _folder({name: content}) as folder:
        found = _values(folder / name)
        if original is None:
            return "read"
        (folder / "original.bin").write_bytes(original)
        return "read" if found == _values(folder / "original.bin") else "damaged"


def read_gguf_model(content: bytes) -> str:
    """Settings, tensors and tokenizer of a GGUF file, one after the other: each may refuse it."""
    with _folder({"a.gguf": content}) as folder:
        refused = 0
        for read in (
            lambda: model_config(load_config(folder / "a.gguf")),
            lambda: _values(folder / "a.gguf"),
            lambda: _encode(folder / "a.gguf"),
            lambda: read_gguf(folder / "a.gguf"),
        ):
            try:
                read()
            except ValueError as error:
                if type(error).__name__ not in ("DataError", "ConfigError"):
                    raise
                refused += 1
        if refused:
            raise DataError("refused by some of them")
        return "read"


def _encode(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, extra_tokens=["<fuzz>"])
    ids = tokenizer.encode("I feel sad <fuzz> today, 12 é")
    tokenizer.decode(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in (*ids, tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id))


def read_tokenizer(files: dict[str, bytes]) -> str:
    """A folder with a tokenizer: loaded, used."""
    with _folder(files) as folder:
        _encode(folder)
    return "read"


def read_model(config: bytes, weights: bytes, *, prefix: str = "") -> str:
    """A folder with config.json and weights: the whole model."""
    with _folder({f"{prefix}config.json": config, f"{prefix}model.safetensors": weights}) as folder:
        load_pretrained(folder)
    return "read"


def read_adapter(config: bytes, weights: bytes) -> str:
    """A folder with an adapter, on the model that its config names."""
    return read_model(config, weights, prefix="adapter_")


def repacked(content: bytes, changed: dict[str, bytes]) -> bytes:
    """A zip file with some entries changed and right checksums: what an attacker would send."""
    buffer = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name, old.read(name)))
    return buffer.getvalue()


def with_header(header: object, content: bytes) -> bytes:
    """A safetensors file with another header, its length right."""
    size = struct.unpack("<Q", content[:8])[0]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]
