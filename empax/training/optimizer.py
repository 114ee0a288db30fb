"""AdamW or Adafactor with a schedule, and parameter groups with their own learning rate or frozen."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError, check_numbers, check_pattern, some_names
from empax.core.protocols import ReinforcedTask, Task
from empax.core.tree import map_named, named_leaves
from empax.core.types import Params

Schedule: TypeAlias = Literal["constant", "linear", "cosine", "rsqrt"]

_FACTORED_FROM = 128
"""For Adafactor: a parameter whose second largest axis is shorter keeps its full second moment."""


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Parameters whose name ("encoder/layers/attention/query") matches `pattern`.

    Attributes:
      pattern: regular expression, searched for anywhere in the name; with adapters, also in the name without its first
        part, "trained/" or "adapters/", so that groups of a run without adapters apply.
      learning_rate_scale: factor on the learning rate.
      frozen: whether the parameters are frozen, without optimizer state.
      schedule: learning rate schedule of this group; None = that of the other parameters.
      warmup_steps: warm-up of this group; None = that of the other parameters.
    """

    pattern: str
    learning_rate_scale: float = 1.0
    frozen: bool = False
    schedule: Schedule | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        check_pattern("pattern", self.pattern)
        check_numbers(self, "learning_rate_scale", "warmup_steps", least=0)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov & Hutter 2019) or Adafactor on gradients clipped by their global norm.

    Attributes:
      method: "adamw", or "adafactor", which stores row and column means instead of the full second moment and no first
        moment (Shazeer & Stern 2018, Algorithms 4 and 5): it takes a hundredth of the memory, and learning rates such
        as 1e-3. Departure: the layers of a stack are one parameter for clipping and scaling of updates.
      learning_rate: peak learning rate.
      warmup_steps: steps of linear warm-up to the peak.
      schedule: schedule after the warm-up: "constant"; "linear" or "cosine" decay, which reaches 0 one step after the
        last; "rsqrt", decay with 1 / sqrt(step) (Vaswani et al. 2017, Sec. 5.3).
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      no_decay_pattern: names of parameters without weight decay: biases and normalisation scales.
      b1: for "adamw": decay of the first moment, in [0, 1).
      b2: for "adamw": decay of the second moment, in [0, 1).
      eps: for "adamw": added to the root of the second moment, at least 1e-30.
      scale_parameter: for "adafactor": whether updates scale with the root mean square of the parameter, at least 1e-3.
        A parameter that starts at 0 then hardly moves at usual rates: set it to False with adapters (`lora`).
      clip_norm: maximum global norm of a gradient, above 0; None = unlimited.
      ema_decay: decay of a running mean of the parameters, in [0, 1), which is evaluated and kept as the best instead
        of the last update's (Polyak & Juditsky 1992); 0 = none. It takes as much memory as the trained parameters.
      groups: parameter groups; the first group whose pattern matches a name applies.
    """

    method: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    weight_decay: float = 0.0
    no_decay_pattern: str = r"(^|[/_])(bias|scale)$|norm"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    scale_parameter: bool = True
    clip_norm: float | None = 1.0
    ema_decay: float = 0.0
    groups: tuple[ParamGroup, ...] = ()

    def __post_init__(self) -> None:
        check_pattern("no_decay_pattern", self.no_decay_pattern)
        check_numbers(self, "learning_rate", "weight_decay", "warmup_steps", least=0)
        check_numbers(self, "b1", "b2", "ema_decay", least=0, below=1)
        check_numbers(self, "eps", least=1e-30)
        check_numbers(self, "clip_norm", above=0, hint="None switches clipping off")


def learning_rate(
    settings: OptimizerSettings, total_steps: int, group: ParamGroup | None = None
) -> Callable[[Any], Float[Array, ""]]:
    """Returns the learning rate as a function of the update (from 0), for `group` if given.

    The first update of a warm-up has 1 / warmup_steps of the peak learning rate, not 0.
    """
    schedule, warmup, highest = settings.schedule, settings.warmup_steps, settings.learning_rate
    if group is not None:
        schedule = group.schedule or schedule
        warmup = warmup if group.warmup_steps is None else group.warmup_steps
        highest *= 0.0 if group.frozen else group.learning_rate_scale

    def at(step: Any) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        rising = jnp.minimum(1.0, (step + 1.0) / max(warmup, 1))
        passed = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
        if schedule == "linear":
            rising *= 1.0 - passed
        elif schedule == "cosine":
            rising *= 0.5 * (1.0 + jnp.cos(jnp.pi * passed))
        elif schedule == "rsqrt":
            rising *= jnp.sqrt(max(warmup, 1) / jnp.maximum(step + 1.0, max(warmup, 1)))
        return highest * rising

    return at


def trained_mask(settings: OptimizerSettings, params: Params, untrained: str = "") -> Params:
    """Returns a tree of bools like `params`: False where a group or the task freezes the parameter.

    `untrained` is the task's regular expression (`core.protocols.untrained_by`).

    Raises:
      ConfigError: a group's pattern matches no name, or everything is frozen.
    """

    def kept(name: str, label: int) -> bool:
        frozen = label >= 0 and settings.groups[label].frozen
        return not frozen and not (untrained and re.match(untrained, name))

    mask = map_named(kept, _labels(settings, params))
    if not any(jax.tree.leaves(mask)):
        raise ConfigError("optimizer.groups freeze every parameter: nothing is left to train; narrow a pattern.")
    return mask


def first_updates(task: Task, params: Params, updates_per_batch: int) -> dict[str, int]:
    """Returns the updates before each parameter is trained, if the task defines them: `starts` of `make_optimizer`."""
    if not isinstance(task, ReinforcedTask):
        return {}
    return {name: task.learns_from(name) * updates_per_batch for name in named_leaves(params)}


def make_optimizer(
    settings: OptimizerSettings,
    params: Params,
    total_steps: int,
    *,
    starts: Mapping[str, int] | None = None,
    untrained: str = "",
) -> optax.GradientTransformation:
    """Builds the optimizer for `params`.

    Frozen parameters get zero updates, have no state, and count neither for the global norm nor for weight decay.

    Args:
      settings: learning rate, schedule, groups.
      params: arrays or shapes; only names are read.
      total_steps: step at which "linear" and "cosine" reach 0.
      starts: number of updates before the named parameter is trained. Until then it stays unchanged, its moments and
        their bias correction do not start, and it does not count for the global norm. Unnamed parameters are trained
        at once.
      untrained: see `trained_mask`.

    Raises:
      ConfigError: a group's pattern matches no name, or everything is frozen.
    """
    labels = _labels(settings, params)
    mask = trained_mask(settings, params, untrained)
    trained = jax.tree.map(lambda kept: "trained" if kept else "frozen", mask)
    late = {name: start for name, start in (starts or {}).items() if start}
    parts = [_moments(settings, late), _scale_by_learning_rate(settings, labels, total_steps, late)]
    if settings.weight_decay:
        decays = functools.partial(map_named, lambda name, _: re.search(settings.no_decay_pattern, name) is None)
        parts.insert(1, optax.add_decayed_weights(settings.weight_decay, mask=decays))
    if settings.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(settings.clip_norm))
        if late:
            parts.insert(0, _gradients_from(late))
    if settings.ema_decay:
        parts.append(_running_mean(settings.ema_decay))
    return optax.partition({"trained": optax.chain(*parts), "frozen": optax.set_to_zero()}, trained)


class RunningMean(NamedTuple):
    """Sums of parameters and of their weights, both decayed by `ema_decay` with every update."""

    total: Params
    weight: Float[Array, ""]


def averaged(opt_state: optax.OptState, params: Params) -> Params:
    """Returns the running mean of the trained parameters in `opt_state`; `params` if it has none."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, RunningMean))
    found = [state for state in states if isinstance(state, RunningMean)]
    if not found:
        return params
    total, weight = found[0]

    def mean(part: Any, now: Array) -> Array:
        if isinstance(part, optax.MaskedNode):  # frozen
            return now
        return jnp.where(weight > 0, part / jnp.maximum(weight, 1e-12), now).astype(now.dtype)

    return jax.tree.map(mean, total, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def _running_mean(decay: float) -> optax.GradientTransformation:
    """Leaves updates unchanged; it comes last in a chain, to see the new parameters."""

    def init(params: Params) -> RunningMean:
        return RunningMean(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        if params is None:
            raise ValueError("a running mean needs the parameters: optimizer.update(gradients, state, params).")
        after = optax.apply_updates(params, updates)
        total = optax.incremental_update(after, state.total, step_size=1.0 - decay)
        return updates, RunningMean(total, decay * state.weight + (1.0 - decay))

    return optax.GradientTransformation(init, update)


def _moments(settings: OptimizerSettings, late: Mapping[str, int]) -> optax.GradientTransformation:
    if settings.method == "adamw":
        scaled = optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
    else:
        rms = optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=_FACTORED_FROM)
        scaled = optax.chain(rms, optax.clip_by_block_rms(1.0))
        if settings.scale_parameter:
            scaled = optax.chain(scaled, optax.scale_by_param_block_rms())
    if not late:
        return scaled
    parts: dict[Hashable, optax.GradientTransformation] = {start: _begun_late(scaled, start) for start in late.values()}
    parts[0] = scaled
    return optax.partition(parts, lambda params: map_named(lambda name, _: late.get(name, 0), params))


def _gradients_from(late: Mapping[str, int]) -> optax.GradientTransformation:
    """Sets the gradients of parameters that are not trained yet to 0."""

    def init(params: Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        del params

        def kept(name: str, leaf: Array) -> Array:
            return jnp.where(state.count >= late.get(name, 0), leaf, jnp.zeros_like(leaf))

        return map_named(kept, updates), optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformation(init, update)


class Late(NamedTuple):
    """Number of updates so far, and the state of the delayed transformation."""

    updates: Int[Array, ""]
    inner: Any


def _begun_late(inner: optax.GradientTransformation, start: int) -> optax.GradientTransformation:
    """Applies `inner` from update `start` on, counted from 0; before that, updates are 0.

    Like `optax.conditionally_mask`, but without a branch: with one, CPU devices that share parameters reached
    collectives in different orders and deadlocked.
    """

    def init(params: Params) -> Late:
        return Late(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        begun = state.updates >= start
        changed, after = inner.update(updates, state.inner, params)
        changed = jax.tree.map(lambda leaf: jnp.where(begun, leaf, jnp.zeros_like(leaf)), changed)
        after = jax.tree.map(lambda new, old: jnp.where(begun, new, old), after, state.inner)
        return changed, Late(state.updates + 1, after)

    return optax.GradientTransformation(init, update)


def _scale_by_learning_rate(
    settings: OptimizerSettings, labels: Params, steps: int, late: Mapping[str, int]
) -> optax.GradientTransformation:
    """Scales updates by minus the learning rate of each parameter's group; label -1 = no group."""
    names = named_leaves(labels)
    rates = {label: learning_rate(settings, steps, settings.groups[label]) for label in set(names.values()) - {-1}}
    rates[-1] = learning_rate(settings, steps)

    def init(params: Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        del params
        now = {label: rate(state.count) for label, rate in rates.items()}

        def scaled(name: str, leaf: Array) -> Array:
            rate = now[names[name]] * (state.count >= late[name]) if name in late else now[names[name]]
            return -rate.astype(leaf.dtype) * leaf

        return map_named(scaled, updates), optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformation(init, update)


def _labels(settings: OptimizerSettings, params: Params) -> Params:
    """Returns the index of each parameter's group, -1 = none."""
    names = list(named_leaves(params))
    for index, group in enumerate(settings.groups):
        if not any(_matches(group, name) for name in names):
            raise ConfigError(
                f"optimizer.groups[{index}].pattern = {group.pattern!r} matches none of the {len(names)} parameter "
                f"names; change the pattern. Examples of names: {some_names(names)}."
            )

    def label(name: str, leaf: Any) -> int:
        del leaf
        found = (index for index, group in enumerate(settings.groups) if _matches(group, name))
        return next(found, -1)

    return map_named(label, params)


def _matches(group: ParamGroup, name: str) -> bool:
    own = re.sub(r"^(trained|adapters)/", "", name)  # as without adapters (`training.lora.LoraTask`)
    return any(re.search(group.pattern, one) for one in (name, own))
