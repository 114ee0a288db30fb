"""Decoder-only families against PyTorch: logits, gradients, rotations, and search through their caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from empax.core.config import ConfigError
from empax.decoding.settings import DecodeSettings, num_hypotheses
from empax.interop.architectures import ARCHITECTURES
from empax.interop.parameters import export_params, import_params
from empax.models.decoder_only import DecoderOnly, gpt2_config, llama_config
from empax.models.prompted import PromptedDecoder
from empax.models.rotary import rotation_rates, rotation_size
from empax.parts.generator.decoder import Decoder
from tests.decoding.hugging_face import found_by

VOCAB, EOS, PAD, NEW = 97, 1, 0, 9
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def tiny_llama(**changes):
    """Two query heads to a key head, and 4 * 10 is not 24; its rotations are kept, mixed and slowed."""
    settings = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 512}
    settings |= {"rope_parameters": ROPE, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes)))


def tiny_gpt2():
    settings = {"vocab_size": VOCAB, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 32, "n_inner": 37}
    settings |= {"bos_token_id": EOS, "eos_token_id": EOS, "resid_pdrop": 0.2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))


def tiny_kin(kind, **changes):
    """A Qwen2, Qwen3 or Mistral of the sizes of `tiny_llama`."""
    fields = tiny_llama().config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    fields = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    config, model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    return model(config(**(fields | changes)))


def tiny_opt(**changes):
    settings = {"vocab_size": VOCAB, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "ffn_dim": 37}
    settings |= {"max_position_embeddings": 32, "pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**(settings | changes)))


LATE = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MAKERS = {
    "llama": tiny_llama,
    "llama-tied": lambda: tiny_llama(
        tie_word_embeddings=True,
        attention_bias=True,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "gpt2": tiny_gpt2,
    "llama-linear": lambda: tiny_llama(rope_parameters=LINEAR),
    "qwen2": lambda: tiny_kin("Qwen2", rope_parameters=YARN, **LATE),
    "qwen3": lambda: tiny_kin("Qwen3", tie_word_embeddings=True),
    "mistral": lambda: tiny_kin("Mistral", sliding_window=5),
    "opt": tiny_opt,
    "opt-350m": lambda: tiny_opt(do_layer_norm_before=False, word_embed_proj_dim=10, tie_word_embeddings=False),
}
QUICK = ("llama-tied", "gpt2", "qwen2", "opt")
"""One of each kind; the others differ from one of them by a setting."""

GENERATED = [pytest.param("llama", marks=pytest.mark.slow), "llama-tied", "gpt2"]
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "opt", "opt-350m")]


@functools.cache
def models(name, scale=1.0):
    """A tiny random model twice, its matrices of the size `scale`."""
    torch.manual_seed(0)
    theirs = MAKERS[name]().eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * noise + (not key.endswith("bias")))
            else:
                parameter.copy_(noise * scale * parameter.shape[-1] ** -0.5)
        # No token is likelier than the others but for the end.
        for weight in {theirs.get_input_embeddings().weight, theirs.lm_head.weight}:
            weight /= weight.norm(dim=1, keepdim=True)
        theirs.lm_head.weight[EOS] *= 8.0 if name == "opt-350m" else 2.0  # directions of 10 numbers have little room
    architecture = theirs.config.model_type
    config = ARCHITECTURES[architecture].config(theirs.config.to_dict())
    tensors = {key: value.numpy() for key, value in theirs.state_dict().items()}
    return theirs, DecoderOnly(config), import_params(architecture, tensors, config)


def prompts(num, width, left):
    """Random prompts of different lengths; the first has no padding, the second a single token."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, width + 1, num)
    lengths[:2] = width, 1
    rows = [rng.integers(2, VOCAB, length) for length in lengths]
    places = np.arange(width)[None]
    mask = places >= width - lengths[:, None] if left else places < lengths[:, None]
    tokens = np.full((num, width), PAD)
    tokens[mask] = np.concatenate(rows)
    return jnp.asarray(tokens), jnp.asarray(mask)


def assert_close(value, expected):
    expected = np.asarray(expected)
    # Sums that cancel: rounding is relative to what was summed, so to the largest element.
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=3e-6 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.oracle
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in MAKERS])
def test_logits_and_gradients_match_torch(name):
    theirs, model, params = models(name)
    both = [prompts(4, 11, left) for left in (True, False)]
    tokens, mask = (np.concatenate([np.asarray(item) for item in items]) for items in zip(*both, strict=True))
    weights = np.random.default_rng(1).normal(size=(8, 11, VOCAB)).astype(np.float32) * mask[:, :, None]

    theirs.zero_grad()
    expected = theirs(
        torch.tensor(tokens).long(),
        attention_mask=torch.tensor(mask).long(),
        position_ids=torch.tensor(np.maximum(np.cumsum(mask, 1) - 1, 0)),
    ).logits
    (expected * torch.tensor(weights)).sum().backward()

    def loss(params):
        logits = model.apply({"params": params}, jnp.asarray(tokens), jnp.asarray(mask))
        return jnp.sum(logits * weights), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert logits.dtype == jnp.float32
    assert_close(np.asarray(logits)[mask], expected.detach().numpy()[mask])
    ours = export_params(theirs.config.model_type, grads, model.config)
    wanted = {key: value.grad.numpy() for key, value in theirs.named_parameters()}
    assert set(ours) == set(wanted)
    for key, grad in wanted.items():
        if key.endswith("c_attn.bias"):  # a key bias moves all logits of a query alike: its gradient is rounding
            size = grad.shape[0] // 3
            assert np.abs(ours[key][size : 2 * size]).max() < 1e-5 * np.abs(grad).max()
            ours[key][size : 2 * size] = grad[size : 2 * size]
        elif key.endswith("k_proj.bias") and model.config.position == "learned":
            assert max(np.abs(ours[key]).max(), np.abs(grad).max()) < 1e-5
            continue
        assert_close(ours[key], grad)


def decode_ours(model, params, settings, tokens, mask):
    decoder = Decoder(settings, None, EOS, PAD, counts_prompt=False)
    return jax.jit(lambda *inputs: decoder(PromptedDecoder(model), *inputs, jax.random.key(0)))(params, tokens, mask)


def decode_theirs(model, num, new, tokens, mask):
    """[N, num, new] tokens, whether each row ended, and scores: log-probabilities over lengths; `num` = 1 is greedy."""
    sizes = {"skip": tokens.shape[1], "num": num, "new": new, "max_new_tokens": new}
    found, scores = found_by(model, tokens, mask, eos=EOS, pad=PAD, **sizes)
    return found, (found == EOS).any(-1), scores


SEARCHES = pytest.mark.parametrize(
    "settings", [DecodeSettings("greedy", NEW), DecodeSettings("beam", NEW)], ids=["greedy", "beam"]
)


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*GENERATED, *MORE])
@SEARCHES
def test_generated_tokens_are_hugging_faces(name, settings):
    theirs, model, params = models(name, scale=2.0)  # so large that responses differ and end
    num = num_hypotheses(settings)
    tokens, mask = prompts(16, 8, left=True)
    found = decode_ours(model, params, settings, tokens, mask)
    expected, ends, scores = decode_theirs(theirs, num, NEW, tokens, mask)
    np.testing.assert_array_equal(found.tokens, expected)
    assert ends.any()
    assert not ends.all()
    assert len(np.unique(expected[:, 0], axis=0)) > 8
    if scores is not None:
        lengths = np.where(ends, (expected == EOS).argmax(-1) + 1, NEW)
        np.testing.assert_allclose(found.log_probs / lengths, scores, rtol=1e-4, atol=1e-5)
    right = decode_ours(model, params, settings, *prompts(16, 8, left=False))
    np.testing.assert_array_equal(right.tokens, expected)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "unroll"), [("qwen3", 1), ("opt-350m", 1), ("qwen2", 2)])
def test_cached_steps_give_the_logits_of_the_whole(name, unroll):
    """Also after hypotheses have changed places, and for a row of nothing but padding."""
    _, model, params = models(name)
    model = DecoderOnly(dataclasses.replace(model.config, unroll=unroll))
    tokens, mask = prompts(3, 6, left=False)
    mask = mask.at[2].set(False)
    apply = functools.partial(model.apply, {"params": params})
    prompted = functools.partial(PromptedDecoder(model).apply, {"params": params})
    states = jax.jit(functools.partial(prompted, method="encode"))(tokens, mask)
    cache = jax.jit(functools.partial(prompted, num_hypotheses=2, max_length=4, method="start_cache"))(states, mask)
    assert cache.cross[0][0].shape == (3, model.config.num_kv_heads, model.config.head_dim, 6)  # once per prompt
    step = jax.jit(functools.partial(apply, method="step"))
    first, cache = step(jnp.repeat(states.start[:, None], 2, axis=1), cache)
    np.testing.assert_array_equal(first[:, 0], first[:, 1])
    read = np.array([[5, 6], [7, 8], [9, 10]])
    _, cache = step(jnp.asarray(read), cache)
    parents = np.array([[1, 1], [1, 0], [0, 0]])
    last, _ = step(jnp.full((3, 2), 11), cache.reorder(jnp.asarray(parents)))
    assert np.isfinite(last).all()
    places = [(row, k, real) for row, real in enumerate([6, 1]) for k in range(2)]
    whole = np.zeros((4, 8), np.int32)
    for line, (row, k, real) in zip(whole, places, strict=True):
        line[: real + 2] = *tokens[row, :real], read[row, parents[row, k]], 11
    expected = jax.jit(apply)(jnp.asarray(whole), jnp.asarray(whole > 0))
    for logits, (row, k, real) in zip(expected, places, strict=True):
        assert_close(first[row, k], logits[real - 1])
        assert_close(last[row, k], logits[real + 1])


def test_what_is_read_on_behind_a_prompt_is_what_the_whole_says():
    """With windows that reach into the prompt, but not through it."""
    _, model, params = models("mistral")
    prompt, mask = prompts(4, 8, left=False)
    rest = jnp.asarray(np.random.default_rng(2).integers(2, VOCAB, (4, 5)))
    apply = functools.partial(model.apply, {"params": params})

    @jax.jit
    def both(prompt, mask, rest):
        _, key, value = apply(prompt, mask, method="read")
        joined = jnp.concatenate([prompt, rest], axis=1), jnp.concatenate([mask, jnp.ones(rest.shape, bool)], axis=1)
        return apply(rest, key, value, mask, method="read_on"), apply(*joined, method="hidden")[:, prompt.shape[1] :]

    found, whole = both(prompt, mask, rest)
    assert_close(found, whole)
    wide = DecoderOnly(dataclasses.replace(model.config, windows=()))
    other = jax.jit(functools.partial(wide.apply, method="hidden"))({"params": params}, prompt, mask)
    narrow = jax.jit(functools.partial(apply, method="hidden"))(prompt, mask)
    assert_close(other[0, :5], narrow[0, :5])
    assert np.abs(other[0, 5:] - narrow[0, 5:]).max() > 0.1


@pytest.mark.oracle
@pytest.mark.parametrize(
    "rope",
    [
        ROPE,
        LINEAR,
        {"rope_type": "default", "rope_theta": 500.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.7},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096},
        YARN | {"beta_fast": 1.0},
    ],
)
def test_rotation_rates_are_those_of_llama(rope):
    theirs = transformers.LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope)
    config = llama_config(theirs.to_dict())
    found = rotation_rates(config.head_dim, config.rope_theta, config.rope_scaling)
    plain = rope["rope_theta"] ** -(np.arange(0, 128, 2) / 128)
    kind = rope["rope_type"]
    expected, size = (plain, 1.0) if kind == "default" else ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert rotation_size(config.rope_scaling) == pytest.approx(size)
    assert (size != 1.0) == (kind == "yarn")
    slowed = found / plain
    assert ((slowed > 0.2) & (slowed < 0.9)).any() == (kind != "default")


def test_run_settings_change_the_run_alone():
    theirs, model, params = models("llama")
    tokens, mask = prompts(4, 11, left=True)
    run = {"remat": "minimal", "unroll": 2, "dropout": 0.5}
    config = llama_config(theirs.config.to_dict(), **run)
    assert {name: getattr(config, name) for name in run} == run

    def logits(config, **options):
        apply = jax.jit(functools.partial(DecoderOnly(config).apply, **options))
        return apply({"params": params}, tokens, mask)

    plain = logits(model.config)
    assert_close(np.asarray(logits(config))[mask], np.asarray(plain)[mask])
    dropped = logits(config, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert np.abs(dropped - plain)[mask].max() > 0.1
    half = logits(dataclasses.replace(model.config, dtype="bfloat16"))
    assert half.dtype == jnp.float32
    assert 1e-3 < np.abs(half - plain)[mask].mean() / np.abs(plain)[mask].mean() < 5e-2


def test_old_and_new_config_files_read_alike():
    new = tiny_llama().config.to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {key: value for key, value in ROPE.items() if key != "rope_theta"}}
    assert llama_config(old) == llama_config(new)
    assert gpt2_config(tiny_gpt2().config.to_dict()).dropout == 0.2


ROPES = [
    ({"rope_type": "longrope", "factor": 2.0}, "rope_parameters.rope_type = 'longrope'.* linear, llama3, yarn"),
    ({"rope_type": "yarn"}, "rope_type = 'yarn' lacks factor"),
    (YARN | {"factor": 0.5}, "factor = 0.5 must be at least 1"),
    (YARN | {"beta_slow": 40.0}, "beta_slow = 40.0 must be above 0 and at most beta_fast = 32"),
    (YARN | {"attention_factor": -1.0}, "attention_factor = -1.0 must be above 0"),
    (LINEAR | {"factor": 0.0}, "factor = 0.0 must be at least 1"),
    (ROPE | {"factor": None}, "lacks factor"),
    (ROPE | {"high_freq_factor": 1.0}, "below high_freq_factor = 1.0"),
    (ROPE | {"low_freq_factor": 0.0}, "low_freq_factor = 0.0 must be above 0"),
    (ROPE | {"original_max_position_embeddings": 0}, "original_positions = 0"),
    (ROPE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"rope_parameters": rope}, message) for rope, message in ROPES),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type = "),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "swish2"}, "hidden_act of a Llama = 'swish2'"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"attention_dropout": 1.0}, r"dropout = 1.0 must lie in \[0, 1\)"),
    ],
)
def test_llama_that_is_not_supported_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        llama_config(tiny_llama().config.to_dict() | changes)


def test_settings_without_sense_are_errors():
    with pytest.raises(ConfigError, match="dtype = 'float8'"):
        llama_config("tiny", dtype="float8")


def test_more_tokens_than_learned_positions_are_an_error():
    _, model, params = models("gpt2")
    tokens, mask = prompts(2, 30, left=True)
    apply = functools.partial(PromptedDecoder(model).apply, {"params": params})
    states = jax.eval_shape(functools.partial(apply, method="encode"), tokens, mask)
    start = functools.partial(apply, num_hypotheses=1, method="start_cache")
    with pytest.raises(ConfigError, match="33 tokens, but max_positions = 32"):
        jax.eval_shape(functools.partial(start, max_length=3), states, mask)
    jax.eval_shape(functools.partial(start, max_length=2), states, mask)
