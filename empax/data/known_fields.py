"""Fields of foreign files: each that is read here is on a list, and none that is not is dropped without a word."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError

log = logging.getLogger("empax")


def refuse_unknown(said: Mapping[str, Any], known: Collection[str], file: Path) -> None:
    """Raises ConfigError for fields that could change what is computed, since nobody here knows them."""
    if unknown := unknown_fields(said, known):
        raise ConfigError(
            f"{file} says {shown(said, unknown)}, which is not known here and could change what the model computes; "
            "take it out if it does not."
        )


def warn_of_unknown(said: Mapping[str, Any], known: Collection[str], file: Path, why: str) -> None:
    """Names, once for each file, fields that are left out; `why` they cannot change what is computed."""
    if unknown := unknown_fields(said, known):
        warn_once(f"{file} says {shown(said, unknown)}, which is not known here and is left out: {why}.")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time that it is given."""
    log.warning("%s", message)


def unknown_fields(said: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Names of the fields that are not `known` and say something: null and what is empty say nothing."""
    return sorted(name for name, value in said.items() if name not in known and value not in (None, [], {}))


def shown(said: Mapping[str, Any], names: Collection[str]) -> str:
    """The named fields with their values, shortened."""
    return ", ".join(f"{name} = {short(said[name])}" for name in names)


def short(value: Any) -> str:
    """A value in at most 43 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
