import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.tree import named_leaves
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.layers import logical_axes, relative_bucket
from empax.models.memory_attention import Memory
from empax.models.t5 import t5_from_scratch
from empax.models.transformer import EncoderDecoder, TransformerConfig, scratch

B, S, T, V = 2, 7, 5, 29
SMALL = {"d_model": 20, "num_heads": 3, "head_dim": 5, "d_ff": 28, "num_encoder_layers": 2, "num_decoder_layers": 2}


def make(**changes):
    model = EncoderDecoder(scratch(V, **(SMALL | changes)))
    ids, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    memories = {name: Memory(jnp.zeros((1, 2, model.config.d_model)), mask) for name in model.config.memories}
    init = jax.jit(functools.partial(model.init, memories=memories))
    return model, shaken(init(jax.random.key(0), ids, mask, ids)["params"])


def shaken(params):
    """Away from the initial ones and zeros, or a forgotten bias would not show."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), params)


def example():
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, V, size=(B, S)), rng.integers(1, V, size=(B, T))
    mask = np.ones((B, S), bool)
    mask[1, 4:] = False
    return jnp.asarray(source), jnp.asarray(mask), jnp.asarray(target)


@pytest.fixture(scope="module")
def small():
    return make()


def apply(model, params, *args, **kwargs):
    return compiled(model, tuple(kwargs.items()))(params, *args)


@functools.lru_cache(maxsize=4)
def compiled(model, options):
    """One program for all calls of a kind with arguments of one shape."""
    return jax.jit(lambda params, *args: model.apply({"params": params}, *args, **dict(options)))


@pytest.mark.slow
def test_a_half_precision_model_decodes_the_same_with_a_wide_cache(monkeypatch):
    """Where a cache is float32, it holds the numbers that a half-precision one would."""
    model, params = make(dtype="bfloat16")
    source, mask, target = example()
    found = []
    for dtype in (jnp.float32, jnp.bfloat16):
        monkeypatch.setattr("empax.models.stack.cache_dtype", lambda _, dtype=dtype: dtype)
        compiled.cache_clear()
        states = apply(model, params, source, mask, method="encode")
        cache = apply(model, params, states, mask, num_hypotheses=1, max_length=T, method="start_cache")
        assert cache.past.key.dtype == dtype
        assert cache.cross[0].dtype == jnp.bfloat16
        rows = []
        for t in range(T):
            logits, cache = apply(model, params, target[:, t : t + 1], cache, method="step")
            rows.append(logits)
        found.append(jnp.stack(rows))
    np.testing.assert_allclose(*found, atol=2e-2)
    assert float(jnp.abs(found[0]).max()) > 0.1


def test_source_without_any_token_gives_numbers(small):
    model, params = small
    source, mask, target = example()

    def loss(params):
        return model.apply({"params": params}, source, mask.at[0].set(False), target).sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_remat_changes_neither_value_nor_gradient(small):
    model, params = small
    source, mask, target = example()

    def loss(model):
        def objective(params):
            rngs = {"dropout": jax.random.key(3)}
            return model.apply({"params": params}, source, mask, target, deterministic=False, rngs=rngs).var()

        return jax.jit(jax.value_and_grad(objective))(params)

    value, grads = loss(model)
    for remat in ("minimal", "full"):
        value_again, grads_again = loss(EncoderDecoder(dataclasses.replace(model.config, remat=remat)))
        np.testing.assert_allclose(value, value_again, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, grads_again)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_outside(small):
    model, params = small
    half = EncoderDecoder(dataclasses.replace(model.config, dtype="bfloat16"))
    source, mask, target = example()
    assert apply(half, params, source, mask, method="encode").dtype == jnp.bfloat16
    logits = apply(half, params, source, mask, target)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, apply(model, params, source, mask, target), atol=0.25)
    shapes = jax.eval_shape(half.init, jax.random.key(0), source, mask, target)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


def test_dropout_draws_differ_by_key(small):
    model, params = small
    source, mask, _ = example()

    @jax.jit
    def encode(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, source, mask, method="encode", deterministic=False, rngs=rngs)

    np.testing.assert_array_equal(encode(0), encode(0))
    assert np.abs(encode(0) - encode(1)).max() > 1e-3


def test_program_does_not_grow_with_depth():
    def size(layers):
        model = EncoderDecoder(scratch(V, **(SMALL | {"num_encoder_layers": layers, "num_decoder_layers": layers})))
        source, mask, target = example()
        shapes = jax.eval_shape(model.init, jax.random.key(0), source, mask, target)
        return len(jax.jit(model.apply).lower(shapes, source, mask, target).as_text().splitlines())

    assert size(2) == size(6)


def test_every_parameter_has_logical_axes_and_layers_are_stacked(small):
    model, params = small
    learned = EncoderDecoder(dataclasses.replace(model.config, position="learned", tie_embeddings=False))
    shapes = jax.eval_shape(learned.init, jax.random.key(0), *example())["params"]
    for name, leaf in (named_leaves(params) | named_leaves(shapes)).items():
        axes = logical_axes(name, leaf.shape)
        assert len(axes) == len(leaf.shape)
        assert any(axes), name
        assert (axes[0] == "layers") == ("/layers/" in name), name
    assert logical_axes("head/out", (3, 4)) == (None, None)


@pytest.mark.parametrize("kind", ["constant", "trained"])
def test_an_output_bias_is_added_and_only_a_trained_one_learns(kind):
    model, params = make(output_bias=kind)
    source, mask, target = example()
    plain = {**params, "output_bias": jnp.zeros(V)}

    @jax.jit
    def logits(bias):
        return model.apply({"params": {**plain, "output_bias": bias}}, source, mask, target)

    bias = jnp.linspace(-1.0, 1.0, V)
    np.testing.assert_allclose(logits(bias), logits(jnp.zeros(V)) + bias[None, None], atol=1e-5)
    gradient = jax.jit(jax.grad(lambda bias: logits(bias).sum()))(bias)
    assert bool(jnp.any(gradient != 0.0)) == (kind == "trained")


def test_too_long_for_learned_positions_is_a_config_error():
    model, params = make(position="learned", max_positions=6)
    source, mask, target = example()
    with pytest.raises(ConfigError, match="7 tokens, but max_positions = 6"):
        jax.eval_shape(model.apply, {"params": params}, source, mask, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "gated-gelu"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"unroll": 0}, "unroll = 0"),
    ],
)
def test_impossible_settings_are_config_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        scratch(V, **changes)


def test_default_preset_size():
    config = scratch(12_000)
    assert isinstance(config, TransformerConfig)
    ids, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    shapes = jax.eval_shape(EncoderDecoder(config).init, jax.random.key(0), ids, mask, ids)["params"]
    attention, feed, norm = 4 * 256 * 256 + 4 * 256, 2 * 256 * 1024 + 1024 + 256, 2 * 256
    encoder, decoder = attention + feed + 2 * norm, 2 * attention + feed + 3 * norm
    expected = 12_000 * 256 + 4 * encoder + 4 * decoder + 2 * norm + 2 * 32 * 4
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)) == expected


@pytest.mark.parametrize(
    ("changes", "wider"),
    [
        ({"attention_scale": False}, {"query": 40 * 12, "wi": 40, "wo": 60}),  # T5 has the scale in its first queries
        ({"feed_forward_kernel": 3}, {"query": 40, "conv_in": 3 * 40, "conv_out": 3 * 60}),
    ],
)
def test_weights_begin_with_the_spread_of_their_inputs(changes, wider):
    sizes = {"d_model": 40, "num_heads": 4, "head_dim": 12, "d_ff": 60, "num_encoder_layers": 2}
    changes = {"tie_embeddings": False, "output_stddev": 0.3, **changes}
    options = {"init_scale": 2.0, "embedding_projection": True, "relative_slopes": False, **changes}
    model, (source, mask, target) = EncoderDecoder(scratch(200, **sizes, **options)), example()
    params = named_leaves(jax.jit(model.init)(jax.random.key(0), source, mask, target)["params"])
    inputs = {"key": 40, "value": 40, "out": 48, "embedding_projection": 40, "relative_bias": 40, **wider}
    wanted = {part: 2.0 * number**-0.5 for part, number in inputs.items()}
    wanted |= {"token_embedding": 40**-0.5, "output_embedding": 0.3}
    found = {name: np.std(leaf) for name, leaf in params.items() if name.rsplit("/", 1)[-1] in wanted}
    assert {name.rsplit("/", 1)[-1] for name in found} == wanted.keys()
    for name, spread in found.items():
        np.testing.assert_allclose(spread, wanted[name.rsplit("/", 1)[-1]], rtol=0.2, err_msg=name)


@functools.lru_cache
def begun(config):
    model = EncoderDecoder(config(V, d_model=16, num_heads=2, head_dim=8, d_ff=8))
    return jax.jit(model.init)(jax.random.key(0), *example())["params"]


@pytest.mark.parametrize("config", [scratch, t5_from_scratch])
def test_an_untrained_decoder_does_not_repeat_the_token_that_it_has_just_read(config):
    """Its states still hold that token's embedding, which is also a row of the output layer."""
    params = begun(config)
    table, scale = np.asarray(params["token_embedding"]), np.asarray(params["decoder"]["final_norm"]["scale"])
    logits = (table * scale) @ table.T
    assert abs(np.diag(logits).mean()) < logits[~np.eye(V, dtype=bool)].std()
    np.testing.assert_array_equal(np.abs(scale), 1.0)
    np.testing.assert_array_equal(params["encoder"]["final_norm"]["scale"], 1.0)


@pytest.mark.parametrize("config", [scratch, t5_from_scratch])
def test_the_relative_bias_begins_as_alibis(config):
    """-slope * distance, also for far keys, where a bucket holds several distances."""
    params = begun(config)
    for stack, sides in (("encoder", (-1, 1)), ("decoder", (-1,))):
        table = np.asarray(params[stack]["relative_bias"])
        for distance in (side * d for side in sides for d in range(100)):
            bucket = relative_bucket(
                jnp.array([[distance]]), bidirectional=stack == "encoder", num_buckets=32, max_distance=128
            )
            least = table[int(bucket[0, 0])] / -(2.0 ** np.array([-4.0, -8.0]))
            assert least[0] == least[1] <= abs(distance) <= max(1.6 * least[0], 7)


# Fusion-in-Decoder


def passages():
    rng = np.random.default_rng(2)
    source = jnp.asarray(rng.integers(1, V, size=(B, 3, S)))
    mask = jnp.asarray(np.arange(S)[None, None, :] < np.array([[7, 4, 5], [3, 7, 6]])[:, :, None])
    return source, mask


def test_fusion_of_one_passage_is_the_plain_model(small):
    model, params = small
    source, mask, target = example()
    fusion = FusionInDecoder(model)
    shapes = jax.eval_shape(fusion.init, jax.random.key(0), source[:, None], mask[:, None], target)
    assert jax.tree.map(jnp.shape, shapes["params"]) == jax.tree.map(jnp.shape, params)
    fused = apply(fusion, params, source[:, None], mask[:, None], target)
    np.testing.assert_array_equal(fused, apply(model, params, source, mask, target))


def test_changing_a_passage_leaves_the_states_of_others(small):
    model, params = small
    source, mask = passages()
    fusion = FusionInDecoder(model)
    before, after = (
        apply(fusion, params, given, mask, method="encode").reshape(B, 3, S, -1)
        for given in (source, source.at[:, 1].add(-1))
    )
    np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])
    assert np.abs(before[:, 1] - after[:, 1]).max() > 1e-3


def test_a_fully_masked_passage_changes_nothing(small):
    model, params = small
    source, mask = passages()
    target = example()[2]
    fusion = FusionInDecoder(model)
    expected = apply(fusion, params, source, mask, target)
    longer = jnp.concatenate([source, source[:, :1]], axis=1)
    longer_mask = jnp.concatenate([mask, jnp.zeros_like(mask[:, :1])], axis=1)
    np.testing.assert_allclose(apply(fusion, params, longer, longer_mask, target), expected, atol=1e-5, rtol=0)


def test_fusion_reads_every_passage_and_decodes_from_a_cache(small):
    model, params = small
    source, mask = passages()
    target = example()[2]
    fusion = FusionInDecoder(model)
    expected = apply(fusion, params, source, mask, target)
    for k in range(3):
        changed = apply(fusion, params, source.at[:, k].add(-1), mask, target)
        assert np.abs(changed - expected).max() > 1e-3
    states = apply(fusion, params, source, mask, method="encode")
    cache = apply(fusion, params, states, mask, num_hypotheses=1, max_length=T, method="start_cache")
    tokens = jnp.full((B, 1), model.config.start_id)
    for t in range(T):
        logits, cache = apply(fusion, params, tokens, cache, method="step")
        np.testing.assert_allclose(logits[:, 0], expected[:, t], rtol=1e-5, atol=1e-5)
        tokens = target[:, t : t + 1]
