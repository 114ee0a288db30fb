"""Shapes of a batch from its annotations, for plans without data."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

T = TypeVar("T")

_DTYPES: Any = ((Int, jnp.int32), (Bool, jnp.bool_), (Float, jnp.float32))


def shapes_of(cls: type[T], /, **sizes: int) -> T:
    """Builds an instance of `cls` whose arrays are `jax.ShapeDtypeStruct`s: `shapes_of(Batch, B=8, S=128, T=32)`.

    `cls` is a dataclass of arrays with shape annotations, or of such dataclasses; `sizes` are those of the letters in
    them. An optional field is None if one of its letters has no size.

    Raises:
      ValueError: a letter has no size, or a field has no shape annotation; the message names it.
    """
    made = {}
    for name, hint in typing.get_type_hints(cls).items():
        if name not in {field.name for field in dataclasses.fields(cls)}:  # type: ignore[arg-type]
            continue
        made[name] = _shape(hint, sizes, f"{cls.__name__}.{name}")
    return cls(**made)


def _shape(hint: Any, sizes: dict[str, int], where: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        letters = [letter for option in options for letter in getattr(option, "dim_str", "").split()]
        missing = any(not letter.isdigit() and letter not in sizes for letter in letters)
        return None if missing and len(options) < len(typing.get_args(hint)) else _shape(options[0], sizes, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return shapes_of(hint, **sizes)
    annotation: str | None = getattr(hint, "dim_str", None)
    if annotation is None:
        raise ValueError(f"{where} has no shape annotation; write one, such as Int[Array, 'B S'].")
    letters = annotation.split()
    if missing := [letter for letter in letters if not letter.isdigit() and letter not in sizes]:
        raise ValueError(f"{where} is [{annotation}], but {missing[0]} has no size; give {missing[0]}=.")
    shape = tuple(int(letter) if letter.isdigit() else sizes[letter] for letter in letters)
    dtypes = getattr(hint, "dtypes", None)
    return jax.ShapeDtypeStruct(shape, next(dtype for kind, dtype in _DTYPES if kind.dtypes == dtypes))
