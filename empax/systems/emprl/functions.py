"""Reward functions of users: called, and held to what they must return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.plugins import blamed, load_function
from empax.core.text_functions import call_on_texts, can_be_tried, needed_fields, row_fields
from empax.core.types import Instance
from empax.systems.emprl.rollouts import Rollout
from empax.systems.emprl.settings import RewardSettings


def call_text_function(
    function: Callable[..., Any],
    name: str,
    instances: Sequence[Instance],
    responses: Sequence[str],
    known: Iterable[str] = (),
) -> Float[np.ndarray, " N"]:
    """The scores of `responses` to the contexts of `instances`, as float32; see `call_on_texts`.

    Raises:
      ConfigError: the function raised something, wants a field that no row has, or did not return one finite number for
        each.
    """
    contexts, references = [i.context for i in instances], [i.response for i in instances]
    found = call_on_texts(function, f"the reward {name}", contexts, responses, references, instances, known)
    return found.astype(np.float32)


def try_functions(
    settings: Sequence[RewardSettings],
    rows: Callable[[Iterable[str]], Sequence[Instance]],
    rollout: Rollout,
    later: Sequence[str] = (),
) -> None:
    """Finds the functions that `settings` name, and calls each on a few rows.

    Args:
      settings: of all rewards; those without a function are passed over.
      rows: gives what a text function is called with, rows that have the fields of given names if there are any; their
        responses are rated.
      rollout: the shapes of as many answers, with which a compiled function is traced.
      later: notes that stages are going to add to the rows.

    Raises:
      ConfigError: a function is not there, wants a field that no row is going to have, fails, or returns something else
        than one number for each row.
    """
    for part in settings:
        if not part.function:
            continue
        function = load_function(part.function)
        if part.kind == "text":
            needed = needed_fields(function)
            instances = rows(needed - set(later))
            fields = {*row_fields(instances), *later}
            if missing := sorted(needed - fields):
                raise ConfigError(
                    f"the reward {part.function} wants {', '.join(missing)}; the fields of its rows are going to be "
                    f"{', '.join(sorted(fields))}. A field of your own is one of the lines of your corpus "
                    '(config.data.name = "jsonl").'
                )
            # It may be costly; and what stages add is not there before the run.
            if distributed.is_writer() and can_be_tried(function, instances):
                call_text_function(function, part.function, instances, [i.response for i in instances])
            continue
        args = (getattr(function, "params"), rollout) if hasattr(function, "params") else (rollout,)  # noqa: B009
        with blamed(f"the reward {part.function}"):
            found = jax.eval_shape(function, *args)
        shape, kind = getattr(found, "shape", None), getattr(found, "dtype", None)
        count = jax.tree.leaves(rollout)[0].shape[0]
        if shape != (count,) or kind is None or not _is_real(kind):
            raise ConfigError(
                f"the reward {part.function} returns {found} for {count} rows; it must return an array of shape "
                f"({count},) of numbers."
            )


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
