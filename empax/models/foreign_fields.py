"""Fields of a Hugging Face `config.json`: required fields, defaults, and supported values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from empax.core.config import ConfigError

T = TypeVar("T")

COMMON = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
}
"""Names of the fields that most families have, by ours."""


def preset(name: str, title: str, known: Mapping[str, T]) -> T:
    """Looks up a preset of the models called `title`; the part of a Hub name before "/" is ignored."""
    short = name.rsplit("/", maxsplit=1)[-1]
    if short not in known:
        raise ConfigError(f"{name!r} is not a {title} preset; it is one of {', '.join(known)}.")
    return known[short]


def one(model: str) -> str:
    """Returns the model's name after its article."""
    return f"an {model}" if model[0] in "AEIO" or model.startswith("mB") else f"a {model}"


def required(fields: Mapping[str, Any], names: Mapping[str, str], model: str) -> dict[str, Any]:
    """Returns fields by our names, which `names` maps to theirs; raises ConfigError if one is absent or null."""
    if missing := [theirs for theirs in names.values() if fields.get(theirs) is None]:
        raise ConfigError(f"{one(model)} lacks {', '.join(missing)}.")
    return {ours: fields[theirs] for ours, theirs in names.items()}


def field_or(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns a field, or Hugging Face's default if it is absent or null."""
    value = fields.get(name)
    return default if value is None else value


def only(fields: Mapping[str, Any], allowed: Mapping[str, Any], model: str) -> None:
    """Raises ConfigError if a field differs from its only supported value; absent and null pass."""
    for name, value in allowed.items():
        if field_or(fields, name, value) != value:
            raise ConfigError(f"{name} = {fields[name]!r} of {one(model)} is not supported here; it must be {value!r}.")


def head_size(fields: Mapping[str, Any], size: str, heads: str, model: str) -> int:
    """Returns the width of an attention head, `size` / `heads`; raises ConfigError if that is no whole number."""
    if fields[size] % fields[heads]:
        raise ConfigError(f"{size} = {fields[size]} must be a multiple of {heads} = {fields[heads]} in {one(model)}.")
    return fields[size] // fields[heads]


def one_of(known: Mapping[str, str], value: str, what: str) -> str:
    """Returns `known[value]`; for an unknown value, raises ConfigError, which calls the field `what`."""
    if value not in known:
        raise ConfigError(f"{what} = {value!r} is not supported here; it is one of {', '.join(known)}.")
    return known[value]
