"""Next-token distributions from the nearest decoder states of a corpus: kNN-LM, and copying from exemplars.

A state is the D-dimensional decoder state before a token. Distances are means over the D features, so that their scale
does not depend on D. The distributions have no parameters and are mixed with the model's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.largest import largest


@flax.struct.dataclass
class States:
    """States and the token that followed each: M of a whole corpus, or M of each example's exemplars.

    The fields are arrays, annotated Any since JAX also builds pytrees of shardings and shapes.
    """

    keys: Any  # [M, D] or [B, M, D]
    tokens: Any  # [M] or [B, M]
    mask: Any = None  # [B, M], True at real states


def squared_distances(states: Float[Array, "*B W D"], keys: Float[Array, "*B M D"]) -> Float[Array, "*B W M"]:
    """Returns the mean squared difference between each state and each key, in float32."""
    states, keys = states.astype(jnp.float32), keys.astype(jnp.float32)
    both = jnp.einsum("...WD,...MD->...WM", states, keys)
    ours, theirs = jnp.square(states).sum(axis=-1), jnp.square(keys).sum(axis=-1)
    return jnp.maximum(ours[..., :, None] - 2.0 * both + theirs[..., None, :], 0.0) / states.shape[-1]


def knn_probabilities(
    states: Float[Array, "B W D"], corpus: States, *, num: int, temperature: float, vocab_size: int
) -> Float[Array, "B W V"]:
    r"""Returns the distribution of the tokens that followed the nearest states of a corpus.

    .. math:: p(w | h) \propto \sum_{(k, v) \in N_n(h)} [v = w] \, e^{-d(h, k) / \tau}

    Source: Khandelwal et al. 2020 (kNN-LM), Eq. 2, with a temperature (kNN-MT; Khandelwal et al. 2021, Eq. 4).

    The corpus has keys [M, D] and tokens [M]. `num` is n; at most M neighbours are used. The temperature tau is in
    units of the distance.
    """
    flat = states.reshape(-1, states.shape[-1])
    near, rows = largest(-squared_distances(flat, corpus.keys), min(num, corpus.keys.shape[0]))
    found = _spread(near / temperature, corpus.tokens[rows], jnp.ones(near.shape, bool), vocab_size)
    return found.reshape(*states.shape[:2], vocab_size)


def copy_probabilities(
    states: Float[Array, "B W D"], exemplars: States, *, temperature: float, vocab_size: int
) -> Float[Array, "B W V"]:
    """Returns the distribution over all tokens of each example's own exemplars; all 0 for an example without any.

    Source: Grave et al. 2017 (a continuous cache), Eq. 2, with the exemplars as the cache and the distance of
    `knn_probabilities` as the similarity. Nothing is learnt, unlike in a pointer with a gate (See et al. 2017).

    Exemplars have keys [B, M, D], tokens and mask [B, M]; the temperature is in units of the distance.
    """
    assert exemplars.mask is not None
    scores = -squared_distances(states, exemplars.keys) / temperature
    tokens, mask = (jnp.broadcast_to(part[:, None], scores.shape) for part in (exemplars.tokens, exemplars.mask))
    flat = (-1, scores.shape[-1])
    found = _spread(scores.reshape(flat), tokens.reshape(flat), mask.reshape(flat), vocab_size)
    return found.reshape(*states.shape[:2], vocab_size)


def _spread(
    scores: Float[Array, "N M"], tokens: Int[Array, "N M"], mask: Bool[Array, "N M"], vocab_size: int
) -> Float[Array, "N V"]:
    """Returns the softmax of scores, summed by token."""
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) * mask
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.zeros((scores.shape[0], vocab_size), jnp.float32).at[rows, tokens].add(weights)


def interpolated(
    logits: Float[Array, "B W V"], parts: Sequence[tuple[float, Float[Array, "B W V"]]]
) -> Float[Array, "B W V"]:
    r"""Returns log-probabilities of a mixture.

    .. math:: \log \big((1 - \sum_i \lambda_i) \, p_{model}(w) + \sum_i \lambda_i \, p_i(w)\big)

    `parts` are weights and distributions; the weight of an all-zero distribution goes to the model.
    Source: Khandelwal et al. 2020, Eq. 3.
    """
    there = sum((weight * (probs.sum(axis=-1, keepdims=True) > 0.0) for weight, probs in parts), start=jnp.zeros(()))
    own = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1) + jnp.log1p(-there)
    return jnp.logaddexp(own, jnp.log(sum((weight * probs for weight, probs in parts), start=jnp.zeros(()))))
