"""Rewards of responses: the identifiers' empathy (Eq. 2 to 5), compiled functions, plain functions of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.plugins import blamed, load_function
from empax.core.protocols import Tokenizer
from empax.core.settings import cache_dir
from empax.core.sharding import local_mesh
from empax.core.system import RunContext, load_encoder_of
from empax.core.text_functions import call_on_texts, can_be_tried, needed_fields, row_fields, wanted_fields
from empax.core.types import LEVELS, Instance, Params
from empax.data.store import load_instances
from empax.parts.attributes import load_identifiers
from empax.parts.attributes.identifier import Identifiers, empathy_reward
from empax.systems.emprl.expectations import Novelty, balanced_gains, expected_levels, f1_gains
from empax.systems.emprl.rollouts import Goals, Rollout
from empax.systems.emprl.settings import RewardSettings

Scores: TypeAlias = Float[np.ndarray, " N"]
Probabilities: TypeAlias = Float[np.ndarray, "N M 3"]
"""Of each mechanism's levels."""

Rate: TypeAlias = Callable[[Params, Rollout], Float[Array, " B"]]
RateTexts: TypeAlias = Callable[[Int[np.ndarray, " N"], Sequence[str]], Scores]
"""(numbers of the training examples, responses) -> scores."""


def empathy_gain(probabilities: Probabilities, gains: Float[np.ndarray, "N M 3"]) -> Scores:
    r"""Returns the expected contribution of a response to the mean of the mechanisms' weighted F1.

    .. math:: R = \frac{1}{M} \sum_m \sum_l p_m(l) \, G_{m,l}

    with G the `gains`, see `expectations.f1_gains`. Source: ours; EmpRL's Emp-F1 is the mean of the three F1.
    """
    return (probabilities * gains).sum(axis=2).mean(axis=1)


def trajectory_reward(
    scores: Scores,
    probabilities: Probabilities,
    levels: Int[np.ndarray, "N M"],
    dialogues: Sequence[str],
    *,
    shift_penalty: float,
) -> Scores:
    r"""Returns a dialogue's reward for each listener turn: from its own and the mean reward, less sudden shifts.

    .. math:: S_t = \tfrac{1}{2} (R_t + \bar R) - \lambda \, \frac{1}{M} \sum_m
      \max(0, |E[l_{t,m}] - E[l_{t-1,m}]| - |g_{t,m} - g_{t-1,m}|)

    with the `scores` R_t of single turns, E[l] the expected level (0 to 2), g the gold `levels`, and lambda the
    `shift_penalty`. The turns of a dialogue, which `dialogues` names, are adjacent rows in order.
    Source: ours; EmpRL, Sec. VII names it as future work, without a formula.
    """
    names, dialogue = np.unique(dialogues, return_inverse=True)
    mean = np.array([scores[dialogue == number].mean() for number in range(len(names))])[dialogue]
    expected = probabilities @ np.arange(3.0)
    moved = np.abs(np.diff(expected, axis=0)) - np.abs(np.diff(levels, axis=0))
    shift = np.where(np.diff(dialogue) == 0, np.maximum(moved, 0.0).mean(axis=1), 0.0)
    return 0.5 * (scores + mean) - shift_penalty * np.append(0.0, shift)


def empathy_goals(
    part: RewardSettings, identifiers: Identifiers, run: RunContext, instances: Sequence[Instance]
) -> Goals:
    """Returns what the part "empathy" wants of the response to each instance; the cache keeps the gold levels."""
    gold = identifiers.gold(instances, cache_dir() / "levels")
    if part.goal == "gold":
        return Goals.of(np.eye(len(LEVELS), dtype=np.float32)[gold], gold)
    if part.goal == "balanced":
        return Goals.of(balanced_gains(gold), gold)
    embeddings = load_encoder_of(run, "").embed_queries(instances, progress="contexts", mesh=local_mesh())
    return Goals.of(f1_gains(expected_levels(embeddings, gold, [i.dialogue_id for i in instances])), gold)


def rate_empathy(
    part: RewardSettings, identifiers: Identifiers, goals: Goals, instances: Sequence[Instance]
) -> RateTexts:
    """Returns the part "empathy" as a function of texts."""

    def rate(rows: Int[np.ndarray, " N"], responses: Sequence[str]) -> Scores:
        asked, wanted = [instances[i] for i in rows], goals.wanted[rows]
        log_probs = identifiers([one.context for one in asked], responses, progress=False)
        if part.goal != "gold":
            return empathy_gain(np.exp(log_probs), wanted)
        levels = wanted.argmax(axis=2)
        scores = empathy_reward(log_probs, levels)
        if not part.shift_penalty:
            return scores
        dialogues = [one.dialogue_id for one in asked]
        return trajectory_reward(scores, np.exp(log_probs), levels, dialogues, shift_penalty=part.shift_penalty)

    return rate


def rate_texts(function: Callable[..., Any], name: str, instances: Sequence[Instance]) -> RateTexts:
    """Returns a user's function of texts; see `call_on_texts`.

    It raises ConfigError if the function fails, needs a field that no instance has, or does not give a finite number
    for each response.
    """
    named, takes_any = wanted_fields(function)
    # Of all instances, if it asks for any: those of a batch may all lack one.
    known = tuple(row_fields(instances)) if named or takes_any else ()

    def rate(rows: Int[np.ndarray, " N"], responses: Sequence[str]) -> Scores:
        asked = [instances[i] for i in rows]
        contexts, references = [i.context for i in asked], [i.response for i in asked]
        found = call_on_texts(function, f"the reward {name}", contexts, responses, references, asked, known)
        return found.astype(np.float32)

    return rate


def rate_on_host(rate: RateTexts, tokenizer: Tokenizer) -> Rate:
    """Returns a function of texts as one of rollouts; only real rows reach it, and fillers get 0."""

    def rated(params: Params, rollout: Rollout) -> Float[Array, " B"]:
        rows, tokens = (np.asarray(part) for part in distributed.whole((rollout.batch.row, rollout.tokens)))
        whole = np.zeros(len(rows), np.float32)
        if distributed.is_writer():  # the function may be expensive, or not deterministic
            real = np.flatnonzero(rows >= 0)
            whole[real] = rate(rows[real], [tokenizer.decode(ids).strip() for ids in tokens[real].tolist()])
        return jnp.asarray(distributed.from_writer(whole))

    return rated


def compiled(function: Callable[..., Float[Array, " B"]]) -> Rate:
    """Returns `(rollout) -> [B]`, or `(params, rollout) -> [B]` if it has `params`, as one function of both.

    Beside a part on the host, no other program contains it: hence `jax.jit`.
    """
    takes_params = hasattr(function, "params")
    return jax.jit(lambda params, rollout: function(params, rollout) if takes_params else function(rollout))


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a reward.

    Attributes:
      name: the name under which it is logged.
      weight: its factor in the reward.
      rate: the score of each answer, unweighted, 0 on filler rows.
      params: frozen parameters of `rate`.
      on_host: whether `rate` is plain Python; else it is compiled with the rollout.
    """

    name: str
    weight: float
    rate: Rate
    params: Params = dataclasses.field(default_factory=dict)
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Reward:
    """The weighted sum of its parts; `goals` are those of the part "empathy", if there is one."""

    parts: tuple[Part, ...]
    goals: Goals = dataclasses.field(default_factory=lambda: Goals.none(0))

    @property
    def on_host(self) -> bool:
        return any(part.on_host for part in self.parts)

    def frozen(self) -> Params:
        """Returns the parameters for `rate`: those of each part, by its number."""
        return {str(i): part.params for i, part in enumerate(self.parts)}

    def rate(self, params: Params, rollout: Rollout) -> Float[Array, "B P"]:
        """Returns the score of each part, unweighted."""
        if not self.parts:  # the paper's "w/o empathy reward": the KL alone is left
            return jnp.zeros((rollout.tokens.shape[0], 0))
        rated = [part.rate(params[str(i)], rollout) for i, part in enumerate(self.parts)]
        return jnp.stack(rated, axis=1).astype(jnp.float32)

    def total(self, rated: Float[Array, "B P"]) -> Float[Array, " B"]:
        """Returns the weighted sum of the parts' scores."""
        return (rated * np.array([[part.weight for part in self.parts]], np.float32)).sum(axis=1)


def make_reward(
    settings: Sequence[RewardSettings], run: RunContext, tokenizer: Tokenizer, instances: Sequence[Instance]
) -> Reward:
    """Builds the reward from the `settings` of its parts; raises ConfigError if a function does not exist.

    The `tokenizer` is the generator's; row numbers of batches index `instances`.
    """
    parts, goals = [], Goals.none(len(instances))
    for part, name in zip(settings, part_names(settings), strict=True):
        if part.kind in ("compiled", "novelty"):
            function = load_function(part.function) if part.function else _novelty(run, tokenizer)
            parts.append(Part(name, part.weight, compiled(function), getattr(function, "params", {})))
            continue
        if part.kind == "empathy":
            identifiers = load_identifiers(run, part.stages)
            goals = empathy_goals(part, identifiers, run, instances)
            rate = rate_empathy(part, identifiers, goals, instances)
        else:
            rate = rate_texts(load_function(part.function), part.function, instances)
        parts.append(Part(name, part.weight, rate_on_host(rate, tokenizer), on_host=True))
    return Reward(tuple(parts), goals)


def _novelty(run: RunContext, tokenizer: Tokenizer) -> Novelty:
    responses = [instance.response for instance in load_instances(run, "train")]
    return Novelty.of(tokenizer.encode_batch(responses), eos_id=tokenizer.eos_id)


def part_names(settings: Sequence[RewardSettings]) -> tuple[str, ...]:
    """Returns the name of each part's function, or its kind; repeated names get the part's number as a suffix."""
    names = [part.function.rpartition(":")[2] or part.kind for part in settings]
    return tuple(name if names.index(name) == i else f"{name}_{i}" for i, name in enumerate(names))


def try_functions(
    settings: Sequence[RewardSettings],
    rows: Callable[[Iterable[str]], Sequence[Instance]],
    rollout: Rollout,
    later: Sequence[str] = (),
) -> None:
    """Loads the functions that `settings` name, and calls each on a few rows.

    A text function rates the responses of the rows that `rows` returns, if possible with the fields of given names; a
    compiled one is traced with `rollout`, shapes of as many answers. `later` are notes that stages will add to rows.

    Raises ConfigError as `rate_texts` does, and if a function does not exist.
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
                    f"the reward {part.function} needs {', '.join(missing)}; the fields of its rows will be "
                    f"{', '.join(sorted(fields))}. Fields of your own come from the lines of your corpus "
                    '(config.data.name = "jsonl").'
                )
            # It may be expensive, and notes that stages add do not exist before the run.
            if distributed.is_writer() and can_be_tried(function, instances):
                rate = rate_texts(function, part.function, instances)
                rate(np.arange(len(instances)), [i.response for i in instances])
            continue
        args = (getattr(function, "params"), rollout) if hasattr(function, "params") else (rollout,)  # noqa: B009
        with blamed(f"the reward {part.function}"):
            found = jax.eval_shape(function, *args)
        shape, kind = getattr(found, "shape", None), getattr(found, "dtype", object)
        count = jax.tree.leaves(rollout)[0].shape[0]
        real = (jnp.floating, jnp.integer, jnp.bool_)
        if shape != (count,) or not any(jnp.issubdtype(kind, one) for one in real):
            raise ConfigError(
                f"the reward {part.function} returns {found} for {count} rows; it must return an array of shape "
                f"({count},) of numbers."
            )
