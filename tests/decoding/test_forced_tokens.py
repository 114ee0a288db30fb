"""Tokens that are forced, on a model that knows of none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings


def flat_step(tokens, cache):
    """Every token but the end is as likely as any other."""
    logits = jnp.zeros((*tokens.shape, 8)).at[..., 1].set(-jnp.inf)
    return logits, cache


def flat(settings, start_id=0):
    kinds = {"start_id": start_id, "eos_id": 1, "pad_id": 2}
    return generate(flat_step, None, batch_size=2, settings=settings, rng=jax.random.key(0), **kinds)


def test_sampling_takes_forced_tokens_as_certain():
    forced = {"first_token": 4, "end_at_limit": True}
    found = flat(DecodeSettings("sample", 5, num_samples=3, top_p=0.9, top_k=6, temperature=0.7, **forced))
    assert (found.tokens[:, :, 0] == 4).all()
    assert len(np.unique(found.tokens[1, :, 1:4], axis=0)) > 1
    assert (found.tokens[:, :, -1] == 1).all()
    np.testing.assert_allclose(found.log_probs, np.full((2, 3), 3 * np.log(1 / 7)), rtol=1e-5)


@pytest.mark.parametrize(
    ("start_id", "forced", "tokens"),
    [
        (0, {"first_token": 0, "end_at_limit": True}, [0, 2, 3, 1]),  # as no token may come twice, not even the start
        (0, {"first_token": 0}, [0, 2, 3, 4]),
        (1, {"end_at_limit": True}, [0, 2, 3, 1]),  # BART starts from the end token, which ends nothing there
    ],
)
def test_forcing_goes_before_forbidding(start_id, forced, tokens):
    found = flat(DecodeSettings("greedy", 4, min_tokens=4, no_repeat_ngram=1, **forced), start_id)
    assert found.tokens[0, 0].tolist() == tokens
    assert np.isfinite(found.log_probs).all()
