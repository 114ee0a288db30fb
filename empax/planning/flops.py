"""How many floating-point operations a function takes, counted from its jaxpr: nothing is compiled or allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import partial_eval


def count_flops(function: Callable[..., Any], *args: Any, while_turns: int = 1) -> int:
    """Multiply-adds of all matrix products that the result needs, times two; loops count as often as they run.

    Args:
      function: jax-traceable.
      args: arrays or `jax.ShapeDtypeStruct`s.
      while_turns: how often a `while` runs, whose length no program says.

    Returns:
      Operations of matrix products alone, which is what a model's FLOPs mean.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    # A gradient's rules also write down what nobody asked for, such as products with a cotangent that is dropped.
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _count(needed, while_turns)


def _count(jaxpr: Any, while_turns: int) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
            continue
        inner = [_count(part, while_turns) for part in _bodies(equation)]
        if equation.primitive.name == "scan":
            total += equation.params["length"] * sum(inner)
        elif equation.primitive.name == "while":
            total += while_turns * sum(inner)
        elif equation.primitive.name == "cond":
            total += max(inner, default=0)
        else:
            total += sum(inner)
    return total


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _bodies(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, jex.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jex.Jaxpr):
                yield part
