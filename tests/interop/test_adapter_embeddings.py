"""Adapters on embeddings that a model has under several names: refused, with advice that gives PEFT's logits."""

import pytest
import torch
import transformers

from empax.core.config import ConfigError
from empax.interop.huggingface import load_pretrained

VOCAB = 37
SIZES = {"vocab_size": VOCAB, "hidden_size": 20, "num_attention_heads": 2, "intermediate_size": 27}
LAYERS = {f"{stack}_{key}": 2 for stack in ("encoder", "decoder") for key in ("layers", "attention_heads")}
MODELS = {
    "t5": transformers.T5Config(
        vocab_size=VOCAB, d_model=20, d_kv=5, num_heads=3, d_ff=28, num_layers=2, decoder_start_token_id=0
    ),
    "bart": transformers.BartConfig(
        vocab_size=VOCAB, d_model=20, encoder_ffn_dim=26, decoder_ffn_dim=26, max_position_embeddings=19, **LAYERS
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=20, n_head=4, n_layer=2, n_positions=23, bos_token_id=1, eos_token_id=1
    ),
    "qwen2": transformers.Qwen2Config(
        **SIZES, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=23, tie_word_embeddings=True
    ),
}
QUERIES = {"t5": "q", "gpt2": "c_attn"}


def auto(kind):
    return transformers.AutoModelForSeq2SeqLM if kind in ("t5", "bart") else transformers.AutoModelForCausalLM


@pytest.fixture(scope="module")
def bases(tmp_path_factory, oracle):
    root = tmp_path_factory.mktemp("tied")
    for kind, config in MODELS.items():
        torch.manual_seed(0)
        oracle.perturbed(auto(kind).from_config(config)).save_pretrained(root / kind)
    return root


@pytest.fixture
def written(bases, tmp_path, oracle):
    """Makes an adapter of PEFT's on one of the models."""

    def write(kind, *, targets=(), **settings):
        model = auto(kind).from_pretrained(bases / kind)
        targets = [QUERIES.get(kind, "q_proj"), *targets]
        return oracle.lora_of(model, tmp_path / "adapter", target_modules=targets, **settings)

    return write


TIED = {
    "on the head of GPT-2": ("gpt2", {"targets": ["lm_head"]}),
    "on the embedding of Qwen2": ("qwen2", {"targets": ["embed_tokens"]}),
    "on both of Qwen2": ("qwen2", {"targets": ["lm_head"], "ensure_weight_tying": True}),
    "on the head of T5": ("t5", {"targets": ["lm_head"]}),
    "on the head of BART": ("bart", {"targets": ["lm_head"]}),
    "the head of BART": ("bart", {"modules_to_save": ["lm_head"]}),
    "the head of T5": ("t5", {"modules_to_save": ["lm_head"]}),
    "the embedding of GPT-2": ("gpt2", {"modules_to_save": ["wte"]}),
    "two of Qwen2 that differ": ("qwen2", {"modules_to_save": ["lm_head", "embed_tokens"]}),
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", TIED)
def test_a_change_of_one_of_two_tied_embeddings_is_refused_with_advice_that_works(
    case, written, bases, tmp_path, oracle
):
    kind, settings = TIED[case]
    expected = oracle.expected_of(written(kind, **settings))
    with pytest.raises(ConfigError) as caught:
        load_pretrained(tmp_path / "adapter")
    message = str(caught.value)
    assert ("the adapter is on" if case.startswith("on") else "the adapter replaces") in message
    if kind in ("t5", "bart"):
        message = message.replace("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")  # as it says
    names = {"BASE": str(bases / kind), "FOLDER": str(tmp_path / "adapter"), "OUT": str(tmp_path / "out")}
    oracle.follow(message, names)
    _, config, params = load_pretrained(tmp_path / "out")
    oracle.assert_close(oracle.logits_of(config, params), expected)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("settings", [{"targets": ["embed_tokens"]}, {"modules_to_save": ["shared"]}])
def test_an_embedding_of_one_stack_is_refused(kind, settings, written, tmp_path):
    written(kind, **settings)
    with pytest.raises(ConfigError, match=r"changes (.*\.)?(embed_tokens|shared) alone, but encoder and decoder share"):
        load_pretrained(tmp_path / "adapter")


@pytest.mark.oracle
def test_two_embeddings_that_stay_tied_are_read(written, tmp_path, oracle):
    theirs = written("qwen2", modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    _, config, params = load_pretrained(tmp_path / "adapter")
    oracle.assert_close(oracle.logits_of(config, params), oracle.expected_of(theirs))
