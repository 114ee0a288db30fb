"""Converts a ConfigDict to frozen dataclasses, with errors that state the problem, its place and the fix."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

S = TypeVar("S")


class UserError(Exception):
    """An error that the user can correct. Commands print its message in one line, without a traceback."""


class ConfigError(UserError, ValueError):
    """A wrong setting: the message names the value found, the values allowed and where to change it."""


LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e30  # squares of larger numbers overflow float32
_NAMES_SHOWN = 8


def check_types(settings: Any) -> None:
    """Raises ConfigError for the first field of a dataclass whose value does not match its annotation."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        _convert(getattr(settings, field.name), hints[field.name], field.name)


def check_numbers(
    settings: Any,
    *names: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> None:
    """Raises ConfigError unless each named field of `settings` lies in a range; None passes, NaN never does.

    `least` and `most` are in the range, `above` and `below` are not. A side without a bound ends at LARGEST_INT for an
    int, at LARGEST_FLOAT for a float. The message ends with `hint`.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        largest = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
        low = above if above is not None else -largest if least is None else least
        high = below if below is not None else largest if most is None else most
        fits_low = value >= low if above is None else value > low
        if fits_low and (value <= high if below is None else value < high):
            continue
        if (least, above) != (None, None) != (most, below):
            wanted = f"lie in {'[' if above is None else '('}{low}, {high}{']' if below is None else ')'}"
        elif fits_low:
            wanted = f"be {'at most' if below is None else 'below'} {high}"
        else:
            wanted = f"be {'at least' if above is None else 'above'} {low}"
        raise ConfigError(f"{name} = {value!r} must {wanted}{hint and '; '}{hint}.")


def check_pattern(name: str, pattern: str) -> None:
    """Raises ConfigError unless the setting `name` is a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{name} = {pattern!r} is not a regular expression: {error}.") from error


def some_names(names: Sequence[str]) -> str:
    """Joins the first names, for a message."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")


def check_keys(values: Mapping[str, Any], allowed: typing.Iterable[str], *, where: str, owner: str) -> None:
    """Raises ConfigError for the first key of `values` that is not in `allowed`; names the closest match."""
    allowed = sorted(allowed)
    for name in values:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"{where}.{name} is not a setting of {owner}{hint} It takes: {', '.join(allowed)}.")


def to_settings(cls: type[S], values: Mapping[str, Any], *, where: str) -> S:
    """Builds the frozen dataclass `cls` from a section of a ConfigDict or a dict, checking names and types recursively.

    `where` is the path of the section, as on the command line (`config.index`).

    Raises:
      ConfigError: an unknown or missing key, a value of the wrong type, or a value that `__post_init__` rejects.
    """
    if not isinstance(values, Mapping) and not hasattr(values, "to_dict"):
        raise ConfigError(f"{where} = {values!r} must be a section of settings ({cls.__name__}).")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_keys(values, fields, where=where, owner=cls.__name__)
    made = {name: _convert(values[name], hints[name], f"{where}.{name}") for name in values}
    missing = [
        name
        for name, field in fields.items()
        if name not in made and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}, which {cls.__name__} needs; set it in the config file.")
    try:
        return cls(**made)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, where)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where} = {value!r} is not allowed; it takes one of {', '.join(map(repr, args))}.")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else to_settings(hint, value, where=where)
    if origin is tuple:
        return _convert_tuple(value, args, where)
    if origin in (dict, Mapping):
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r} must map names to values.")
        return {key: _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    return _convert_plain(value, hint, where)


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in (option for option in options if option is not type(None)):
        try:
            return _convert(value, option, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else ConfigError(" Or: ".join(map(str, errors)))


def _convert_tuple(value: Any, args: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} = {value!r} must be a list, like {[value]!r}.")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
    if len(args) != len(value):
        raise ConfigError(f"{where} = {value!r} must have {len(args)} entries.")
    return tuple(_convert(item, arg, f"{where}[{i}]") for i, (item, arg) in enumerate(zip(value, args, strict=True)))


def _convert_plain(value: Any, hint: Any, where: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint in (int, float, str, bool) and type(value) is not hint:
        raise ConfigError(f"{where} = {value!r} is of type {type(value).__name__}; it must be {hint.__name__}.")
    return value


def split_keys(values: Mapping[str, Any], first: type, second: type, *, where: str) -> list[dict[str, Any]]:
    """Splits the keys of one section between two dataclasses; raises ConfigError for a key that none or both have."""
    names = [{field.name for field in dataclasses.fields(group)} for group in (first, second)]
    owner = f"{first.__name__} + {second.__name__}"
    if both := names[0] & names[1]:
        raise ConfigError(f"{where}: {owner} both have {min(both)!r}; rename one of them.")
    check_keys(values, set().union(*names), where=where, owner=owner)
    return [{key: values[key] for key in values if key in group} for group in names]
