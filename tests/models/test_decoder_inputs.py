"""Cached decoding; what an encoder-decoder takes beside ids and gives beside logits: off, they change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.models.memory_attention import Memory
from empax.models.transformer import EncoderDecoder, scratch
from tests.models import test_transformer
from tests.models.test_transformer import B, S, T, V, example

M, D = 4, 20
SMALL = {"d_model": D, "num_heads": 3, "head_dim": 5, "d_ff": 28, "num_encoder_layers": 1, "num_decoder_layers": 2}
LEARNED = {"position": "learned", "shared_positions": False, "position_offset": 2, "embedding_norm": True}  # as in BART

make = functools.partial(test_transformer.make, **SMALL)


def facts(seed=3, mask=((1, 1, 1, 0), (1, 0, 0, 0))):
    states = np.random.default_rng(seed).normal(size=(B, M, D)).astype(np.float32)
    return Memory(jnp.asarray(states), jnp.asarray(mask, bool))


def logits(model, params, source, mask, target, *, added=None, embedded=None, **more):
    def run(module):
        states = module.encode(None if embedded is not None else source, mask, embedded=embedded, added=added)
        return module.logits_from(module.decode_hidden(target, states, mask, **more))

    return jax.jit(lambda params: model.apply({"params": params}, method=run))(params)


def cached(model, params, source, mask, target, **more):
    """Logits [B, 3, T, V] by cached steps of three hypotheses: two read `target`, the third that of the other row.

    The second reads another first token; after two tokens it goes on from the first.
    """

    def begin(params, more):
        states = model.apply({"params": params}, source, mask, method="encode")
        options = {"num_hypotheses": 3, "max_length": T, **more}
        return model.apply({"params": params}, states, mask, **options, method="start_cache")

    cache = jax.jit(begin)(params, more)
    assert (cache.weights is not None) == (model.config.unroll > 1)
    assert cache.cross[0][0].shape[0] == B  # of the first layer, stacked or apart: once per example
    step = jax.jit(lambda tokens, cache: model.apply({"params": params}, tokens, cache, method="step"))
    tokens, rows = jnp.full((B, 3), model.config.start_id), []
    for t in range(T):
        found, cache = step(tokens, cache)
        rows.append(found)
        if t == 1:
            cache = cache.reorder(jnp.tile(jnp.array([0, 0, 2]), (B, 1)))
        own = target[:, t]
        tokens = jnp.stack([own, own if t else (own + 1) % V, jnp.flip(own)], axis=1)
    assert int(cache.position) == T
    return jnp.stack(rows, axis=2)


FORMS = {
    "scratch": {"position": "relative"},
    "post-norm": {"position": "sinusoidal", "pre_norm": False, "final_norm": False},
    "gated": LEARNED | {"activation": "gated-gelu", "norm": "rms", "use_bias": False, "tie_embeddings": False},
    "scaled": {"output_scale": True, "attention_scale": False, "num_decoder_layers": 3, "embed_scale": False},
    "memory": {"memories": ("facts",)},
    "two memories, no gate, post-norm": {"memories": ("facts", "concepts"), "memory_gate": "none", "pre_norm": False},
    "convolution": {"feed_forward_kernel": 3},
    "unrolled": {"memories": ("facts",), "feed_forward_kernel": 3, "unroll": 2},
    "start": {"position": "sinusoidal"},
}


QUICK = ("scratch", "gated", "two memories, no gate, post-norm")


@pytest.mark.parametrize("form", [pytest.param(form, marks=[pytest.mark.slow] * (form not in QUICK)) for form in FORMS])
def test_cached_decoding_equals_teacher_forcing(form):
    model, params = make(**FORMS[form])
    source, mask, target = example()
    more = {}
    if model.config.memories:
        more["memories"] = {name: facts(seed) for seed, name in enumerate(model.config.memories)}
    if form == "start":
        more["start"] = jnp.asarray(np.random.default_rng(5).normal(size=(B, D)), jnp.float32)
    found = cached(model, params, source, mask, target, **more)
    assert found.dtype == jnp.float32
    own, other = (logits(model, params, source, mask, read, **more) for read in (target, jnp.flip(target, axis=0)))
    expected = jnp.stack([own, own, other], axis=1)
    assert float(jnp.abs(found[:, 1, 1] - expected[:, 1, 1]).max()) > 1e-3  # behind another token
    found = found.at[:, 1, 1].set(expected[:, 1, 1])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_empty_memory_leaves_the_plain_model(pre_norm):
    model, params = make(memories=("facts",), pre_norm=pre_norm)
    plain = EncoderDecoder(scratch(V, **SMALL, pre_norm=pre_norm))
    own = jax.tree.map(lambda leaf: leaf, params)  # a copy of the dicts
    del own["decoder"]["layers"]["facts"]
    inputs = example()
    expected = logits(plain, own, *inputs)
    nothing = facts(mask=np.zeros((B, M)))
    np.testing.assert_allclose(logits(model, params, *inputs, memories={"facts": nothing}), expected, atol=1e-5)
    one_row = facts(mask=((0, 0, 0, 0), (1, 1, 0, 0)))
    found = logits(model, params, *inputs, memories={"facts": one_row})
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    assert float(jnp.abs(found[1] - expected[1]).max()) > 1e-3


@pytest.mark.slow
def test_padding_of_a_memory_changes_nothing_and_its_order_neither():
    model, params = make(memories=("facts",))
    inputs = example()
    one = facts()
    expected = logits(model, params, *inputs, memories={"facts": one})
    changed = Memory(jnp.where(one.mask[..., None], one.states, 7.0), one.mask)
    np.testing.assert_array_equal(logits(model, params, *inputs, memories={"facts": changed}), expected)
    order = jnp.asarray([2, 3, 1, 0])
    turned = Memory(one.states[:, order], one.mask[:, order])
    np.testing.assert_allclose(logits(model, params, *inputs, memories={"facts": turned}), expected, atol=1e-5)


def test_memories_are_those_of_the_config():
    model, params = make(memories=("facts",))
    with pytest.raises(ConfigError, match="memories are facts"):
        logits(model, params, *example())
    with pytest.raises(ConfigError, match="given other"):
        logits(model, params, *example(), memories={"other": facts()})


@pytest.mark.slow
def test_weights_are_the_attention_of_the_last_layer():
    """They sum to 1 over real tokens, cached as teacher-forced, and moving a source's token moves its weight."""
    model, params = make()
    source, mask, target = example()
    states = model.apply({"params": params}, source, mask, method="encode")
    hidden, weights = model.apply({"params": params}, target, states, mask, method="decode_with_weights")
    plain = model.apply({"params": params}, target, states, mask, method="decode_hidden")
    np.testing.assert_array_equal(hidden, plain)
    np.testing.assert_allclose(jnp.sum(weights, axis=-1), 1.0, rtol=1e-5)
    assert float(jnp.max(jnp.where(mask[:, None], 0.0, weights))) < 1e-6
    order = jnp.asarray([1, 0, 2, 3, 4, 5, 6])
    _, moved = model.apply({"params": params}, target, states[:, order], mask, method="decode_with_weights")
    np.testing.assert_allclose(moved, weights[..., order], atol=1e-6)
    cache = model.apply({"params": params}, states, mask, num_hypotheses=1, max_length=T, method="start_cache")
    tokens = jnp.full((B, 1), model.config.start_id)
    for t in range(T):
        found = model.apply({"params": params}, tokens, cache, method="step_with_weights")
        np.testing.assert_allclose(found[0][:, 0], hidden[:, t], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[2][:, 0], weights[:, t], rtol=1e-5, atol=1e-6)
        cache, tokens = found[1], target[:, t : t + 1]


def test_inputs_that_are_no_ids():
    model, params = make()
    source, mask, target = example()
    expected = logits(model, params, source, mask, target)
    rows = jax.jit(functools.partial(model.apply, method="embed"))({"params": params}, source)
    np.testing.assert_allclose(logits(model, params, source, mask, target, embedded=rows), expected, atol=1e-5)
    added = jnp.asarray(np.random.default_rng(2).normal(size=(B, S, D)), jnp.float32)
    found = logits(model, params, source, mask, target, added=added)
    other = logits(model, params, source, mask, target, embedded=rows + added)
    np.testing.assert_allclose(found, other, atol=1e-5)
    assert float(jnp.abs(found - expected).max()) > 1e-3
