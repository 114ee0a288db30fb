"""A decoder-only model as a generator: its logits are those of prompt and response read in one go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.prompted import FusionInPrompt, PromptedDecoder

CONFIG = DecoderOnlyConfig(
    vocab_size=61, d_model=16, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=24, num_layers=2, max_positions=64
)
GPT2_LIKE = dataclasses.replace(
    CONFIG, position="learned", norm="layer", activation="gelu_new", num_kv_heads=4, attention_bias=True,
    feed_forward_bias=True, tie_embeddings=True,
)  # fmt: skip
PREFIX, START = (7, 8, 9), 5
B, S, T = 3, 6, 4


@functools.cache
def parts(config):
    model = DecoderOnly(config)
    ids = jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), ids, jnp.ones((1, 2), bool))["params"]
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params)
    return model, PromptedDecoder(model, PREFIX, START), {"params": params}


def sources(passages=None):
    rng = np.random.default_rng(0)
    shape = (B, S) if passages is None else (B, passages, S)
    ids, mask = rng.integers(10, 61, shape), rng.random(shape) < 0.7
    mask[..., 0] = mask[..., -1] = True
    return ids.astype(np.int32), mask, jnp.asarray(rng.integers(10, 61, (B, T)), jnp.int32)


def in_one_go(model, variables, rows, target):
    """Logits of `target` behind each row of plain ids, by the plain model without padding."""
    made, apply = [], jax.jit(model.apply)
    for ids, response in zip(rows, np.asarray(target), strict=True):
        whole = jnp.array([[*PREFIX, *ids, START, *response[:-1]]], jnp.int32)
        logits = apply(variables, whole, jnp.ones(whole.shape, bool))
        made.append(logits[0, -len(response) :])
    return np.stack(made)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(GPT2_LIKE, marks=pytest.mark.slow)])
def test_logits_are_those_of_the_whole_text(config):
    model, prompted, variables = parts(config)
    ids, mask, target = sources()
    expected = in_one_go(model, variables, [row[real] for row, real in zip(ids, mask, strict=True)], target)
    found = jax.jit(prompted.apply)(variables, jnp.asarray(ids), jnp.asarray(mask), target)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gradients_reach_the_prompt_and_remat_changes_nothing():
    ids, mask, target = sources()

    def gradient(config):
        _, prompted, variables = parts(config)
        value = lambda v: prompted.apply(v, jnp.asarray(ids), jnp.asarray(mask), target)[:, :, 3].sum()  # noqa: E731
        return jax.jit(jax.grad(value))(variables)

    plain, remat = gradient(CONFIG), gradient(dataclasses.replace(CONFIG, remat="full"))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), plain, remat)
    read = np.abs(plain["params"]["token_embedding"]).sum(axis=1)
    assert read[PREFIX[0]] > 0
    assert (read[ids[mask]] > 0).all()


@pytest.mark.parametrize("start", [START, None])
def test_states_of_the_prompt_are_those_of_the_plain_model(start):
    model, prompted, variables = parts(CONFIG)
    prompted, (ids, mask, _) = prompted.clone(start_id=start), sources()
    mask[0] = np.arange(S) == 2  # one token with padding around it
    found = jax.jit(functools.partial(prompted.apply, method="encode"))(variables, jnp.asarray(ids), jnp.asarray(mask))
    whole = np.concatenate([np.tile(PREFIX, (B, 1)), ids], axis=1)
    real = np.concatenate([np.ones((B, len(PREFIX)), bool), mask], axis=1)
    hidden = jax.jit(functools.partial(model.apply, method="hidden"))
    expected = hidden(variables, jnp.asarray(whole), jnp.asarray(real))
    np.testing.assert_allclose(found.hidden[mask], expected[:, len(PREFIX) :][mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(GPT2_LIKE, marks=pytest.mark.slow)])
def test_search_behind_a_prompt_takes_the_likeliest_token_of_the_whole_text(config):
    model, prompted, variables = parts(config)
    ids, mask, _ = sources()

    @jax.jit
    def search(variables, ids, mask):
        states = prompted.apply(variables, ids, mask, method="encode")
        cache = prompted.apply(variables, states, mask, num_hypotheses=1, max_length=T, method="start_cache")
        step = functools.partial(prompted.apply, variables, method="step")
        sizes, settings = {"batch_size": B, "start_id": START, "eos_id": 1, "pad_id": 0}, DecodeSettings(max_tokens=T)
        return generate(step, cache, settings=settings, rng=jax.random.key(0), **sizes).tokens

    tokens = search(variables, jnp.asarray(ids), jnp.asarray(mask))[:, 0]
    logits = in_one_go(model, variables, [row[real] for row, real in zip(ids, mask, strict=True)], np.asarray(tokens))
    ended = np.cumsum(np.asarray(tokens) == 1, axis=1) - (np.asarray(tokens) == 1) > 0
    np.testing.assert_array_equal(np.where(ended, 0, logits.argmax(axis=-1)), tokens)


def test_fusion_draws_the_models_own_parameters():
    _, prompted, variables = parts(CONFIG)
    fusion = FusionInPrompt(prompted.model, prompted.prefix, prompted.start_id, split=3)
    ids, mask, target = sources(passages=2)
    drawn = jax.eval_shape(fusion.init, jax.random.key(0), jnp.asarray(ids), jnp.asarray(mask), target)
    assert jax.tree.map(jnp.shape, drawn["params"]) == jax.tree.map(jnp.shape, variables["params"])


@pytest.mark.slow
def test_fusion_reads_every_exemplar_and_then_the_context_once():
    model, prompted, variables = parts(CONFIG)
    ids, mask, target = sources(passages=2)
    ids[:, 1, 3:], mask[:, 1, 3:] = ids[:, 0, 3:], mask[:, 0, 3:]
    mask[2, 0] = False  # a candidate that is not there
    fusion = FusionInPrompt(prompted.model, prompted.prefix, prompted.start_id, split=3)
    rows = []
    for b in range(B):
        exemplars = [ids[b, k, :3][mask[b, k, :3]] for k in range(2)]
        rows.append(np.concatenate([*exemplars, ids[b, 1, 3:][mask[b, 1, 3:]]]))
    expected = in_one_go(model, variables, rows, target)
    found = fusion.apply(variables, jnp.asarray(ids), jnp.asarray(mask), target)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    flat = fusion.states_mask(jnp.asarray(mask))
    assert flat.shape == (B, 2 * 3 + 3)
    states = fusion.apply(variables, jnp.asarray(ids), jnp.asarray(mask), method="encode")
    assert states.hidden.shape == (B, 9, CONFIG.d_model)
    found = fusion.apply(variables, target, states, flat, method="decode")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
