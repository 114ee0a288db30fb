"""Reward functions of users: found by name, called, and held to what they must return."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.plugins import blamed, load_named
from empax.core.types import Instance
from empax.systems.emprl.rollouts import Rollout
from empax.systems.emprl.settings import RewardSettings

LARGEST_SCORE = 1e15
"""Of a response: the square of a larger one leaves float32 when scores are standardised."""


def load_function(name: str) -> Callable[..., Any]:
    """The function that "module:name" names.

    Raises:
      ConfigError: there is none, or its module cannot be imported.
    """
    found = load_named(name, "function")
    if not callable(found):
        module, _, attribute = name.partition(":")
        raise ConfigError(f"function = {name!r}: {module} has no function {attribute!r}.")
    return found


def call_text_function(
    function: Callable[..., Any], name: str, instances: Sequence[Instance], responses: Sequence[str]
) -> Float[np.ndarray, " N"]:
    """The scores of `responses` to the contexts of `instances`.

    As TRL does it, the function is given the fields of the rows that it names as keyword arguments, or all of them if
    it takes any: `id`, `emotion` and the notes, lists of as many; None where a row has no such note.

    Raises:
      ConfigError: the function raised something, wants a field that no row has, or did not return one finite number for
        each.
    """
    named, takes_any = _wanted_fields(function)
    fields = row_fields(instances) if named or takes_any else {}
    if missing := [field for field in named if named[field] and field not in fields]:
        raise ConfigError(
            f"the reward {name} wants {', '.join(missing)}; the fields of its rows are {', '.join(sorted(fields))}."
        )
    given = fields if takes_any else {field: fields[field] for field in named if field in fields}
    with blamed(f"the reward {name}"):
        found = function([i.context for i in instances], list(responses), [i.response for i in instances], **given)
    return checked_scores(found, name, len(instances))


def row_fields(instances: Sequence[Instance]) -> dict[str, list[Any]]:
    """The fields of rows, as lists: `id`, `emotion` and every note that one of them has."""
    notes = dict.fromkeys(key for instance in instances for key in instance.notes if key.isidentifier())
    fields: dict[str, list[Any]] = {key: [instance.notes.get(key) for instance in instances] for key in notes}
    return {**fields, "id": [i.id for i in instances], "emotion": [i.emotion for i in instances]}


def _wanted_fields(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """The fields that a text function names, whether it must have each, and whether it takes all others too."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function in C
        return {}, False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [p for p in parameters if p.kind in positional][:3]
    named = [p for p in parameters if p not in first and p.kind in (positional[1], inspect.Parameter.KEYWORD_ONLY)]
    takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {p.name: p.default is inspect.Parameter.empty for p in named}, takes_any


def checked_scores(found: Any, name: str, count: int) -> Float[np.ndarray, " N"]:
    """What a reward function returned, as float32; True counts 1.

    Raises:
      ConfigError: it is not one finite number for each of `count` responses.
    """
    if not isinstance(found, (list, tuple)) and not hasattr(found, "__array__"):
        problem = f"a {type(found).__name__}"
    elif not hasattr(found, "__array__") and (other := [x for x in found if not _is_number(x)]):
        problem = f"a {type(found).__name__} with {other[0]!r} in it"
    else:
        scores = np.asarray(found)
        if scores.dtype.kind not in "biuf":
            problem = f"an array of {scores.dtype}"
        elif scores.shape != (count,):
            problem = f"numbers of shape {scores.shape}"
        elif not (np.abs(scores.astype(np.float64)) <= LARGEST_SCORE).all():
            wrong = scores[~(np.abs(scores.astype(np.float64)) <= LARGEST_SCORE)]
            problem = f"{float(wrong[0])}"
        else:
            return scores.astype(np.float32)
    raise ConfigError(
        f"the reward {name} returned {problem} for {count} responses; it must return a list or an array of {count} "
        f"numbers, one for each, between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}."
    )


def _is_number(value: Any) -> bool:
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "__float__")
    return isinstance(value, (numbers.Real, np.bool_)) or is_scalar


def try_functions(settings: Sequence[RewardSettings], instances: Sequence[Instance], rollout: Rollout) -> None:
    """Finds the functions that `settings` name, and calls each on a few rows.

    Args:
      settings: of all rewards; those without a function are passed over.
      instances: what a text function is called with; their responses are rated.
      rollout: the shapes of as many answers, with which a compiled function is traced.

    Raises:
      ConfigError: a function is not there, fails, or returns something else than one number for each row.
    """
    for part in settings:
        if not part.function:
            continue
        function = load_function(part.function)
        if part.kind == "text":
            needed = [field for field, needs in _wanted_fields(function)[0].items() if needs]
            # It may be costly; and notes that it must have are not there before the run.
            if distributed.is_writer() and (not needed or set(needed) <= set(row_fields(instances))):
                call_text_function(function, part.function, instances, [i.response for i in instances])
            continue
        args = (getattr(function, "params"), rollout) if hasattr(function, "params") else (rollout,)  # noqa: B009
        with blamed(f"the reward {part.function}"):
            found = jax.eval_shape(function, *args)
        shape, kind = getattr(found, "shape", None), getattr(found, "dtype", None)
        if shape != (len(instances),) or kind is None or not _is_real(kind):
            raise ConfigError(
                f"the reward {part.function} returns {found} for {len(instances)} rows; it must return an array of "
                f"shape ({len(instances)},) of numbers."
            )


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
