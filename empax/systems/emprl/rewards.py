"""Rewards of responses: the identifiers' empathy (Eq. 2 to 5), compiled functions, plain functions of texts.

`probabilities` are those of each mechanism's levels; `valid` is False on filler rows, whose reward is 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.plugins import blamed, load_function
from empax.core.protocols import InstanceEncoder, Tokenizer
from empax.core.sharding import local_mesh
from empax.core.system import RunContext, load_encoder_of
from empax.core.text_functions import call_on_texts, can_be_tried, needed_fields, row_fields, wanted_fields
from empax.core.types import LEVELS, Instance, Params
from empax.data import features
from empax.data.store import load_instances
from empax.data.tokenizers import tokenizers_agree
from empax.models.empathy_identifier import frame
from empax.parts.attributes import load_identifiers
from empax.parts.attributes.identifier import (
    IdentifierJudge,
    Probabilities,
    encode_contexts,
    encode_responses,
    gold_levels,
    make_probabilities,
)
from empax.systems.emprl.expectations import Novelty, balanced_gains, expected_levels, f1_gains
from empax.systems.emprl.rollouts import JudgedContexts, Rollout
from empax.systems.emprl.settings import RewardSettings

Rows: TypeAlias = Float[Array, " B"]
Levels: TypeAlias = Float[Array, "B M 3"]

ROOM = 16
"""How many more tokens a response may have for identifiers, whose tokenizer may be another, than for the policy."""


def empathy_reward(probabilities: Levels, wanted: Levels, valid: Bool[Array, " B"]) -> Rows:
    r"""Returns how likely a response has the wanted empathy levels, in (0, 1]; `wanted` is the reward of each level.

    .. math:: R_{emp} = \prod_m \sum_l w_{m,l} \, p_m(l)

    With w = 1 at the gold response's level and 0 elsewhere this is exp(-sum_m CE(p_m, l_m)).
    Source: EmpRL, Eq. 2 to 5. Computed in logarithms, since a product of small probabilities loses precision.
    """
    earned = jnp.einsum("BML,BML->BM", probabilities.astype(jnp.float32), wanted)
    return jnp.where(valid, jnp.exp(jnp.log(jnp.maximum(earned, 1e-30)).sum(axis=1)), 0.0)


def empathy_gain(probabilities: Levels, gains: Levels, valid: Bool[Array, " B"]) -> Rows:
    r"""Returns the expected contribution of a response to the mean of the mechanisms' weighted F1.

    .. math:: R = \frac{1}{M} \sum_m \sum_l p_m(l) \, G_{m,l}

    with G the `gains`, see `expectations.f1_gains`. Source: ours; EmpRL's Emp-F1 is the mean of the three F1.
    """
    gained = jnp.einsum("BML,BML->BM", probabilities.astype(jnp.float32), gains)
    return jnp.where(valid, gained.mean(axis=1), 0.0)


def trajectory_reward(
    scores: Rows,
    probabilities: Levels,
    wanted: Levels,
    turn: Int[Array, " B"],
    valid: Bool[Array, " B"],
    *,
    shift_penalty: float,
) -> Rows:
    r"""Returns a dialogue's reward for each listener turn: from its own and the mean reward, less sudden shifts.

    .. math:: S_t = \tfrac{1}{2} (R_t + \bar R) - \lambda \, \frac{1}{M} \sum_m
      \max(0, |E[l_{t,m}] - E[l_{t-1,m}]| - |g_{t,m} - g_{t-1,m}|)

    with the `scores` R_t of single turns, E[l] the expected level (0 to 2), g the mean level of `wanted`, and lambda
    the `shift_penalty`. `turn` is the turn's number in its dialogue, whose turns are adjacent rows, 0 first.
    Source: ours; EmpRL, Sec. VII names it as future work, without a formula.
    """
    rows = jnp.arange(scores.shape[0])
    dialogue = rows - turn  # the row of the dialogue's first turn
    each = jnp.arange(3.0)
    expected = jnp.einsum("BML,L->BM", probabilities.astype(jnp.float32), each)
    before = jnp.maximum(rows - 1, 0)
    gold = jnp.einsum("BML,L->BM", wanted, each) / jnp.maximum(wanted.sum(axis=2), 1e-9)
    shift = jnp.abs(expected - expected[before]) - jnp.abs(gold - gold[before])
    shift = jnp.where((turn > 0) & valid & valid[before], jnp.maximum(shift, 0.0).mean(axis=1), 0.0)
    counted = jnp.where(valid, scores, 0.0)
    same = (dialogue[:, None] == dialogue[None]) & valid[None]
    mean = jnp.where(same, counted[None], 0.0).sum(axis=1) / jnp.maximum(same.sum(axis=1), 1)
    return jnp.where(valid, 0.5 * (counted + mean) - shift_penalty * shift, 0.0)


@dataclasses.dataclass(frozen=True)
class EmpathyReward:
    """The empathy reward by trained identifiers.

    If all tokenizers agree, they read the generator's ids, compiled with the rollout; else texts decoded on the host.

    Attributes:
      judges: together one for each mechanism.
      tokenizer: the generator's.
      shift_penalty, goal: see RewardSettings.
      encoder: for the goal "f1": embeds contexts, to predict the expected levels.
    """

    judges: tuple[IdentifierJudge, ...]
    tokenizer: Tokenizer
    shift_penalty: float = 0.0
    goal: Literal["gold", "f1", "balanced"] = "gold"
    encoder: InstanceEncoder | None = None

    @functools.cached_property
    def on_host(self) -> bool:
        # Not "is": every stage loads its own copy of the run's tokenizer.
        return not all(tokenizers_agree(judge.tokenizer, self.tokenizer) for judge in self.judges)

    @property
    def params(self) -> Params:
        """The parameters of each identifier, by its number."""
        return {str(i): judge.params for i, judge in enumerate(self.judges)}

    @functools.cached_property
    def _probabilities(self) -> Probabilities:
        # Cached: a new function for every batch would be compiled for every batch.
        return make_probabilities(self.judges)

    def judged(self, instances: Sequence[Instance], cache: Path) -> JudgedContexts:
        """Returns the contexts as the identifiers read them, and the wanted levels of the responses.

        The folder `cache` keeps the levels for resumed and later runs.
        """
        first, most = self.judges[0], self.judges[0].stage.max_context_tokens
        ids = encode_contexts(first.tokenizer, [i.context for i in instances], most)
        gold = gold_levels(self.judges, instances, cache)
        if self.goal == "gold":
            wanted = np.eye(len(LEVELS), dtype=np.float32)[gold]
        elif self.goal == "balanced":
            wanted = balanced_gains(gold)
        else:
            assert self.encoder is not None
            embeddings = self.encoder.embed_queries(instances, progress="contexts", mesh=local_mesh())
            wanted = f1_gains(expected_levels(embeddings, gold, [i.dialogue_id for i in instances]))
        earned = np.take_along_axis(wanted, gold[:, :, None], axis=2).mean(axis=(1, 2))
        merit = (earned - earned.mean()) / max(earned.std(), 1e-6)
        return JudgedContexts(ids, wanted, first.tokenizer.pad_id, most, merit.astype(np.float32))

    def rate(self, params: Params, rollout: Rollout) -> Rows:
        batch, reader = rollout.batch, self.judges[0].tokenizer
        if self.on_host:
            tokens = np.asarray(distributed.whole(rollout.tokens))
            width = tokens.shape[1] + ROOM
            ids = encode_responses(reader, decoded(self.tokenizer, tokens), width)
            response, mask = features.pad(ids, width, reader.pad_id)
        else:
            ended = rollout.mask & (rollout.tokens != self.tokenizer.eos_id)
            response, mask = frame(rollout.tokens, ended, cls_id=reader.cls_id, sep_id=reader.sep_id)
        own = tuple(params[str(i)] for i in range(len(self.judges)))
        found = self._probabilities(own, batch.context, batch.context_mask, response, mask), batch.wanted
        if self.goal != "gold":
            return empathy_gain(*found, batch.valid)
        scores = empathy_reward(*found, batch.valid)
        if not self.shift_penalty:
            return scores
        return trajectory_reward(scores, *found, batch.turn, batch.valid, shift_penalty=self.shift_penalty)


def decoded(tokenizer: Tokenizer, tokens: Int[np.ndarray, "B T"]) -> list[str]:
    """Decodes responses to texts."""
    return [tokenizer.decode(row).strip() for row in tokens.tolist()]


@dataclasses.dataclass(frozen=True)
class CompiledReward:
    """A function of a `Rollout`'s arrays, `(rollout) -> [B]`; `(params, rollout) -> [B]` if it has `params`."""

    function: Callable[..., Rows]
    on_host = False

    @property
    def params(self) -> Params:
        return getattr(self.function, "params", {})

    def rate(self, params: Params, rollout: Rollout) -> Rows:
        return self._compiled(params, rollout)

    @functools.cached_property
    def _compiled(self) -> Callable[[Params, Rollout], Rows]:
        """The function under `jax.jit`: beside a part on the host, no other program contains it."""
        own, takes_params = self.function, hasattr(self.function, "params")
        return jax.jit(lambda params, rollout: own(params, rollout) if takes_params else own(rollout))


@dataclasses.dataclass(frozen=True)
class TextReward:
    """A plain function of texts, `(contexts, responses, references) -> [N]`; only real rows reach it."""

    function: Callable[[Sequence[Sequence[str]], Sequence[str], Sequence[str]], Any]
    name: str
    tokenizer: Tokenizer
    instances: Sequence[Instance]
    on_host = True

    @property
    def params(self) -> Params:
        return {}

    def rate(self, params: Params, rollout: Rollout) -> Rows:
        """Returns the scores, 0 on filler rows; raises as `call_text_function` does."""
        rows, tokens = (np.asarray(part) for part in distributed.whole((rollout.batch.row, rollout.tokens)))
        whole = np.zeros(len(rows), np.float32)
        if distributed.is_writer():  # the function may be expensive, or not deterministic
            real = np.flatnonzero(rows >= 0)
            asked, texts = [self.instances[int(i)] for i in rows[real]], decoded(self.tokenizer, tokens[real])
            whole[real] = call_text_function(self.function, self.name, asked, texts, self._known)
        return jnp.asarray(distributed.from_writer(whole))

    @functools.cached_property
    def _known(self) -> tuple[str, ...]:
        """The fields of all instances, if the function asks for any: all instances of a batch may lack one."""
        named, takes_any = wanted_fields(self.function)
        return tuple(row_fields(self.instances)) if named or takes_any else ()


@dataclasses.dataclass(frozen=True)
class Reward:
    """The weighted sum of its parts."""

    parts: tuple[tuple[float, EmpathyReward | CompiledReward | TextReward], ...]  # with their weights
    names: tuple[str, ...] = ()  # of the parts, under which they are logged

    @property
    def on_host(self) -> bool:
        return any(part.on_host for _, part in self.parts)

    def frozen(self) -> Params:
        """Returns the parameters for `rate`: those of each part, by its number."""
        return {str(i): part.params for i, (_, part) in enumerate(self.parts)}

    def rate(self, params: Params, rollout: Rollout) -> Rows:
        return self.total(self.rate_parts(params, rollout))

    def rate_parts(self, params: Params, rollout: Rollout) -> Float[Array, "B P"]:
        """Returns the score of each part, unweighted."""
        if not self.parts:  # the paper's "w/o empathy reward": the KL alone is left
            return jnp.zeros((rollout.tokens.shape[0], 0))
        rated = [part.rate(params[str(i)], rollout) for i, (_, part) in enumerate(self.parts)]
        return jnp.stack(rated, axis=1).astype(jnp.float32)

    def total(self, rated: Float[Array, "B P"]) -> Rows:
        """Returns the weighted sum of the parts' scores."""
        return (rated * np.array([[weight for weight, _ in self.parts]], np.float32)).sum(axis=1)

    def judged(self, instances: Sequence[Instance], cache: Path) -> JudgedContexts:
        for _, part in self.parts:
            if isinstance(part, EmpathyReward):
                return part.judged(instances, cache)
        return JudgedContexts.nobody(len(instances))


def make_reward(
    settings: Sequence[RewardSettings], run: RunContext, tokenizer: Tokenizer, instances: Sequence[Instance]
) -> Reward:
    """Builds the reward from the `settings` of its parts; raises ConfigError if a function does not exist.

    The `tokenizer` is the generator's; row numbers of batches index `instances`.
    """
    parts: list[tuple[float, EmpathyReward | CompiledReward | TextReward]] = []
    for part in settings:
        if part.kind == "empathy":
            expects = load_encoder_of(run, "") if part.goal == "f1" else None
            judges = load_identifiers(run, part.stages)
            made = EmpathyReward(judges, tokenizer, part.shift_penalty, part.goal, expects)
        elif part.kind == "novelty":
            responses = [instance.response for instance in load_instances(run, "train")]
            made = CompiledReward(Novelty.of(tokenizer.encode_batch(responses), eos_id=tokenizer.eos_id))
        elif part.kind == "compiled":
            made = CompiledReward(load_function(part.function))
        else:
            made = TextReward(load_function(part.function), part.function, tokenizer, instances)
        parts.append((part.weight, made))
    return Reward(tuple(parts), part_names(settings))


def part_names(settings: Sequence[RewardSettings]) -> tuple[str, ...]:
    """Returns the name of each part's function, or its kind; repeated names get the part's number as a suffix."""
    names = [part.function.rpartition(":")[2] or part.kind for part in settings]
    return tuple(name if names.index(name) == i else f"{name}_{i}" for i, name in enumerate(names))


def check_contexts(stages: Sequence[str], lengths: Sequence[int]) -> None:
    """Raises ConfigError if the identifiers of `stages` read contexts of different `lengths`."""
    for stage, length in zip(stages, lengths, strict=True):
        if length != lengths[0]:
            raise ConfigError(
                f"rewards: max_context_tokens is {length} in {stage!r} and {lengths[0]} in {stages[0]!r}; identifiers "
                "in one reward read contexts of the same length; set both to the same."
            )


def check_tokenizers(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raises ConfigError if identifiers read different ids; `tokenizers` are those of their `encoder.pretrained`."""
    for name, tokenizer in tokenizers.items():
        if not tokenizers_agree(tokenizer, tokenizers[first := next(iter(tokenizers))]):
            raise ConfigError(
                f"rewards: identifiers whose encoders are {first!r} and {name!r} have different tokenizers; set the "
                "same encoder (`pretrained`) in the stages of one reward."
            )


def call_text_function(
    function: Callable[..., Any],
    name: str,
    instances: Sequence[Instance],
    responses: Sequence[str],
    known: Iterable[str] = (),
) -> Float[np.ndarray, " N"]:
    """Returns the scores of `responses` to the contexts of `instances`, as float32; see `call_on_texts`.

    Raises ConfigError if the function fails, needs a field that no row has, or does not give a finite number for each.
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
    """Loads the functions that `settings` name, and calls each on a few rows.

    A text function rates the responses of the rows that `rows` returns, if possible with the fields of given names; a
    compiled one is traced with `rollout`, shapes of as many answers. `later` are notes that stages will add to rows.

    Raises ConfigError as `call_text_function` does, and if a function does not exist.
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
                call_text_function(function, part.function, instances, [i.response for i in instances])
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
