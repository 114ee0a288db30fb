"""Critics that score responses given the next turn, and train the generator through words that it draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.config import check_numbers
from empax.core.types import Params
from empax.models.heads import masked_mean
from empax.systems.classic.readers import ClassicBatch, Linear, Read

LOSSES = ("adversary", "critics")
"""The generator's loss against its critics, and the loss of the critics."""


@dataclasses.dataclass(frozen=True)
class AdversarySettings:
    """Settings of the critics.

    Attributes:
      width: width of their hidden layers.
      penalty: weight of the penalty on gradients of the critics whose norm is not 1.
      published: follows the released code: the critics' scores enter the generator's loss, but no gradient flows
        through them.
    """

    width: int = 128
    penalty: float = 10.0
    published: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "width", least=1)
        check_numbers(self, "penalty", least=0)


class Critic(nn.Module):
    """Scores a response, higher for gold ones, given its context and the next turn."""

    width: int

    @nn.compact
    def __call__(
        self,
        words: Float[Array, "B T D"],
        mask: Bool[Array, "B T"],
        context: Float[Array, "B C"],
        following: Float[Array, "B D"],
    ) -> Float[Array, " B"]:
        hidden = masked_mean(jax.nn.relu(Linear(self.width, name="words")(words)), mask)
        beside = jnp.concatenate([hidden, context, following], axis=-1)
        return Linear(1, name="score")(jax.nn.relu(Linear(self.width, name="hidden")(beside)))[:, 0]


def gradient_penalty(
    score: Callable[[Any], Float[Array, " B"]],
    real: Float[Array, "B T D"],
    fake: Float[Array, "B T D"],
    shares: Float[Array, " B"],
) -> Float[Array, " B"]:
    r"""Returns the gradient penalty of a critic between real and fake responses.

    .. math:: (\lVert \nabla_x f(x) \rVert_2 - 1)^2, \quad x = u\,r + (1 - u)\,s

    Source: Gulrajani et al. 2017, Eq. 3.
    """
    between = shares[:, None, None] * real + (1.0 - shares[:, None, None]) * fake
    gradient = jax.grad(lambda x: score(x).sum())(between)
    # The square root has no gradient at 0.
    norm = jnp.sqrt(jnp.square(gradient).sum(axis=(1, 2)) + 1e-12)
    return jnp.square(norm - 1.0)


def adversarial_losses(
    model: Any,
    params: Params,
    lexicon: Bool[Array, " V"],
    batch: ClassicBatch,
    read: Read,
    logits: Float[Array, "B T V"],
    rng: jax.Array,
) -> dict[str, tuple[Float[Array, " B"], Bool[Array, " B"]]]:
    r"""Returns the losses of a Wasserstein GAN with two critics: one sees all words, the other the emotion words.

    .. math:: L_G = -f(s), \quad L_f = f(s) - f(r) + \lambda\,\mathrm{penalty}

    with r the embeddings of the gold response and s those of words that the model draws, teacher-forced. L_G has the
    gradient of their expectation (straight-through, Bengio et al. 2013). The critics do not see the expectation itself:
    they would know it by its norm, and teach the generator certainty alone. The generator learns from L_G (with
    `published` it has no gradient), the critics from L_f, and nothing else from either.
    Source: Li et al. 2020 (EmpDG) for the critics' inputs.

    `model` is a `systems.classic.model.Classic` with an adversary, and `lexicon` masks the ids of emotion words. `rng`
    draws the words, and the points of the penalty between real and fake.

    Returns:
      For each of LOSSES the value of each row, and a mask of the rows that have a next turn.
    """
    assert batch.feedback_mask is not None  # training examples have it if the settings have an adversary
    stop = jax.lax.stop_gradient
    table, probabilities = stop(params["core"]["token_embedding"]), jax.nn.softmax(logits)
    context, known = stop(read.context), batch.feedback_mask.any(axis=1)
    rng, drawn = jax.random.split(rng)
    said = jax.random.categorical(drawn, stop(logits))
    adversary = critics = jnp.zeros(known.shape)
    for name, weights in (("critic", jnp.ones_like(table[:, :1])), ("emotion_critic", lexicon[:, None])):
        seen = table * weights
        following = masked_mean(seen[batch.feedback], batch.feedback_mask)
        real, expected = seen[batch.target], probabilities @ seen
        fake = stop(seen[said] - expected) + expected

        def score(params: Params, words: Any, name: str = name, following: Any = following) -> Any:
            critic = Critic(model.adversary.width)
            return critic.apply({"params": params[name]}, words, batch.target_mask, context, following)

        rng, drawn = jax.random.split(rng)
        shares = jax.random.uniform(drawn, known.shape)
        penalty = gradient_penalty(lambda words, score=score: score(params, words), real, stop(fake), shares)
        adversary = adversary - score(stop(params), fake)
        critics = critics + score(params, stop(fake)) - score(params, real)
        critics = critics + model.adversary.penalty * penalty
    if model.adversary.published:
        adversary = stop(adversary)
    return {"adversary": (adversary, known), "critics": (critics, known)}
