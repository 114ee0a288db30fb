"""Finding corpora that the user has downloaded: one folder for all of them, or one folder each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from empax.core.config import ConfigError
from empax.core.paths import expand

DATA_DIR = "EMPAX_DATA_DIR"
"""Environment variable with the folder of corpora."""

SETTING = "config.data.dir"
"""The setting of a run that names the folder; other commands have a flag instead, `--data`."""


def data_folder(data_dir: str | os.PathLike[str] | None, setting: str = SETTING) -> tuple[str | os.PathLike[str], str]:
    """Returns the folder that the user names, "" for none, and where: in `setting`, else the environment."""
    if data_dir:
        return data_dir, setting
    return os.environ.get(DATA_DIR, ""), DATA_DIR


def find_corpus(
    what: str,
    files: Sequence[str],
    under: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    setting: str = SETTING,
) -> Path:
    """Returns the folder with all `files` of the corpus `what`: the user's (`data_folder`), or `under`/ in it.

    Raises ConfigError if no folder is named, or it does not hold the files.
    """
    folder, origin = data_folder(data_dir, setting)
    they = "it" if len(files) == 1 else "them"
    wanted = f"the folder with {', '.join(files)}, or to one that holds {they} under {under}/"
    if not folder:
        flag = f"--{setting.removeprefix('--')}"
        raise ConfigError(f"{what} is not downloaded automatically: set {flag} or {DATA_DIR} to {wanted}.")
    root = expand(folder)
    for place in (root, root / under):
        if all((place / name).is_file() for name in files):
            return place
    raise ConfigError(f"{origin} = {str(folder)!r} holds no {what}; set it to {wanted}.")
