"""Paths from users: expands `~`, and checks that a folder is writable before any work."""

from __future__ import annotations

import os
from pathlib import Path

from empax.core.config import ConfigError


def expand(path: str | os.PathLike[str]) -> Path:
    """Replaces `~` and `~NAME` in a path by the home folder; every path from a user passes through here.

    Raises:
      ConfigError: the value is not a path, or the user does not exist.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise ConfigError(f"{path!r} is not a path.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{os.fspath(path)!r} begins with the home folder of an unknown user; write the path out."
        ) from error


def given_folder(path: object, name: str) -> Path:
    """Returns the output folder that a caller gives as the argument `name`; it need not exist yet.

    Raises:
      ConfigError: the value is not a path or is empty, or files cannot be written there.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{name} = {path!r} must be the path of a folder.")
    folder = expand(path)
    check_folder(folder, name)
    return folder


def report_folder(path: object, name: str) -> Path:
    """As `given_folder`, for a report; raises ConfigError also for a run's work directory, which has one of its own."""
    folder = given_folder(path, name)
    if (folder / "run.json").is_file():
        raise ConfigError(f"{name}={folder} holds a run, whose own report would be lost; name another folder.")
    return folder


def check_folder(folder: Path, flag: str) -> None:
    """Raises ConfigError if files cannot be written into `folder`, which need not exist yet.

    `flag` is the user's name for it, such as `--output`.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{flag}={folder} is not a folder; name a folder, or a new path.")
    place = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not place.is_dir():
        raise ConfigError(f"{flag}={folder}: {place} is not a folder, so nothing can be written in it.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}={folder}: {place} is not writable; choose another folder or change its rights.")
