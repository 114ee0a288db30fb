"""Reasons and experts: what each switch lets through, and that a row's emotion is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.systems.reflectdiffu.model import Contagion, EmotionExperts
from tests.systems.learning import random_like

B, S, P, D = 4, 5, 6, 8
RNG = np.random.default_rng(0)


def made_up(model, *given):
    """Parameters of a model."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *given))["params"]
    return random_like(shapes, seed=1, scale=0.5)


@pytest.fixture(scope="module")
def experts():
    model, valid = EmotionExperts(), jnp.ones(B, bool)
    summary = jnp.asarray(RNG.normal(size=(B, D)), jnp.float32)
    params = made_up(model, summary, jnp.zeros(B, int), valid)
    run = jax.jit(lambda *given: model.apply({"params": params}, *given), static_argnums=3)
    return params, summary, run


def test_each_polarity_has_its_expert_and_a_neutral_row_has_both(experts):
    params, summary, run = experts
    polarity = jnp.asarray([1, -1, 0, 1])
    found, embedded = run(summary, polarity, jnp.ones(B, bool), "row")
    by_hand = {
        sign: jax.nn.softmax(summary @ params["emotion_embedding"].T @ params[name].T)
        for sign, name in ((1, "positive"), (-1, "negative"))
    }
    by_hand[0] = (by_hand[1] + by_hand[-1]) / 2
    for row, sign in enumerate(polarity.tolist()):
        np.testing.assert_allclose(np.exp(found[row]), by_hand[sign][row], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(embedded[1], params["negative"] @ params["emotion_embedding"], rtol=1e-5, atol=1e-5)


def test_a_row_is_judged_alike_in_any_batch_unless_the_batch_votes(experts):
    """What the paper's Eq. 4 does: the polarity of most rows decides for all, so that others change a row."""
    _, summary, run = experts
    whole = jnp.ones(B, bool)
    before, after = jnp.asarray([1, 1, 1, -1]), jnp.asarray([1, -1, -1, -1])
    for gate, alike in (("row", True), ("batch_majority", False)):
        rows = [run(summary, polarity, whole, gate)[0][0] for polarity in (before, after)]
        assert np.array_equal(*rows) == alike
    # Filler rows have no vote.
    mostly_filler = run(summary, after, jnp.asarray([True, False, False, False]), "batch_majority")[0]
    np.testing.assert_array_equal(mostly_filler[0], run(summary, before, whole, "row")[0][0])


def test_reasons_reach_the_inputs_and_padding_of_pieces_reaches_nothing():
    model = Contagion(D, 2, 4)
    states, reasoning = (jnp.asarray(RNG.normal(size=(B, n, D + k)), jnp.float32) for n, k in ((S, 0), (P, 3)))
    mask, pieces = jnp.ones((B, S), bool), jnp.arange(P)[None] < jnp.asarray([6, 4, 3, 1])[:, None]
    given = (jnp.zeros((B, S), int), states, mask, reasoning, pieces)
    params = made_up(model, *given)
    run = jax.jit(lambda *given: model.apply({"params": params}, *given))
    added, summary = run(*given)
    np.testing.assert_array_equal(added, np.broadcast_to(params["reason_embedding"][0], added.shape))
    flipped, _ = run(given[0].at[1, 2].set(1), *given[1:])
    assert (np.asarray(flipped != added).any(axis=-1) == np.asarray([[b == 1 and s == 2 for s in range(S)]
                                                                    for b in range(B)])).all()  # fmt: skip
    changed = jnp.where(pieces[..., None], reasoning, 9.0)
    np.testing.assert_array_equal(run(*given[:3], changed, pieces)[1], summary)
    assert not np.array_equal(run(*given[:3], reasoning + 1.0, pieces)[1], summary)
