import pytest

from empax.core.config import ConfigError
from empax.models.bart import bart_config, blenderbot_config

FIELDS = {"vocab_size": 37, "d_model": 6, "encoder_layers": 1, "decoder_layers": 2}
FIELDS |= {f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")}
FIELDS |= {f"{stack}_ffn_dim": 8 for stack in ("encoder", "decoder")}


def test_settings_that_tell_the_two_apart():
    bart, blenderbot = bart_config(FIELDS, dropout=0.3), blenderbot_config(FIELDS, unroll=2)
    assert (bart.pre_norm, bart.final_norm, bart.embedding_norm, bart.position_rows()) == (False, False, True, 1026)
    assert (bart.start_id, bart.dropout, bart.head_dim, bart.num_decoder_layers) == (2, 0.3, 3, 2)
    assert (blenderbot.pre_norm, blenderbot.final_norm, blenderbot.embedding_norm) == (True, True, False)
    assert (blenderbot.start_id, blenderbot.position_rows(), blenderbot.unroll) == (1, 128, 2)


def test_presets():
    """Their sizes: tests/interop/test_encoder_decoders.py; unknown ones: test_huggingface.py there."""
    assert not bart_config("facebook/bart-base").embed_scale
    assert blenderbot_config("facebook/blenderbot-400M-distill").embed_scale


EITHER = [
    ({"decoder_ffn_dim": 9}, "encoder_ffn_dim = 8 and decoder_ffn_dim = 9 must be equal"),
    ({"decoder_attention_heads": 3}, "attention_heads = 3 must be equal"),
    ({"d_model": 7}, "d_model = 7 must be a multiple of encoder_attention_heads = 2"),
    ({"activation_function": "tanh"}, "activation_function of a B.* = 'tanh' is not supported here; it is one of"),
    ({"static_position_embeddings": True}, "static_position_embeddings = True"),
    ({"normalize_before": None}, "normalize_before = None"),
]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        *((make, *case) for make in (bart_config, blenderbot_config) for case in EITHER),
        (bart_config, {"d_model": None, "encoder_layers": None}, "a BART lacks d_model, encoder_layers"),
        (bart_config, {"normalize_before": True}, "normalize_before = True of a BART must be False"),
        (blenderbot_config, {"add_final_layer_norm": False}, "add_final_layer_norm = False of a BlenderBot must be"),
    ],
)
def test_what_is_not_supported_is_a_config_error_that_names_the_family(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(FIELDS | changes)
