"""Folders written here against what transformers and sentence-transformers make of them."""

import dataclasses
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers as rust
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json
from empax.core.tree import map_named
from empax.data.bpe import train_bpe
from empax.data.features import encode_for_bert, pad
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.export import Generation, export_generator, export_retriever, t5_fields
from empax.interop.huggingface import load_pretrained
from empax.interop.parameters import export_params
from empax.interop.readers import open_tensors
from empax.interop.safetensors_out import new_folder, write_tensors
from empax.interop.tensors import LazyTensor
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import T5Encoder, encoder_alone, t5_config
from empax.models.transformer import EncoderDecoder, scratch
from empax.parts.generator.decoder import Decoder
from tests.data import small_tokenizers
from tests.interop import oracle

TEXTS = [
    "I lost my job today and I do not know what to do.",
    "My dog has just turned fifteen!",
    "ok",
    "We used to talk every night. " * 5,
]
TOKENIZER = train_bpe(TEXTS, vocab_size=300)


def randomised(model, *inputs):
    """Parameters by their shapes alone, also where they begin as ones and zeros, or errors would hide."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(1)

    def make(name, leaf):
        scale = 0.3 if leaf.ndim == 1 else leaf.shape[-1] ** -0.5
        return jnp.asarray(rng.normal(scale=scale, size=leaf.shape) + (name.endswith("scale")), leaf.dtype)

    return map_named(make, shapes)


def t5(*, gated, **changes):
    """Odd shapes; a start id that is not the padding's; fewer encoder layers than decoder layers."""
    fields = {"vocab_size": TOKENIZER.vocab_size + 3, "d_model": 20, "d_kv": 5, "num_heads": 3, "d_ff": 28}
    fields |= {"num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 8}
    fields |= {"relative_attention_max_distance": 12, "tie_word_embeddings": not gated, "dropout_rate": 0.2}
    fields |= {"feed_forward_proj": "gated-gelu" if gated else "relu", "decoder_start_token_id": TOKENIZER.start_id}
    model = EncoderDecoder(t5_config(fields, **changes))
    ids = jnp.zeros((1, 2), int)
    return model, randomised(model, ids, ids == 0, ids)


def dual(**changes):
    settings = {"vocab_size": TOKENIZER.vocab_size, "d_model": 20, "num_heads": 4, "d_ff": 27, "num_layers": 3}
    model = DualEncoder(BertEncoder(BertConfig(**settings, max_positions=17)), **changes)
    ids = jnp.zeros((1, 2), int)
    return model, randomised(model, ids, ids == 0)


def generation(**settings):
    return Generation(
        dataclasses.asdict(DecodeSettings(**settings)), TOKENIZER.start_id, TOKENIZER.eos_id, TOKENIZER.pad_id
    )


GREEDY = generation(method="greedy", max_tokens=7)


@pytest.mark.oracle
@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1"])
def test_transformers_loads_a_generator_to_the_same_logits_and_back_come_the_same_bytes(gated, tmp_path):
    model, params = t5(gated=gated)
    export_generator(tmp_path / "out", model, params, TOKENIZER, GREEDY, card="# Card\n")
    theirs, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(theirs, transformers.T5ForConditionalGeneration)
    rng = np.random.default_rng(0)
    source, target = rng.integers(2, TOKENIZER.vocab_size, (2, 3, 9))
    mask = np.arange(9)[None] < np.array([9, 6, 2])[:, None]
    found = jax.jit(model.apply)({"params": params}, *map(jnp.asarray, (source, mask, target)))
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(source), attention_mask=torch.tensor(mask).long(), labels=torch.tensor(target)
        ).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    loaded = load_pretrained(tmp_path / "out")
    assert loaded.architecture == "t5"
    assert loaded.config == model.config
    oracle.assert_same_bytes(loaded.params, params)
    assert (tmp_path / "out" / "README.md").read_text() == "# Card\n"
    assert load_tokenizer(tmp_path / "out").backend.to_str() == TOKENIZER.backend.to_str()


@pytest.mark.oracle
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "greedy", "max_tokens": 7, "no_repeat_ngram": 2, "min_tokens": 3},
        {"method": "beam", "max_tokens": 7, "num_beams": 3, "length_penalty": 0.6, "no_repeat_ngram": 3},
    ],
    ids=["greedy", "beam"],
)
def test_transformers_decodes_as_the_run_does_with_no_argument_given(settings, tmp_path):
    model, params = t5(gated=True)
    params["output_embedding"] = params["output_embedding"].at[TOKENIZER.eos_id].multiply(2.0)
    export_generator(tmp_path / "out", model, params, TOKENIZER, generation(**settings))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    encoded = reader(TEXTS, add_special_tokens=False, return_tensors="pt", padding=True)
    ours = TOKENIZER.encode_batch(TEXTS)
    source, mask = pad(ours, max(map(len, ours)), TOKENIZER.pad_id)
    np.testing.assert_array_equal(encoded.input_ids, source)
    np.testing.assert_array_equal(encoded.attention_mask, mask)
    decoder = Decoder(DecodeSettings(**settings), TOKENIZER.start_id, TOKENIZER.eos_id, TOKENIZER.pad_id)
    found = jax.jit(lambda p, *inputs: decoder(model, p, *inputs))(params, source, mask, jax.random.key(0))
    expected = theirs.generate(encoded.input_ids, attention_mask=encoded.attention_mask)
    for one, two in zip(found.tokens[:, 0], expected[:, 1:], strict=True):
        assert TOKENIZER.decode(one) == TOKENIZER.decode(two)
        end = min(two.tolist().index(TOKENIZER.eos_id) + 1 if TOKENIZER.eos_id in two else 7, 7)
        assert one[:end].tolist() == two[:end].tolist()  # what stands behind the end differs
    assert expected[:, 0].tolist() == [TOKENIZER.start_id] * len(TEXTS)
    assert len({tuple(row) for row in expected.tolist()}) > 1


@pytest.mark.oracle
def test_shards_hold_every_tensor_once_and_load_as_one_file_does(tmp_path):
    model, params = t5(gated=True)
    limit = 6000
    export_generator(tmp_path / "out", model, params, TOKENIZER, GREEDY, max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    found = {}
    for file in files:
        with safetensors.safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert not found.keys() & tensors.keys()
        found |= tensors
    expected = export_params("t5", params, model.config)
    oracle.assert_same_bytes(found, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.size for tensor in expected.values())
    oracle.assert_same_bytes(load_pretrained(tmp_path / "out").params, params)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(theirs.lm_head.weight.detach().numpy(), params["output_embedding"])


def test_one_shard_at_a_time_is_in_memory(tmp_path):
    alive, most = [], []

    def make():
        array = np.zeros(100, np.float32)
        alive.append(array.nbytes)
        most.append(len(alive))
        return array

    tensors = {f"t{i}": LazyTensor((100,), np.dtype(np.float32), make) for i in range(8)}
    writes = []
    original = safetensors.numpy.save_file

    def save(arrays, *args, **options):
        writes.append(len(alive))
        alive.clear()
        original(arrays, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", save)
        write_tensors(tmp_path, tensors, max_shard_bytes=800)
    assert writes == [2, 2, 2, 2]
    assert len(open_tensors(tmp_path)) == 8


def our_vectors(model, params, texts, max_tokens):
    rows = encode_for_bert(TOKENIZER, texts, max_tokens)
    ids, mask = pad(rows, max_tokens, TOKENIZER.pad_id)
    return jax.jit(model.apply)({"params": params}, jnp.asarray(ids), jnp.asarray(mask))


@pytest.mark.oracle
@pytest.mark.parametrize("changes", [{"normalize": True}, {"pooling": "cls"}], ids=str)
def test_a_retriever_gives_the_same_vectors_in_transformers_and_sentence_transformers(changes, tmp_path):
    model, params = dual(**changes)
    out = tmp_path / "out"
    export_retriever(out, model, params, TOKENIZER, max_tokens=12)
    expected = our_vectors(model, params, TEXTS, 12)

    reader = transformers.AutoTokenizer.from_pretrained(out)
    encoded = reader(TEXTS, return_tensors="pt", padding=True, truncation=True)
    assert encoded.input_ids.shape[1] == 12  # the last text is longer, and its end stays
    assert encoded.input_ids[3].tolist() == encode_for_bert(TOKENIZER, TEXTS, 12)[3]
    theirs = transformers.AutoModel.from_pretrained(out).eval()
    assert theirs.config.num_hidden_layers == 3
    with torch.no_grad():
        states = theirs(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask).last_hidden_state
    if model.pooling == "mean":
        weights = encoded.attention_mask[..., None].float()
        vectors = (states * weights).sum(1) / weights.sum(1)
    else:
        vectors = states[:, 0]
    vectors = torch.nn.functional.normalize(vectors) if model.normalize else vectors
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)

    loaded = load_pretrained(out)
    assert dataclasses.replace(loaded.config, dropout=0.1, attention_dropout=None) == model.encoder.config
    oracle.assert_same_bytes({"encoder": loaded.params}, params)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        sentences = pytest.importorskip("sentence_transformers")
        loaded = sentences.SentenceTransformer(str(out), device="cpu")
        assert loaded.max_seq_length == 12
        found = loaded.encode(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (out / "2_Normalize").exists() is model.normalize


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path):
    ids = jnp.zeros((1, 2), int)
    model = EncoderDecoder(
        scratch(TOKENIZER.vocab_size, d_model=16, num_heads=2, head_dim=8, d_ff=24, num_encoder_layers=2)
    )
    params = randomised(model, ids, ids == 0, ids)
    with pytest.raises(ConfigError, match=r"norm = 'layer' \(T5: 'rms'\).*architecture = 't5' can\."):
        export_generator(tmp_path / "out", model, params, TOKENIZER, GREEDY)
    assert not (tmp_path / "out").exists()


def test_the_type_that_an_older_config_gives_is_not_kept(tmp_path):
    model, params = dual(normalize=True)
    export_retriever(tmp_path / "bert", model, params, TOKENIZER, max_tokens=12)
    older = read_json(tmp_path / "bert" / "config.json") | {"model_type": "electra", "torch_dtype": "float16"}
    del older["dtype"]
    export_retriever(tmp_path / "out", model, params, TOKENIZER, max_tokens=12, base=older)
    written = read_json(tmp_path / "out" / "config.json")
    assert written["dtype"] == "float32"
    assert "torch_dtype" not in written


@pytest.mark.parametrize("start", ["$zz", "$A", "x:1"])
def test_the_start_of_a_retrievers_texts_may_be_any_token(start, tmp_path):
    backend = small_tokenizers.trained("BPE", TEXTS, [start, "<|end|>", "<pad>"])
    tokenizer = SubwordTokenizer(backend, pad="<pad>", eos="<|end|>", start=start)
    encoder = BertEncoder(BertConfig(vocab_size=tokenizer.vocab_size, d_model=8, num_heads=2, d_ff=8, num_layers=1))
    ids = jnp.zeros((1, 2), int)
    export_retriever(
        tmp_path / "out",
        DualEncoder(encoder),
        randomised(DualEncoder(encoder), ids, ids == 0),
        tokenizer,
        max_tokens=60,
    )
    written = rust.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    first, last = tokenizer.cls_id, tokenizer.sep_id
    assert written.encode("ok").ids == [first, *tokenizer.encode("ok"), last]
    assert written.encode("ok", "ok").ids == [first, *tokenizer.encode("ok"), last, *tokenizer.encode("ok"), last]


def test_the_encoder_of_a_t5_is_a_retriever(tmp_path):
    model = DualEncoder(T5Encoder(encoder_alone(t5(gated=True)[0].config)), pooling="cls")
    ids = jnp.zeros((1, 2), int)
    params = randomised(model, ids, ids == 0)
    with pytest.raises(ConfigError, match="encoder of a 'bart' cannot be written for transformers"):
        export_retriever(tmp_path / "out", model, params, TOKENIZER, max_tokens=12, base={"model_type": "bart"})
    export_retriever(tmp_path / "t5", model, params, TOKENIZER, max_tokens=12)
    theirs, info = transformers.T5EncoderModel.from_pretrained(tmp_path / "t5", output_loading_info=True)
    assert not any(info.values()), info
    assert (theirs.config.feed_forward_proj, theirs.config.pad_token_id) == ("gated-gelu", TOKENIZER.pad_id)
    np.testing.assert_array_equal(theirs.shared.weight.detach(), params["encoder"]["token_embedding"])


def test_parameters_of_another_model_are_refused(tmp_path):
    model, params = t5(gated=False)
    gated, _ = t5(gated=True)
    with pytest.raises(DataError, match=r"layers/feed_forward/gate.* missing"):
        export_generator(tmp_path / "out", gated, params, TOKENIZER, GREEDY)
    extra = {**params, "encoder": {**params["encoder"], "more": np.ones(2)}}
    with pytest.raises(DataError, match="encoder/more would be lost"):
        export_generator(tmp_path / "out", model, extra, TOKENIZER, GREEDY)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_whole_or_absent_and_nothing_is_overwritten(tmp_path, monkeypatch):
    model, params = t5(gated=False)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("no space left on device")

        patch.setattr(type(TOKENIZER), "save", full)
        with pytest.raises(OSError, match="no space"):
            export_generator(out, model, params, TOKENIZER, GREEDY)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()  # empty: may be filled
    export_generator(out, model, params, TOKENIZER, GREEDY)
    before = {file: file.read_bytes() for file in out.iterdir()}
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    with pytest.raises(ConfigError, match=r"is not empty: it holds config\.json, .*give another folder"):
        export_generator(out, model, params, TOKENIZER, GREEDY)
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    with pytest.raises(ConfigError, match="is a file"):
        export_generator(out / "config.json", model, params, TOKENIZER, GREEDY)


def test_of_two_exports_to_a_folder_at_the_same_time_the_second_is_refused(tmp_path):
    out, left = tmp_path / "out", tmp_path / ".out.unfinished" / "out" / "model.safetensors"
    left.parent.mkdir(parents=True)
    left.write_text("of a killed process")
    with new_folder(out) as first:
        assert list(first.iterdir()) == []
        (first / "config.json").write_text("{}")
        with (
            pytest.raises(ConfigError, match=r"is in use: process \d+ on .* or choose another folder"),
            new_folder(out),
        ):
            pass
    assert [file.name for file in out.iterdir()] == ["config.json"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    "change", [{"norm": "layer"}, {"use_bias": True}, {"position": "sinusoidal"}, {"final_norm": False}], ids=str
)
def test_whatever_t5_does_not_have_is_refused(change):
    config = dataclasses.replace(t5_config("flan-t5-small"), **change)
    ((name, _),) = change.items()
    with pytest.raises(ConfigError, match=re.escape(name)):
        t5_fields(config, eos_id=1, pad_id=0)


@pytest.mark.parametrize("preset", ["t5-small", "t5-3b", "flan-t5-base"])
def test_fields_of_presets_come_back_as_they_were(preset):
    config = t5_config(preset)
    assert t5_config(t5_fields(config, eos_id=1, pad_id=0)) == config
