"""What the `config.json` of each decoder-only family says, and what is refused."""

import pytest
import transformers

from empax.core.config import ConfigError
from empax.interop.huggingface import model_config
from empax.models.decoder_families import (
    gpt2_config,
    mistral_config,
    opt_config,
    qwen2_config,
    qwen3_config,
)
from empax.models.rotary import YarnScaling

SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
OPT = {"vocab_size": 37, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 64}
GPT2 = {"vocab_size": 37, "n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 64}


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Llama", SIZES | {"num_key_value_heads": None}),
        ("Qwen2", SIZES),
        ("Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen2", SIZES | {"use_sliding_window": True, "max_window_layers": 0, "num_key_value_heads": None}),
        ("Qwen3", SIZES | {"attention_bias": True}),
        ("Mistral", SIZES),
        ("Mistral", SIZES | {"sliding_window": None, "head_dim": 10}),
        ("OPT", OPT),
        ("OPT", OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False, "enable_bias": False}),
    ],
)
def test_fields_that_are_absent_mean_what_hugging_face_takes(kind, fields):
    """Windows too: Hugging Face keeps them as the types of the layers."""
    theirs = getattr(transformers, f"{kind}Config")(**fields).to_dict()
    assert model_config({"model_type": kind.lower(), **fields}) == model_config(theirs)


def test_windows_and_scaling_are_those_of_older_files():
    late = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    assert qwen2_config(SIZES | late).windows == qwen3_config(SIZES | late).windows == (0, 5, 5)
    for none in ({"use_sliding_window": False}, {"sliding_window": None}):
        assert qwen2_config(SIZES | late | none).windows == ()
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert qwen2_config(SIZES | yarn).rope_scaling == YarnScaling(factor=4.0, original_positions=64)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (qwen2_config, {"num_hidden_layers": None}, "a Qwen2 lacks num_hidden_layers"),
        (qwen2_config, {"layer_types": ["full_attention"]}, "layer_types of a Qwen2 must name one of full_attention, "),
        (qwen3_config, {"layer_types": ["linear_attention"] * 3}, "for each of 3 layers, not .'linear_attention'"),
        (qwen3_config, {"hidden_act": "relu"}, "hidden_act of a Qwen3 = 'relu'"),
        (mistral_config, {"sliding_window": 0}, "sliding_window = 0 of a Mistral must be a whole number of at least 1"),
        (mistral_config, {"layer_types": ["full_attention"] * 3}, "layer_types = .* of a Mistral is not supported"),
        (mistral_config, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type = 'dynamic' of a Mi"),
        (opt_config, {"ffn_dim": None}, "an OPT lacks ffn_dim"),
        (opt_config, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False of an OPT"),
        (opt_config, {"activation_function": "tanh"}, "activation_function of an OPT = 'tanh'"),
        (opt_config, {"num_attention_heads": 5}, "multiple of num_attention_heads = 5 in an OPT"),
        (opt_config, {"word_embed_proj_dim": -1}, "embedding_size = -1 must be at least 0"),
        (gpt2_config, {"n_positions": None}, "lacks n_positions"),
        (gpt2_config, {"activation_function": "tanh"}, "activation_function of a GPT-2 = 'tanh'"),
        (gpt2_config, {"scale_attn_weights": False}, "scale_attn_weights = False"),
        (gpt2_config, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (gpt2_config, {"add_cross_attention": True}, "add_cross_attention = True"),
        (gpt2_config, {"n_head": 5}, "multiple of n_head = 5"),
    ],
)
def test_what_is_not_supported_is_named(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make({opt_config: OPT, gpt2_config: GPT2}.get(make, SIZES) | changes)
