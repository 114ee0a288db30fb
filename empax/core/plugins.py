"""Users' code, found by name: "module:name"."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from empax.core.config import ConfigError


def load_named(name: str, where: str) -> Any:
    """Imports the object "module:name"; returns None if the module does not define the name.

    Messages name `where`, the setting that gives the name ("config.system").

    Raises:
      ConfigError: the module does not exist or cannot be imported.
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
    """Imports the function "module:name"; any callable object will do.

    Raises:
      ConfigError: the function does not exist, or its module cannot be imported.
    """
    found = load_named(name, where)
    if not callable(found):
        module, _, attribute = name.partition(":")
        raise ConfigError(f"{where} = {name!r}: {module} has no function {attribute!r}.")
    return found


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turns an error in a user's code into a ConfigError that says where it was raised."""
    try:
        yield
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # a user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})."
        ) from error
