"""A corpus beside a generator: its mixture in NumPy, in likelihoods and at every step; off, it is not there."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.decoding.neighbours import States
from empax.decoding.settings import DecodeSettings
from empax.models.heads import ClassificationHead
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.settings import DialogueSettings, NeighbourSettings
from empax.parts.generator.task import Generator
from empax.systems.reg.settings import RegSettings
from tests.parts.generator.tiny import EOS, MODEL, PAD, PROMPTED, START, V

ROWS, LENGTH = 3, 6
RNG = np.random.default_rng(0)
ON = NeighbourSettings(knn_weight=0.3, knn=4, knn_temperature=0.5, copy_weight=0.2, copy_temperature=0.3)


def batch():
    target = RNG.integers(3, V, (ROWS, LENGTH)).astype(np.int32)
    response = RNG.integers(3, V, (ROWS, 2, 4)).astype(np.int32)
    mask = np.ones(response.shape, bool)
    mask[0, 1, 2:] = False
    mask[1, 0] = False  # an exemplar that is not there
    mask[2] = False  # an example without any
    made = {
        "source": RNG.integers(3, V, (ROWS, 5)).astype(np.int32), "source_mask": np.ones((ROWS, 5), bool),
        "target": target, "target_mask": np.ones(target.shape, bool), "valid": np.ones(ROWS, bool),
        "response": response, "response_mask": mask,
    }  # fmt: skip
    return types.SimpleNamespace(**{name: jnp.asarray(value) for name, value in made.items()})


BATCH = batch()


def task(model, neighbours, **decoding):
    decoder = Decoder(DecodeSettings(max_tokens=LENGTH, **decoding), start_id=START, eos_id=EOS, pad_id=PAD)
    return Generator(model, decoder, ClassificationHead(num_classes=32), emotion_weight=0.0, neighbours=neighbours)


@pytest.fixture(
    scope="module", params=[MODEL, pytest.param(PROMPTED, marks=pytest.mark.slow)], ids=["read", "prompted"]
)
def parts(request):
    model = request.param
    params = jax.jit(lambda rng: task(model, NeighbourSettings()).init(rng, BATCH))(jax.random.key(0))
    params["model"] = jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, params["model"])
    keys, tokens = RNG.normal(size=(30, 16)).astype(np.float16), RNG.integers(0, V, 30).astype(np.int32)
    return model, params, States(keys, tokens)


def spread(state, keys, tokens, temperature, num=None):
    distances = ((state.astype(np.float64) - keys.astype(np.float64)) ** 2).mean(axis=1)
    kept = np.argsort(distances, kind="stable")[:num]
    found = np.zeros(V)
    np.add.at(found, tokens[kept], np.exp(-distances[kept] / temperature))
    return found / max(found.sum(), 1e-300)


def distributions(model, params, states, target, settings=ON):
    """Of each token of `target`, mixed in NumPy."""
    made = task(model, NeighbourSettings())

    @jax.jit
    def decode_hidden(params, ids):
        read = made.encode(params, BATCH, None)
        return model.apply({"params": params["model"]}, ids, read.states, read.mask, method="decode_hidden")

    @jax.jit
    def probabilities(params, hidden):
        return jax.nn.softmax(model.apply({"params": params["model"]}, hidden, method="logits_from"))

    def hidden_of(ids):
        return np.asarray(decode_hidden(params, jnp.asarray(ids)))

    hidden = hidden_of(target)
    own = np.asarray(probabilities(params, jnp.asarray(hidden)), np.float64)
    mixed = np.zeros(own.shape)
    for b in range(ROWS):
        keys, tokens = [], []
        for k in range(2):
            said = np.asarray(BATCH.response[b, k])[np.asarray(BATCH.response_mask[b, k])]
            if len(said):
                said = [*said, EOS][:4]  # one of full length may have been cut
                ids = np.zeros((ROWS, len(said)), np.int32)
                ids[b] = said
                keys, tokens = [*keys, *hidden_of(ids)[b]], [*tokens, *said]
        copied = settings.copy_weight if keys else 0.0
        for t in range(own.shape[1]):
            mixed[b, t] = (1 - settings.knn_weight - copied) * own[b, t]
            near = spread(hidden[b, t], states.keys, states.tokens, settings.knn_temperature, settings.knn)
            mixed[b, t] += settings.knn_weight * near
            if copied:
                given = np.stack(keys), np.array(tokens), settings.copy_temperature
                mixed[b, t] += copied * spread(hidden[b, t], *given)
    return mixed


@pytest.mark.oracle
def test_likelihoods_and_greedy_decoding_follow_the_mixture(parts):
    model, params, states = parts
    mixed = task(model, ON)
    given = mixed.with_states(params, jax.tree.map(jnp.asarray, states))
    found = jax.jit(lambda p: mixed.read(p, BATCH))(given)
    probs = distributions(model, params, states, np.asarray(BATCH.target))
    picked = np.take_along_axis(probs, np.asarray(BATCH.target)[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(found["nll"], -np.log(picked).sum(axis=1), rtol=1e-3)
    tokens = np.asarray(jax.jit(lambda p: mixed.generate(p, {}, BATCH, jax.random.key(1)).tokens)(given))[:, 0]
    best = distributions(model, params, states, tokens).argmax(axis=2)
    for row, likeliest in zip(tokens, best, strict=True):
        ends = [*np.flatnonzero(row == EOS), len(row) - 1][0] + 1
        np.testing.assert_array_equal(row[:ends], likeliest[:ends])


def test_weights_of_zero_are_the_plain_generator_bit_for_bit(parts):
    model, params, _ = parts
    plain = task(model, NeighbourSettings(), method="sample")
    off = task(model, dataclasses.replace(ON, knn_weight=0.0, copy_weight=0.0), method="sample")
    bare = types.SimpleNamespace(**{**vars(BATCH), "response": None, "response_mask": None})

    def found(made, batch):
        jitted = jax.jit(lambda p: (made.generate(p, {}, batch, jax.random.key(1)), made.read(p, batch)))
        return jax.tree.leaves(jitted(params))

    for one, other in zip(found(plain, bare), found(off, BATCH), strict=True):
        np.testing.assert_array_equal(one, other)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"knn_weight = 0\.5 and copy_weight = 0\.5 leave the generator nothing"):
        NeighbourSettings(knn_weight=0.5, copy_weight=0.5)
    with pytest.raises(ConfigError, match=r"neighbours\.copy_weight = 0\.2: this system answers without"):
        DialogueSettings(neighbours=NeighbourSettings(copy_weight=0.2))
    assert RegSettings(neighbours=ON).reads_responses
