"""Whether a T5 has a head of its own, and whether its logits are scaled: as transformers reads the same folder."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from empax.core.config import ConfigError
from empax.decoding.settings import DecodeSettings
from empax.interop.export import Generation, export_generator
from empax.interop.huggingface import load_config, load_pretrained, model_config
from empax.interop.readers import open_tensors
from empax.models.transformer import EncoderDecoder
from tests.interop import oracle
from tests.interop.tiny import VOCAB, class_of, tiny


def folder_of(path, *, kind="t5", head=False, shared=True, **said):
    """What transformers saves of a T5; `head`: with one of its own; `said`: fields of config.json, None = none."""
    tiny(kind, feed_forward_proj="gated-gelu").save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    if head:
        tensors["lm_head.weight"] = np.random.default_rng(0).normal(size=(VOCAB, 20)).astype(np.float32)
    elif not shared:
        tensors["lm_head.weight"] = tensors["shared.weight"].copy()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text()) | said
    (path / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return path


# What config.json says, and whether the file has a head of its own.
CASES = {
    "v1.0 with a head of its own": ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True),
    "the same, said to have one": ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    "v1.0 of transformers 4, the same": ({"tie_word_embeddings": True, "scale_decoder_outputs": None}, True),
    "v1.1 of transformers 4": ({"tie_word_embeddings": False, "scale_decoder_outputs": None}, True),
    "v1.1 of transformers 5": ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True),
    "v1.1 with one embedding": ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
    "the same of transformers 4": ({"tie_word_embeddings": False, "scale_decoder_outputs": None}, False),
    "v1.0": ({"tie_word_embeddings": None, "scale_decoder_outputs": None}, False),
}


MT5 = [({"tie_word_embeddings": tied}, head) for tied in (False, True) for head in (False, True)]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "said", "head"), [*(("t5", *case) for case in CASES.values()), *(("mt5", *case) for case in MT5)]
)
def test_head_and_scale_are_those_of_transformers(kind, said, head, tmp_path):
    folder = folder_of(tmp_path, kind=kind, head=head, **said)
    theirs = class_of(kind).from_pretrained(folder)
    config = model_config(load_config(folder))
    assert config.tie_embeddings == (theirs.lm_head.weight is theirs.shared.weight) == (not head)
    assert config.output_scale == (kind == "t5" and theirs.config.scale_decoder_outputs)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["v1.0 with a head of its own", "v1.1 with one embedding"])
def test_logits_and_gradients_are_those_of_transformers(case, tmp_path):
    said, head = CASES[case]
    folder = folder_of(tmp_path / "saved", head=head, **said)
    assert_as_transformers(folder)
    pretrained = load_pretrained(folder)
    greedy = Generation(dataclasses.asdict(DecodeSettings()), start_id=0, eos_id=1, pad_id=0)
    export_generator(tmp_path / "exported", EncoderDecoder(pretrained.config), pretrained.params, NoTokenizer(), greedy)
    assert_as_transformers(tmp_path / "exported")
    fields = json.loads((tmp_path / "exported" / "config.json").read_text())
    # Transformers 4 ties only if this is true; else it draws a head that is absent.
    assert fields["tie_word_embeddings"] or "lm_head.weight" in open_tensors(tmp_path / "exported")


class NoTokenizer:
    def save(self, folder):
        pass


def assert_as_transformers(folder):
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    _, config, params = load_pretrained(folder)
    rng = np.random.default_rng(1)
    source, target = (rng.integers(2, VOCAB, size=(2, length)) for length in (6, 5))
    mask = np.ones(source.shape, bool)
    oracle.assert_generators_match(model, config, params, name="t5", source=source, source_mask=mask, target=target)


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_the_embedding_once_more_is_no_head_of_its_own(tied, tmp_path):
    folder = folder_of(tmp_path, shared=False, tie_word_embeddings=tied)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    assert theirs.lm_head.weight is theirs.shared.weight
    assert model_config(load_config(folder)).tie_embeddings


def test_without_weights_config_json_is_taken_at_its_word(tmp_path):
    folder = folder_of(tmp_path, tie_word_embeddings=False, scale_decoder_outputs=None)
    (folder / "model.safetensors").unlink()
    config = model_config(load_config(folder))
    assert (config.tie_embeddings, config.output_scale) == (False, False)


# Adapters on embeddings that a model has under several names

QUERIES = {"t5": "q", "gpt2": "c_attn"}


@pytest.fixture
def bases(saved):
    """The folder of a model whose head is its embedding."""
    return functools.partial(saved, tie_word_embeddings=True)


@pytest.fixture
def written(adapter, bases):
    """Makes an adapter of PEFT's on one of the models."""

    def write(kind, *, targets=(), **settings):
        targets = [QUERIES.get(kind, "q_proj"), *targets]
        return adapter(kind, base=bases(kind), target_modules=targets, **settings)

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
def test_a_change_of_one_of_two_tied_embeddings_is_refused_with_advice_that_works(case, written, bases, tmp_path):
    kind, settings = TIED[case]
    expected = oracle.expected_of(written(kind, **settings))
    with pytest.raises(ConfigError) as caught:
        load_pretrained(tmp_path / "adapter")
    message = str(caught.value)
    assert ("the adapter is on" if case.startswith("on") else "the adapter replaces") in message
    if kind in ("t5", "bart"):
        message = message.replace("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")  # as it says
    names = {"BASE": str(bases(kind)), "FOLDER": str(tmp_path / "adapter"), "OUT": str(tmp_path / "out")}
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
def test_two_embeddings_that_stay_tied_are_read(written, tmp_path):
    theirs = written("qwen2", modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    _, config, params = load_pretrained(tmp_path / "adapter")
    oracle.assert_close(oracle.logits_of(config, params), oracle.expected_of(theirs))
