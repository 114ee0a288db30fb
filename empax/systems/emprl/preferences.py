"""Preferences among responses, sampled or read from a file, and the losses of DPO, IPO and KTO.

A response's log-ratio is r = log pi(y|x) - log rho(y|x), summed over its tokens, with rho the frozen reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.inputs import note
from empax.core.protocols import Tokenizer
from empax.core.text_files import DataError, read_jsonl
from empax.core.types import Instance, Mean
from empax.data import features
from empax.systems.emprl.advantages import by_group
from empax.systems.emprl.kl import real
from empax.systems.emprl.rollouts import PolicyBatch, Rollout


@flax.struct.dataclass
class Pairs:
    """Two rollouts with one pair per row, so that resampling rows keeps pairs together."""

    chosen: Rollout
    rejected: Rollout
    counts: Bool[Array, " B"]  # False where there is no preference

    @property
    def valid(self) -> Bool[Array, " B"]:
        return self.chosen.valid

    @property
    def batch(self) -> PolicyBatch:
        """The contexts."""
        return self.chosen.batch

    @property
    def both(self) -> Rollout:
        """All responses: the chosen ones, then the rejected ones."""
        return jax.tree.map(lambda one, two: jnp.concatenate([one, two]), self.chosen, self.rejected)


def best_and_worst(
    scores: Float[Array, " B"], valid: Bool[Array, " B"], *, group_size: int
) -> tuple[Int[Array, " G"], Int[Array, " G"], Bool[Array, " G"]]:
    """Returns each group's rows of highest and lowest score (ties go to the first), and whether the scores differ.

    Arguments are those of `advantages.grpo_advantages`.
    """
    grouped, counts, _ = by_group(scores, valid, group_size)
    high, low = (jnp.where(counts, sign * grouped, -jnp.inf) for sign in (1.0, -1.0))
    first = group_size * jnp.arange(len(grouped))
    differ = (high.max(axis=1) > -low.max(axis=1)) & jnp.any(counts, axis=1)
    return first + high.argmax(axis=1), first + low.argmax(axis=1), differ


def sides(scores: Float[Array, " B"], valid: Bool[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Returns 1 above the group's mean, -1 below it, 0 at it and on filler rows; arguments as in `best_and_worst`."""
    grouped, counts, size = by_group(scores, valid, group_size)
    apart = jnp.where(counts, grouped - grouped.sum(axis=1, keepdims=True) / jnp.maximum(size, 1.0), 0.0)
    # Equal scores may differ from their mean by rounding.
    return jnp.where(jnp.abs(apart) > 1e-6 * jnp.abs(grouped), jnp.sign(apart), 0.0).reshape(-1)


def dpo_loss(
    chosen: Float[Array, " G"], rejected: Float[Array, " G"], counts: Bool[Array, " G"], *, beta: float
) -> Mean:
    r"""Returns the negative log-likelihood of the preferences; a response's reward is beta times its log-ratio.

    .. math:: L = -\log \sigma(\beta h), \quad h = r_w - r_l

    with the log-ratios r_w of `chosen` and r_l of `rejected` responses, in nats; values where `counts` is False (NaN
    too) have no effect. Source: Rafailov et al. 2023 (DPO), Eq. 7.
    """
    return Mean.of(-jax.nn.log_sigmoid(beta * (real(chosen, counts) - real(rejected, counts))), counts)


def ipo_loss(
    chosen: Float[Array, " G"], rejected: Float[Array, " G"], counts: Bool[Array, " G"], *, beta: float
) -> Mean:
    r"""Returns the squared distance of the margin from its target; arguments are those of `dpo_loss`.

    .. math:: L = \left(h - \frac{1}{2 \beta}\right)^2, \quad h = r_w - r_l

    Source: Azar et al. 2024 (IPO), Eq. 17, with beta for tau. TRL takes r as means over tokens, the paper as sums.
    """
    margin = real(chosen, counts) - real(rejected, counts)
    return Mean.of(jnp.square(margin - 0.5 / beta), counts)


def kto_loss(
    ratios: Float[Array, " B"], side: Float[Array, " B"], reference_point: Float[Array, " B"], *, beta: float
) -> Mean:
    r"""Returns one minus the human-perceived value of a response: gains and losses against a reference point.

    .. math:: L = 1 - \sigma(s \, \beta (r - z_0)), \quad s = 1 \text{ (wanted)}, -1 \text{ (unwanted)}

    with s the `side`, 0 where a response does not count, and z_0 the `reference_point`: the KL to the reference, at
    least 0, in nats per response, without gradient. Source: Ethayarajh et al. 2024 (KTO), Eq. 8, both of its weights 1.
    """
    counts = side != 0.0
    gain = real(ratios, counts) - jax.lax.stop_gradient(real(reference_point, counts))
    return Mean.of(1.0 - jax.nn.sigmoid(side * beta * gain), counts)


def read_pairs(path: Path) -> tuple[list[Instance], list[str]]:
    """Reads preferences from a file: instances with the preferred responses, and the rejected ones, which may be blank.

    Raises:
      DataError: a line lacks `context`, a list of texts, or the texts `chosen` and `rejected`; or there is no line.
    """
    instances, rejected = [], []
    for number, row in enumerate(read_jsonl(path), start=1):
        context = row.get("context")
        turns: list[Any] = context if isinstance(context, list) and context else [None]
        texts, other = (*turns, row.get("chosen")), row.get("rejected")
        if not isinstance(other, str) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(
                f"{path}, pair {number}: must have context (a list of texts) and the texts chosen and rejected."
            )
        instances.append(Instance(f"pair{number}#{len(turns) + 1}", tuple(turns), row["chosen"], ""))
        rejected.append(other)
    if not instances:
        raise DataError(f"{path} has no pairs; give a file with one per line.")
    note("the preferences", path)
    return instances, rejected


def check_apart(path: Path, instances: Sequence[Instance], asked: Sequence[Instance]) -> None:
    """Raises DataError if a context of `path` is among those that the trained policy is tested on."""
    known = {instance.context for instance in asked}
    if both := sum(instance.context in known for instance in instances):
        raise DataError(
            f"{both} of {len(instances)} contexts of {path} are in the test split; take them out, or the test is "
            "invalid."
        )


def given_answers(
    instances: Sequence[Instance], rejected: Sequence[str], tokenizer: Tokenizer, length: int, first: int | None = None
) -> Int[np.ndarray, "N 2 T"]:
    """Returns ids of chosen and rejected responses, behind `first` and with their end token, cut to `length` in all."""
    before = () if first is None else (first,)
    texts = [text for one, two in zip(instances, rejected, strict=True) for text in (one.response, two)]
    ids = [[*before, *row, tokenizer.eos_id][:length] for row in tokenizer.encode_batch(texts)]
    return features.pad(ids, length, tokenizer.pad_id)[0].reshape(len(instances), 2, length)
