r"""Low-rank adapters for any model here, and eight-bit frozen weights. Only products, not layers, depend on either.

A weight W [*inputs, *outputs] (of one layer) becomes

.. math:: W + (alpha / r) A B, \quad A [*inputs, r], B [r, *outputs]

with W frozen. Source: Hu et al. 2022, Sec. 4.1; there the product is written B A, on the transpose.

Adapters are a separate tree, the only one that is trained. `adapt` puts them into a model's parameters as boxes. Flax
opens a box when a layer reads the parameter, inside the scan over layers. Products with W and with A B are computed
separately (`arithmetic.contract`), so training never forms the sum or a gradient of W. Eight-bit weights are converted
to floats one layer at a time; in the backward pass only with `remat`, since otherwise the floats of the forward pass
are kept.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from empax.core.config import ConfigError, check_numbers, check_pattern, check_types, some_names
from empax.core.tree import map_named, named_leaves, path_name
from empax.core.types import Params
from empax.models.arithmetic import LowRankSum, dropout
from empax.models.layers import logical_axes

MAX_RANK = 1 << 14
"""The smaller dimension of the largest weights of Llama 3.1 405B: adapters of this rank can be any matrix."""
_LARGEST = 127  # largest int8, symmetric


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """The weights that get adapters, and the adapters' size.

    Attributes:
      pattern: regular expression, searched for in parameter names ("encoder/layers/attention/query"); matches that are
        not weights of a matrix product (biases, norms, embeddings) get no adapter. The default is all linear layers;
        queries and values alone do not reach the quality of training all weights (Dettmers et al. 2023, Sec. 4).
      rank: r, from 1 to `MAX_RANK`.
      alpha: the adapted weight is W + alpha / r * A B.
      dropout: share of a weight's inputs that its adapter does not see in a step, in [0, 1); there is no dropout in
        reinforcement learning.
      int8: keep the frozen weights of matrix products in eight bits (QLoRA's idea, Dettmers et al. 2023, with plain
        symmetric integers).
    """

    pattern: str = r"attention/(query|key|value|out)$|feed_forward/"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    int8: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_numbers(self, "rank", least=1, most=MAX_RANK)
        check_numbers(self, "alpha", above=0)
        check_numbers(self, "dropout", least=0, below=1)
        check_pattern("pattern", self.pattern)

    @property
    def factor(self) -> float:
        return self.alpha / self.rank


class _Box(meta.AxisMetadata):
    """A parameter that is computed when it is read. Scans slice its arrays along their first axis."""

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: Any) -> Any:
        del index, params
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        del index, params
        return self


@flax.struct.dataclass
class Int8(_Box):
    """A weight in eight bits with one scale per output, W = values * scale.

    The fields are arrays, annotated Any since JAX also builds pytrees of shardings and placeholders.
    """

    values: Any  # int8, the weight's shape
    scale: Any  # float32, the weight's shape with 1 in place of every input axis

    def unbox(self) -> Float[Array, "..."]:
        return self.values.astype(jnp.float32) * self.scale


@flax.struct.dataclass
class LowRank(_Box):
    """A frozen weight, an array or an Int8, with its adapter."""

    base: Any
    a: Any  # [*inputs, r], with a layers axis in front if the weight has one
    b: Any  # [r, *outputs], likewise
    factor: float = flax.struct.field(pytree_node=False)

    def unbox(self) -> LowRankSum:
        return LowRankSum(_open(self.base), self.a, self.b, self.factor)

    def summed(self) -> Float[Array, "..."]:
        """Returns the sum as one matrix, in the weight's type."""
        base = _open(self.base)
        # The product is small; in full precision, since tensor cores would round it.
        product = jnp.tensordot(self.a, self.b, axes=1, precision=jax.lax.Precision.HIGHEST)
        return (base.astype(product.dtype) + self.factor * product).astype(base.dtype)


class _Axes(NamedTuple):
    """Layout of a weight's axes: whether layers are stacked, and the number of input axes."""

    stacked: bool
    inputs: int


def _axes(name: str, shape: tuple[int, ...]) -> _Axes | None:
    """Returns the layout of a weight of a matrix product, None for any other parameter."""
    axes = logical_axes(name, shape)
    stacked = axes[:1] == ("layers",)
    axes = axes[1:] if stacked else axes
    if len(axes) < 2 or None in axes or "vocab" in axes or name.endswith("_bias"):  # a bias of heads has two axes
        return None
    # [heads, head_dim, embed] is the only kind with two input axes.
    return _Axes(stacked, 2 if len(axes) == 3 and axes[0] != "embed" else 1)


def init_adapters(rng: jax.Array, base: Params, settings: LoraSettings) -> Params:
    """Initializes adapters for `base`, parameters or their shapes; with B zero, they do not change the model.

    A is normal with variance 1 / inputs.

    Returns:
      A tree like `base`, of adapted weights alone, with {"a", "b"} in place of each.

    Raises:
      ConfigError: if the pattern matches no weight of a matrix product, or the rank is too high for all matches.
    """
    found = {
        name: (leaf.shape, axes)
        for name, leaf in named_leaves(base).items()
        if re.search(settings.pattern, name) and (axes := _axes(name, leaf.shape)) is not None
    }
    if not found:
        names = [name for name, leaf in named_leaves(base).items() if _axes(name, leaf.shape)]
        raise ConfigError(
            f"pattern = {settings.pattern!r} matches the name of no weight that LoRA can adapt; they are "
            f"{some_names(names)}."
        )
    parts: list[tuple[tuple[int, ...], ...]] = []
    for shape, axes in found.values():
        layers, shape = (shape[:1], shape[1:]) if axes.stacked else ((), shape)
        parts.append((layers, shape[: axes.inputs], shape[axes.inputs :]))
    most = max(min(math.prod(inputs), math.prod(outputs)) for _, inputs, outputs in parts)
    if settings.rank > most:
        raise ConfigError(
            f"rank = {settings.rank} is more than {most}, the smaller side of the largest weight that pattern = "
            f"{settings.pattern!r} matches; no adapter needs more: choose a lower one."
        )
    # Each adapter has its own key; adapters of one shape are drawn together, since every draw takes time to compile.
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, (layers, inputs, _) in enumerate(parts):
        alike.setdefault((*layers, *inputs, settings.rank), []).append(number)
    normal: dict[int, jax.Array] = {}
    for shape, numbers in alike.items():
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.array(numbers))
        normal.update(zip(numbers, jax.vmap(lambda key, shape=shape: jax.random.normal(key, shape))(keys), strict=True))
    adapters: dict[str, Params] = {}
    for number, (name, (layers, inputs, outputs)) in enumerate(zip(found, parts, strict=True)):
        a, b = normal[number] * math.prod(inputs) ** -0.5, jnp.zeros((*layers, settings.rank, *outputs))
        adapters[name] = {"a": a, "b": b}
    return unflatten_dict(adapters, sep="/")


def adapt(base: Params, adapters: Params, settings: LoraSettings, rng: jax.Array | None = None) -> Params:
    """Returns `base` with the adapters in it, the parameters for `model.apply`.

    Departure: dropout removes inputs of an adapter for a whole step, one draw per layer, where Hu et al. draw for each
    token; so each adapted weight stays one matrix. Without an `rng` there is no dropout.

    `base` is plain or from `quantize` and `lower`; no gradient flows to an adapted weight.

    Raises:
      ConfigError: if the adapters are for another model.
    """
    pairs: dict[str, dict[str, Any]] = {}
    for name, leaf in named_leaves(adapters).items():
        owner, _, part = name.rpartition("/")
        pairs.setdefault(owner, {})[part] = leaf
    leaves, structure = jax.tree_util.tree_flatten_with_path(base, is_leaf=_is_box)
    names = [path_name(path) for path, _ in leaves]
    if missing := sorted(set(pairs) - set(names)):
        raise ConfigError(f"there are adapters for {', '.join(missing)}, which the model does not have.")
    numbers = {name: number for number, name in enumerate(pairs)}

    def put(name: str, leaf: Any) -> Any:
        if name not in pairs:
            return leaf
        a, b = pairs[name]["a"], pairs[name]["b"]
        if rng is not None and settings.dropout:
            kept = dropout(
                jnp.ones((*a.shape[:-1], 1), a.dtype), settings.dropout, jax.random.fold_in(rng, numbers[name])
            )
            a = a * kept
        return LowRank(leaf, a, b, settings.factor)

    return jax.tree.unflatten(structure, [put(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)])


def stacked(
    first: Params, second: Params, settings: LoraSettings, other: LoraSettings, base: Params
) -> tuple[Params, LoraSettings]:
    r"""Combines two sets of adapters into one, and returns it with its settings.

    .. math:: f_1 A_1 B_1 + f_2 A_2 B_2 = [f_1 A_1, f_2 A_2] [B_1; B_2], \quad f_i = \alpha_i / r_i

    Args:
      first: adapters; a weight that only one set adapts has zeros in the other.
      second: adapters trained on the sum of `base` and `first`.
      settings: settings of `first`.
      other: settings of `second`; the result has their pattern and dropout.
      base: parameters of the model, or their shapes.
    """
    adapters: dict[str, Any] = {}
    flat: list[dict[str, Any]] = [flatten_dict(tree, sep="/") for tree in (first, second)]
    for name in dict.fromkeys(key.rpartition("/")[0] for tree in flat for key in tree):
        shape = named_leaves(base)[name].shape
        axes = _axes(name, shape)
        assert axes is not None  # it is adapted
        inward, outward, start = [], [], int(axes.stacked)
        for tree, own in zip(flat, (settings, other), strict=True):
            end = start + axes.inputs
            blank = (*shape[:end], own.rank), (*shape[:start], own.rank, *shape[end:])
            inward.append(own.factor * tree.get(f"{name}/a", jnp.zeros(blank[0])))
            outward.append(tree.get(f"{name}/b", jnp.zeros(blank[1])))
        adapters[name] = {"a": jnp.concatenate(inward, axis=-1), "b": jnp.concatenate(outward, axis=start)}
    rank = settings.rank + other.rank
    return unflatten_dict(adapters, sep="/"), dataclasses.replace(other, rank=rank, alpha=float(rank))


def merge(base: Params, adapters: Params, settings: LoraSettings) -> Params:
    """Returns plain parameters: W + alpha / r * A B for every adapted weight, and floats for eight-bit weights."""
    adapted = adapt(base, adapters, settings)
    named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(adapted, is_leaf=_is_box)}
    merged: dict[str, Any] = {}
    for name, leaf in named.items():
        if isinstance(leaf, LowRank):
            base = leaf.base.values if isinstance(leaf.base, Int8) else leaf.base
            stacked = leaf.a.ndim + leaf.b.ndim - 2 > base.ndim
            leaf = jax.vmap(LowRank.summed)(leaf) if stacked else leaf.summed()
        merged[name] = _open(leaf)
    return unflatten_dict(merged, sep="/")


def quantize(base: Params) -> Params:
    """Quantizes every weight of a matrix product to eight bits, to nearest; other parameters are unchanged.

    The largest weight of each output becomes ±127, so no weight is off by more than 1/254 of it.
    """

    def put(name: str, leaf: Any) -> Any:
        axes = _axes(name, leaf.shape)
        if axes is None:
            return leaf
        first = int(axes.stacked)
        over = tuple(range(first, first + axes.inputs))
        scale = jnp.max(jnp.abs(leaf), axis=over, keepdims=True).astype(jnp.float32) / _LARGEST
        scale = jnp.where(scale == 0.0, 1.0, scale)  # an output with only zeros
        return Int8(jnp.round(leaf / scale).astype(jnp.int8), scale)

    return map_named(put, base)


def lower(params: Params, dtype: DTypeLike) -> Params:
    """Converts frozen `params` to `dtype`, where the model would round them to it anyway.

    This covers the weights of matrix products and the embeddings, but not norms, biases and parameters that are summed
    in float32 first, such as tokens and positions. So the model gives the same numbers with half of the memory, and
    does not round its weights again in every layer of every step.

    Args:
      params: parameters of a pretrained model, plain or from `quantize`; eight-bit weights are unchanged.
      dtype: type of the computation; float32 changes nothing.
    """
    dtype = jnp.dtype(dtype)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_box)
    # BART and related models, recognized by their output bias, sum tokens with positions even if these are sinusoidal.
    if any(path_name(path).endswith(("position_embedding", "output_bias")) for path, _ in leaves):
        embeddings = r"(^|/)output_embedding$"
    else:
        embeddings = r"(^|/)(token|output)_embedding$"

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path_name(path)
        if _is_box(leaf) or (_axes(name, leaf.shape) is None and not re.search(embeddings, name)):
            return leaf
        return leaf.astype(dtype)

    return params if dtype == jnp.float32 else jax.tree_util.tree_map_with_path(put, params, is_leaf=_is_box)


def _open(leaf: Any) -> Any:
    return leaf.unbox() if _is_box(leaf) else leaf


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, _Box)
