"""Encoder-decoders and encoders from transformers' folders and back.

Each against PyTorch: logits or states and gradients, the three kinds of files, the export.
"""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import torch
import transformers as t
from flax import serialization

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.bpe import train_bpe
from empax.data.tokenizer_folders import load_tokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.export import Generation, export_generator, export_retriever
from empax.interop.grown_vocabulary import grow_vocabulary
from empax.interop.huggingface import load_config, load_pretrained, model_config
from empax.interop.parameters import export_params
from empax.interop.pretrained import GeneratorSettings, load_generator
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models.bert import BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import T5Encoder
from empax.models.transformer import EncoderDecoder, TransformerConfig
from tests.interop import oracle
from tests.interop.tiny import tiny

TOKENIZER = train_bpe(["a b"], vocab_size=300)
VOCAB = 303
MODELS = {
    "t5": {},
    "t5-gated": {"own_head": True, "feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
    "bart": {"scale_embedding": True},
    "bart-untied": {"own_head": True},
    "blenderbot": {"scale_embedding": True},
    "mt5": {"own_head": True},
    "mt5-tied": {},
    "mbart": {"scale_embedding": True, "decoder_start_token_id": 300},
    "marian": {"scale_embedding": True, "activation_function": "swish"}
    | {"pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1},
    "pegasus": {"activation_function": "relu"},
    "pegasus-untied": {"own_head": True, "scale_embedding": True},
    "t5-encoder": {},
    "mt5-encoder": {},
    "bert": {},
    "roberta": {"type_vocab_size": 1},
    "mpnet": {},
    "dpr-context": {},
    "dpr-question": {},
    "xlm-roberta": {"pad_token_id": 4, "type_vocab_size": 1},
    "distilbert": {},
    "electra": {},
    "electra-wide": {"embedding_size": 20},
}
OTHERS = {"llama": {"tie_word_embeddings": False}, "gpt2": {}}
"""Those whose files alone are looked at here."""
CLASSES = {"t5-encoder": "T5EncoderModel", "mt5-encoder": "MT5EncoderModel"}
CLASSES |= {"dpr-context": "DPRContextEncoder", "dpr-question": "DPRQuestionEncoder"}
UNTIED = {"mt5", "bart-untied", "pegasus-untied", "t5-gated", "llama"}
VARIANTS = {"mt5-tied", "bart-untied", "pegasus-untied", "mt5-encoder", "electra-wide", "dpr-question"}
NEAR = {"mt5", "mt5-tied", "mt5-encoder", "pegasus", "pegasus-untied", "xlm-roberta", "electra-wide", "blenderbot"}
"""Their layers are those of a T5, a BART, an mBART and a RoBERTa, which the others have."""
BOTH = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in NEAR)) for kind in MODELS]
GENERATORS, ENCODERS = BOTH[:11], BOTH[11:]
FREE = {"final_logits_bias"} | {
    f"model.{stack}.embed_{what}.weight" for stack in ("encoder", "decoder") for what in ("positions", "tokens")
}
"""What of BART's kin may be no parameter in PyTorch: a buffer, frozen, or the token embedding once more."""


def name_of(kind):
    return kind if kind == "xlm-roberta" else kind.partition("-")[0]


@functools.cache
def made(kind):
    model = tiny(CLASSES.get(kind, name_of(kind)), vocab_size=VOCAB, **(MODELS | OTHERS)[kind])
    if kind in ("bart-untied", "pegasus-untied"):  # said afterwards, since its stacks share one embedding
        model.config.tie_word_embeddings = False
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random model of a kind and its folder, as transformers writes it."""

    @functools.cache
    def save(kind):
        model, folder = made(kind), tmp_path_factory.mktemp(kind)
        if hasattr(model, "lm_head"):
            assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight) == (kind not in UNTIED)
        model.save_pretrained(folder)
        return model, folder

    return save


def exported(source, folder, config, params):
    """Writes the model again, as a run does, and reads it by transformers."""
    base = load_config(source)
    if isinstance(config, TransformerConfig) and config.num_decoder_layers:
        settings = dataclasses.asdict(DecodeSettings(max_tokens=5))
        model = EncoderDecoder(config)
        export_generator(folder, model, params, TOKENIZER, Generation(settings, 2, 1, 0), base=base)
    else:
        encoder = encoder_of(config)
        export_retriever(folder, DualEncoder(encoder), {"encoder": params}, TOKENIZER, max_tokens=16, base=base)
    fields = json.loads((folder / "config.json").read_text())
    model, info = getattr(t, fields["architectures"][0]).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(name for names in info.values() for name in names if "pooler" not in str(name)), info
    return model


def encoder_of(config):
    return T5Encoder(config) if isinstance(config, TransformerConfig) else BertEncoder(config)


def assert_same_tensors(model, expected):
    tensors = model.state_dict()
    for name, value in expected.state_dict().items():
        if name in FREE and "positions" in name:  # as float32 gives them
            np.testing.assert_allclose(tensors[name], value, atol=1e-5)
        else:
            assert torch.equal(tensors[name], value), name


@pytest.mark.oracle
@pytest.mark.parametrize("kind", GENERATORS)
def test_logits_and_gradients_of_a_generator_are_those_of_torch_and_it_is_written_back(kind, saved, tmp_path):
    model, folder = saved(kind)
    name, config, params = load_pretrained(folder)
    assert (name, config.tie_embeddings) == (name_of(kind), kind not in UNTIED)
    pad = model.config.pad_token_id
    source, source_mask = oracle.ids_and_mask(3, 17, VOCAB - 1, pad=1 if kind == "marian" else pad)
    target = np.random.default_rng(2).integers(5, VOCAB - 1, size=(3, 6))
    oracle.assert_generators_match(
        model, config, params, name=name, source=source, source_mask=source_mask, target=target, frozen=FREE
    )
    again = exported(folder, tmp_path / "out", config, params)
    assert_same_tensors(again, model)
    assert again.generation_config.decoder_start_token_id == model.config.decoder_start_token_id


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ENCODERS)
def test_states_and_gradients_of_an_encoder_are_those_of_torch_and_it_is_written_back(kind, saved, tmp_path):
    model, folder = saved(kind)
    name, config, params = load_pretrained(folder)
    assert name == name_of(kind)
    inner = next((part for part in model.modules() if isinstance(part, t.BertModel)), model)
    # MPNet buckets longer distances by their logarithm.
    ids, mask, states = oracle.assert_encoders_match(
        inner, model, encoder_of(config), config, params,
        name=name, pad=model.config.pad_token_id, vocab=VOCAB, length=17,
    )  # fmt: skip
    if kind == "dpr-question":
        vectors = model(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).pooler_output
        oracle.assert_close(states[:, 0], vectors.detach().numpy())
    assert_same_tensors(exported(folder, tmp_path / "out", config, params), model)


# Files


def pytorch_file(model, folder):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")  # copies and tables of positions and all


def flax_file(model, folder):
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(oracle.flax_tree(model)))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [kind for kind in (*MODELS, *OTHERS) if kind not in VARIANTS])
def test_files_of_pytorch_and_of_flax_hold_the_same_parameters(kind, saved, tmp_path):
    model, folder = saved(kind)
    _, config, expected = load_pretrained(folder)
    for write in (pytorch_file, flax_file):
        other = tmp_path / write.__name__
        other.mkdir()
        shutil.copy(folder / "config.json", other)
        write(model, other)
        _, read, found = load_pretrained(other)
        assert read == config
        oracle.assert_same_bytes(found, expected)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("distilbert", "DistilBertForMaskedLM"),
        ("xlm-roberta", "XLMRobertaForMaskedLM"),
        ("electra", "ElectraForPreTraining"),
        ("electra", "ElectraForMaskedLM"),
        ("marian", "MarianModel"),
        ("mbart", "MBartModel"),
        ("bart", "BartModel"),  # as facebook/bart-base is
    ],
)
def test_a_model_saved_with_another_head_or_with_none_is_read(kind, head, saved, tmp_path):
    model = getattr(t, head)(saved(kind)[0].config).eval()
    model.save_pretrained(tmp_path)
    _, config, params = load_pretrained(tmp_path)
    base = model.base_model.state_dict()
    assert not np.any(params.get("output_bias", 0.0))
    for name, array in export_params(name_of(kind), params, config).items():
        inner = name.removeprefix("model.") if kind in ("marian", "mbart", "bart") else name
        if "positions" not in inner and inner != "final_logits_bias":
            np.testing.assert_array_equal(base[inner], array, err_msg=name)


def test_tables_of_other_positions_are_refused_and_rounded_ones_are_not(saved, tmp_path):
    model, folder = saved("pegasus")
    shutil.copy(folder / "config.json", tmp_path)
    tensors = {name: value.clone() for name, value in model.half().state_dict().items()}
    model.float()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    load_pretrained(tmp_path)
    name = "model.decoder.embed_positions.weight"
    torch.save(tensors | {name: tensors[name].flip(0)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"decoder\.embed_positions\.weight does not hold the sines"):
        load_pretrained(tmp_path)
    torch.save(tensors | {name: tensors[name][:5]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"decoder\.embed_positions\.weight has shape \[5, 21\], must be \[19, 21\]"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["marian", "distilbert"])
def test_a_grown_vocabulary_is_written_with_its_size(kind, saved, tmp_path):
    _, folder = saved(kind)
    _, config, params = load_pretrained(folder)
    grown = dataclasses.replace(config, vocab_size=VOCAB + 2)
    model = exported(folder, tmp_path / "out", grown, grow_vocabulary(params, VOCAB + 2))
    table = model.get_input_embeddings().weight.detach()
    assert table.shape[0] == model.config.vocab_size == VOCAB + 2
    np.testing.assert_array_equal(table[:VOCAB], params["token_embedding"])


# What a folder is taken for


@pytest.mark.parametrize("kind", ["t5-encoder", "mt5", "mbart"])
def test_an_encoder_is_read_without_the_rest(kind, saved):
    _, folder = saved(kind)
    TOKENIZER.save(folder)
    loaded = load_encoder(EncoderSettings(pretrained=str(folder)), None)
    assert set(loaded.params["encoder"]) <= {"token_embedding", "encoder"}
    oracle.assert_same_bytes(loaded.params["encoder"], load_pretrained(folder).params, surplus=True)
    if kind == "t5-encoder":
        with pytest.raises(ConfigError, match="is the encoder of a 't5' alone, which generates no text"):
            load_generator(GeneratorSettings("pretrained", str(folder)), TOKENIZER)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mbart", {"decoder_start_token_id": None}, "lacks decoder_start_token_id: set it to the id of the token"),
        ("mbart", {"normalize_before": False}, "normalize_before = False of an mBART must be True"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "has one vocabulary for each side; only a shared one"),
        ("marian", {"static_position_embeddings": False}, "of a Marian must be True"),
        (
            "marian",
            {"decoder_start_token_id": None, "pad_token_id": None},
            "lacks decoder_start_token_id: set it to pad_token_id",
        ),
        ("pegasus", {"normalize_embedding": True}, "normalize_embedding = True of a Pegasus"),
        ("pegasus", {"decoder_attention_heads": 7}, "must be equal in a Pegasus here"),
        ("distilbert", {"n_layers": None}, "a DistilBERT lacks n_layers"),
        ("distilbert", {"n_heads": 3}, "dim = 20 must be a multiple of n_heads = 3"),
        ("distilbert", {"activation": "tanh"}, "activation = 'tanh' is unknown"),
        ("electra", {"embedding_size": None}, "an ELECTRA lacks embedding_size"),
        ("xlm-roberta", {"pad_token_id": None}, "positions are counted from it"),
        ("mt5", {"d_kv": None}, "lacks d_kv"),
    ],
)
def test_what_is_not_done_here_is_a_config_error(kind, changes, message, saved, tmp_path):
    fields = json.loads((saved(kind)[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_a_marian_starts_from_padding_and_an_mbart_from_what_is_asked_for(saved):
    marian, mbart = (saved(kind)[0].config.to_dict() for kind in ("marian", "mbart"))
    del marian["decoder_start_token_id"], mbart["decoder_start_token_id"]
    assert model_config(marian).start_id == VOCAB - 1
    assert model_config(mbart, start_id=17).start_id == 17


# Tokenizers


@pytest.mark.parametrize(
    ("maker", "files", "message"),
    [
        ("T5", ["spiece.model"], r"\(spiece\.model\), which transformers turns into a fast one with the packages"),
        ("XLMRoberta", ["sentencepiece.bpe.model"], r"install both here; or where they are, write tokenizer\.json"),
        ("Marian", ["source.spm", "target.spm"], r"\(source\.spm, target\.spm\) has no fast version"),
    ],
)
def test_a_tokenizer_that_is_a_file_of_sentencepiece_says_what_to_do(maker, files, message, tmp_path):
    for file in files:
        (tmp_path / file).write_bytes(b"\n\x0e\n\x05<unk>\x15")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{maker}Tokenizer"}))
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["mbart", "pegasus", "xlm-roberta", "electra"])
def test_a_tokenizer_that_transformers_wrote_gives_the_ids_that_it_gives(kind, tmp_path):
    words = ["hello", "world", "re"]
    if kind == "electra":
        letters = [*"held orw", "##o", "##l"]
        vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *words])}
        theirs = t.ElectraTokenizer(vocab=vocab)
    else:
        special = ["<pad>", "</s>", "<unk>"] if kind == "pegasus" else ["<s>", "<pad>", "</s>", "<unk>"]
        scores = [(token, 0.0) for token in special]
        scores += [(f"▁{word}", -2.0) for word in words] + [(letter, -5.0) for letter in "▁helowrda"]
        make = {"mbart": t.MBartTokenizer, "pegasus": t.PegasusTokenizer, "xlm-roberta": t.XLMRobertaTokenizer}[kind]
        theirs = make(vocab=scores)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("hello world", "he rode"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert (ours.pad_id, ours.eos_id) == (theirs.pad_token_id, theirs.eos_token_id or theirs.sep_token_id)
    if kind == "mbart":
        assert ours.token_id("ro_RO") == theirs.convert_tokens_to_ids("ro_RO")
