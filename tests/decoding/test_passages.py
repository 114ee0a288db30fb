"""Passages read without padding: the states are those of reading the padded arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.decoding.passages import PassageReader
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.transformer import EncoderDecoder, scratch

SIZES = [[7, 0, 12], [3, 3, 1], [0, 0, 0], [12, 12, 12], [1, 9, 5]]


@pytest.fixture(scope="module")
def model():
    sizes = {"d_model": 16, "num_heads": 2, "head_dim": 8, "d_ff": 32}
    return FusionInDecoder(EncoderDecoder(scratch(60, num_encoder_layers=1, num_decoder_layers=1, **sizes)))


@pytest.fixture(scope="module")
def arrays():
    mask = np.arange(12) < np.array(SIZES)[:, :, None]
    ids = np.where(mask, np.random.default_rng(0).integers(5, 60, mask.shape), 0).astype(np.int32)
    return ids, mask


@pytest.fixture(scope="module")
def params(model, arrays):
    return jax.jit(model.init)(jax.random.key(0), *map(jnp.asarray, arrays), jnp.ones((5, 4), jnp.int32))["params"]


def encoded(model, params, *arrays):
    encode = jax.jit(functools.partial(model.apply, method="encode"))
    return np.asarray(encode({"params": params}, *map(jnp.asarray, arrays)))


@pytest.mark.parametrize(
    ("rows", "multiple", "states_multiple"),
    [(2, 4, 8), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(16, 5, 32), (15, 12, 1000)])],
)
def test_states_are_those_of_padded_arrays_side_by_side(model, arrays, params, rows, multiple, states_multiple):
    reader = PassageReader(model, rows=rows, multiple=multiple, states_multiple=states_multiple)
    states, kept = reader(params, *arrays)
    padded = encoded(model, params, *arrays)
    real = arrays[1].reshape(5, -1)
    assert states.shape[1] == kept.shape[1] == min(-(-36 // states_multiple) * states_multiple, 36)
    for found, some, whole, mask in zip(states, kept, padded, real, strict=True):
        assert some.sum() == mask.sum()
        np.testing.assert_allclose(found[some], whole[mask], rtol=1e-5, atol=1e-5)
        assert not found[~some].any()


def test_gaps_within_a_passage_stay_out(model, arrays, params):
    ids, mask = arrays[0][:2], arrays[1][:2].copy()
    mask[0, 2, 3:6] = False
    states, kept = PassageReader(model, rows=3, multiple=4, states_multiple=4)(params, ids, mask)
    assert states.shape[1] == kept[0].sum() == 16  # a multiple already: nothing is rounded up
    padded = encoded(model, params, ids, mask)
    np.testing.assert_allclose(states[0][kept[0]], padded[0][mask[0].ravel()], rtol=1e-5, atol=1e-5)


def test_shapes_are_few(model, arrays, params):
    """Batches of one size compile the encoder once for each width."""
    reader = PassageReader(model, rows=4, multiple=4, states_multiple=8)
    for _ in range(2):
        reader(params, *arrays)
        reader(params, arrays[0][::-1].copy(), arrays[1][::-1].copy())
    assert reader._encode._cache_size() <= 3  # widths of 4, 8 and 12


def test_where_there_is_nothing_to_read_no_state_is_real(model, arrays, params):
    states, kept = PassageReader(model, states_multiple=8)(params, arrays[0], np.zeros_like(arrays[1]))
    assert states.shape[:2] == (5, 8)
    assert not kept.any()
    assert not states.any()
