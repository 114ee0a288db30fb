import pytest

from tests.end_to_end.conftest import write_model


@pytest.fixture(scope="session")
def bart_folder(tmp_path_factory):
    """A tiny random BART with a tokenizer."""
    return write_model(
        tmp_path_factory.mktemp("bart"), "BartForConditionalGeneration", d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=300, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=2,
    )  # fmt: skip
