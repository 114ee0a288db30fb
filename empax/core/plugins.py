"""Code of users, found by name: "module:name"."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from empax.core.config import ConfigError


def load_named(name: str, where: str) -> Any:
    """What "module:name" names; None if the module has nothing of that name.

    Args:
      name: the module must be importable.
      where: the setting that says so, for messages ("config.system").

    Raises:
      ConfigError: its module is not there or cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(
            f"{where} = {name!r} is not 'module:name'; write no path and no '.py', and put the folder of the module "
            "on PYTHONPATH."
        )
    try:
        with blamed(f"{where} = {name!r}: the import"):
            found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where} = {name!r}: there is no module {error.name!r}; put its folder on PYTHONPATH."
        ) from error
    return getattr(found, attribute, None)


def load_function(name: str, where: str = "function") -> Callable[..., Any]:
    """The function that "module:name" names; a callable object is one.

    Raises:
      ConfigError: there is none, or its module cannot be imported.
    """
    found = load_named(name, where)
    if not callable(found):
        module, _, attribute = name.partition(":")
        raise ConfigError(f"{where} = {name!r}: {module} has no function {attribute!r}.")
    return found


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turns an error in somebody else's code into a ConfigError that says where it was raised."""
    try:
        yield
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # nobody knows what a stranger's code raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})."
        ) from error
