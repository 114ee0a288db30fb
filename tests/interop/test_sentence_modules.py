"""Folders of sentence-transformers: the same vectors here and there, or refused by name."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import empax
from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.protocols import Reading
from empax.core.types import Instance
from empax.data.exemplars import encode_keys, encode_queries
from empax.data.features import encode_for_bert, pad
from empax.interop.export import export_retriever
from empax.interop.pretrained import check_weights
from empax.interop.pretrained_encoders import EncoderSettings, check_prompts, load_encoder
from empax.interop.sentence_modules import read_modules
from empax.models.dual_encoder import DualEncoder, Projection
from tests.interop.tiny import tiny

WIDTH = 18
TEXTS = ["I lost my keys today.", "Oh no!", "We went to the sea, and it rained."]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *".,!:IOW", *(f"##{letter}" for letter in LETTERS)]


@pytest.fixture(scope="module")
def st():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a tiny BERT and a tokenizer that keeps capitals."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"vocab_size": len(WORDS), "hidden_size": WIDTH, "num_attention_heads": 3, "max_position_embeddings": 80}
    tiny("bert", **sizes).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    return folder


def written(st, base, folder, *, pooling="mean", dense=(), normalize=False, prompts=None, default=None, **options):
    """A folder that sentence-transformers writes, and its model."""
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = options.pop("said", {})
        modules = [Transformer(str(base), max_seq_length=options.pop("max_seq_length", 60))]
        modules.append(Pooling(WIDTH, pooling_mode=pooling, **options.pop("pooling_options", {})))
        size = WIDTH
        for features, activation, bias in dense:
            modules.append(Dense(size, features, bias=bias, activation_function=activation))
            size = features
        modules += [Normalize()] if normalize else []
        model = st.SentenceTransformer(
            modules=modules, prompts=prompts, default_prompt_name=default, device="cpu", **options
        )
        model.save(str(folder), create_model_card=False)
        file = folder / "sentence_bert_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | said))
        return st.SentenceTransformer(str(folder), device="cpu")


def encoded(st, folder, texts=TEXTS):
    """The vectors that sentence-transformers gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return st.SentenceTransformer(str(folder), device="cpu").encode(texts, show_progress_bar=False)


def vectors(loaded, rows):
    ids, mask = pad(rows, 64, loaded.tokenizer.pad_id)
    return np.asarray(embed(loaded.model, loaded.params, jnp.asarray(ids), jnp.asarray(mask)))


@functools.partial(jax.jit, static_argnums=0)
def embed(model, params, ids, mask):
    return model.apply({"params": params}, ids, mask)


def instances():
    return [Instance(str(i), (text,), "I see.", "") for i, text in enumerate(TEXTS)]


DENSE = [(7, torch.nn.Tanh(), True)]
CASES = {
    "mean": {},
    "cls, two dense": {"pooling": "cls", "dense": [(11, torch.nn.GELU(), False), (5, torch.nn.Identity(), True)]},
    "max, relu": {"pooling": "max", "dense": [(7, torch.nn.ReLU(), True)]},
    "root, normalised": {"pooling": "mean_sqrt_len_tokens", "normalize": True},
    "last, lower case": {"pooling": "lasttoken", "said": {"do_lower_case": True}},
    "weighted, dense, normalised": {"pooling": "weightedmean", "dense": DENSE, "normalize": True},
    "cut": {"truncate_dim": 4},
    "normalised, cut": {"normalize": True, "truncate_dim": 4},
    "dense, cut where nothing is left to cut": {"dense": DENSE, "truncate_dim": 9},
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_sentence_transformers(case, st, base, tmp_path):
    theirs = written(st, base, tmp_path / "out", **CASES[case])
    loaded = load_encoder(EncoderSettings(pretrained=str(tmp_path / "out"), dropout=0.0), None)
    found = vectors(loaded, encode_for_bert(loaded.tokenizer, TEXTS, 60))
    expected = theirs.encode(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert found.shape[1] == loaded.model.width


@pytest.mark.oracle
def test_prompts_stand_before_queries_and_keys(st, base, tmp_path):
    prompts = {"query": "find: ", "document": "text: "}
    theirs = written(st, base, tmp_path / "out", prompts=prompts, normalize=True)
    loaded = load_encoder(EncoderSettings(pretrained=str(tmp_path / "out"), dropout=0.0), None)
    rows = instances()
    expected = theirs.encode_query(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(vectors(loaded, encode_queries(loaded.tokenizer, rows, 60)), expected, atol=1e-5)
    keys = [loaded.tokenizer.decode(ids) for ids in encode_keys(loaded.tokenizer, rows, 60)]
    assert all(text.replace(" ", "").startswith("text:") for text in keys)
    # What is too long loses its beginning, not its prompt.
    short = encode_queries(loaded.tokenizer, rows, 20)[2]
    whole = encode_queries(loaded.tokenizer, rows, 60)[2]
    given = len(loaded.tokenizer.encode("find: "))
    assert short[: given + 1] == whole[: given + 1]
    assert short[given + 1 :] == whole[len(whole) - (20 - given - 1) :]


@pytest.mark.oracle
def test_texts_are_no_longer_than_the_folder_says(st, base, tmp_path):
    written(st, base, tmp_path / "out", max_seq_length=12)
    loaded = load_encoder(EncoderSettings(pretrained=str(tmp_path / "out"), dropout=0.0), None)
    assert loaded.tokenizer.reading.max_tokens == 12
    assert max(map(len, encode_queries(loaded.tokenizer, instances(), 60))) == 12


@pytest.mark.oracle
def test_a_folder_without_a_limit_has_that_of_its_positions(st, base, tmp_path):
    written(st, base, tmp_path / "out", said={"max_seq_length": None})
    file, text = tmp_path / "out" / "tokenizer_config.json", "I saw it. " * 30
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 10**30}))
    expected = encoded(st, tmp_path / "out", [text])
    np.testing.assert_allclose(empax.load(tmp_path / "out").embed([text]), expected, atol=1e-5)


@pytest.mark.oracle
def test_a_judge_takes_the_states_alone(st, base, tmp_path):
    written(st, base, tmp_path / "out", dense=DENSE, normalize=True, pooling="max")
    loaded = load_encoder(EncoderSettings(pretrained=str(tmp_path / "out")), None, sentences=False)
    assert (loaded.model.projections, loaded.model.normalize, loaded.model.pooling) == ((), False, "max")
    assert set(loaded.params) == {"encoder"}
    chosen = EncoderSettings(pretrained=str(tmp_path / "out"), pooling="cls", normalize=False)
    assert (load_encoder(chosen, None).model.pooling, load_encoder(chosen, None).model.normalize) == ("cls", False)


@pytest.mark.oracle
def test_vectors_that_are_cut_may_be_normalised_and_are_written_as_they_are(st, base, tmp_path):
    theirs = written(st, base, tmp_path / "out", normalize=True, truncate_dim=4)
    expected = theirs.encode(TEXTS, show_progress_bar=False)
    assert np.linalg.norm(expected, axis=1).max() < 0.9
    for normalize in ("auto", True):
        settings = EncoderSettings(pretrained=str(tmp_path / "out"), dropout=0.0, normalize=normalize)
        loaded = load_encoder(settings, None)
        rows = encode_for_bert(loaded.tokenizer, TEXTS, 60)
        found = vectors(loaded, rows)
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found, unit if normalize is True else expected, rtol=1e-5, atol=1e-5)
        again = tmp_path / f"again_{normalize}"
        export_retriever(again, loaded.model, loaded.params, loaded.tokenizer, max_tokens=60, base=None)
        np.testing.assert_allclose(encoded(st, again), found, rtol=1e-5, atol=1e-5)


def folder_of(path, *, modules=None, **files):
    kinds = modules or ["Transformer", "Pooling"]
    places = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    path.mkdir(exist_ok=True)
    entries = [
        {"type": f"sentence_transformers.models.{kind}", "path": place}
        for kind, place in zip(kinds, places, strict=False)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    for place, fields in {"1_Pooling/config.json": {"pooling_mode": "mean"}, **files}.items():
        (path / place).parent.mkdir(exist_ok=True)
        (path / place).write_text(json.dumps(fields))
    return path


DENSE_FILE = {"out_features": 3, "activation_function": "torch.nn.modules.activation.Tanh"}


POOL, TEXT, FOLDER = "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"


def with_dense(**fields):
    return {"modules": ["Transformer", "Pooling", "Dense"], "2_Dense/config.json": DENSE_FILE | fields}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["Transformer", "Pooling", "LSTM"]}, "asks for 'sentence_transformers.models.LSTM'"),
        ({"modules": ["Transformer"]}, "has the order Transformer; it must be Transformer, Pooling"),
        ({POOL: {"pooling_mode": ["cls", "mean"]}}, "asks for cls, mean; only one of mean, cls, max"),
        (with_dense(use_residual=True), "use_residual = True is not supported"),
        (
            with_dense(activation_function="mine.Swish"),
            "activation_function = 'mine.Swish' is not supported; it must be one of torch.nn's Tanh",
        ),
        (with_dense(module_input_name="token_embeddings"), "module_input_name = 'token_embeddings'"),
        ({FOLDER: {"similarity_fn_name": "euclidean"}}, "similarity_fn_name = 'euclidean'"),
        ({FOLDER: {"default_prompt_name": "x"}}, "default_prompt_name = 'x' is not one of"),
        ({FOLDER: {"truncate_dim": 0}}, "truncate_dim = 0 must be a number of entries"),
        ({FOLDER: {"truncate_dim": "4"}}, "truncate_dim = '4' must be a number"),
        ({FOLDER: {"model_type": "SparseEncoder"}}, "model_type = 'SparseEncoder'"),
        # What nobody here knows may change the vectors.
        ({FOLDER: {"quantize": "int8"}}, "sets quantize = 'int8', which is unknown here"),
        ({POOL: {"pooling_mode": "mean", "layers": [1, 2]}}, r"sets layers = \[1, 2\]"),
        ({POOL: {"pooling_mode_mean_squares": True}}, "sets pooling_mode_mean_squares = True"),
        ({POOL: {"pooling_mode_max_tokens": "no"}}, "pooling_mode_max_tokens = 'no' must be"),
        ({TEXT: {"query_length": 32}}, "sets query_length = 32"),
        ({TEXT: {"model_args": {"torch_dtype": "float16"}}}, "sets model_args"),
        ({TEXT: {"modality_config": {"image": {}}}}, "modality_config = {'image': {}} is not"),
        ({TEXT: {"do_lower_case": "yes"}}, "do_lower_case = 'yes' must be true or false"),
        (with_dense(dropout=0.1), "sets dropout = 0.1"),
        (
            {
                "modules": ["Transformer", "Pooling", "Normalize"],
                "2_Dense/config.json": {"module_output_name": "sentence_embedding", "eps": 0.1},
            },
            "sets eps = 0.1",
        ),
        ({TEXT: {"transformer_task": "fill-mask"}}, "transformer_task = 'fill-mask'"),
        ({TEXT: {"max_seq_length": "long"}}, "bert_config.json: max_seq_length = .long. must be"),
    ],
)
def test_what_is_not_here_is_refused_by_name(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_modules(folder_of(tmp_path / "m", **options))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": "custom_code.Transformer"}, "asks for 'custom_code.Transformer', which is not supported"),
        ({"type": None}, "asks for None"),
        ({"kwargs": ["task"]}, r"kwargs = \['task'\] of a Transformer"),
        ({"weight": 2}, "sets weight = 2"),
    ],
)
def test_modules_of_others_and_with_more_fields_are_refused(entry, message, tmp_path):
    folder = folder_of(tmp_path / "m")
    first, *rest = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([first | entry, *rest]))
    with pytest.raises(ConfigError, match=message):
        read_modules(folder)


def test_fields_that_say_nothing_are_no_reason_to_refuse(tmp_path):
    files = {"config_sentence_transformers.json": {"new": None, "also": {}, "truncate_dim": None}}
    files["sentence_bert_config.json"] = {"query_length": None, "processing_kwargs": {}}
    assert read_modules(folder_of(tmp_path / "m", **files)).truncate == 0


def test_weights_may_lie_in_a_folder_of_the_encoder(tmp_path):
    folder = folder_of(tmp_path / "m")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": "0_Transformer"}, *modules[1:]]))
    (folder / "0_Transformer").mkdir()
    with pytest.raises(DataError, match="0_Transformer holds no weights"):
        check_weights(str(folder))
    torch.save({"a": torch.zeros(1)}, folder / "0_Transformer" / "pytorch_model.bin")
    check_weights(str(folder))


def test_a_module_outside_its_folder_and_a_broken_list_are_refused(tmp_path):
    folder = folder_of(tmp_path / "m")
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Transformer", "path": "../other"}]))
    with pytest.raises(DataError, match="is outside the folder"):
        read_modules(folder)
    (folder / "modules.json").write_text("{}")
    with pytest.raises(DataError, match="must hold a JSON list, but is an object"):
        read_modules(folder)
    (folder / "modules.json").write_text("[1]")
    with pytest.raises(DataError, match=r"modules\.json must hold a list of objects; fetch the model again"):
        read_modules(folder)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        ((4, WIDTH), 4, r"linear.weight has shape \[4, 18\], must be \[3, 18\]"),
        ((3, 20), 3, r"linear.weight has shape \[3, 20\], must be \[3, 18\]"),
        ((3, WIDTH), 4, r"linear.bias has shape \[4\], must be \[3\]"),
    ],
)
def test_a_dense_layer_of_another_size_is_refused(weight, bias, message, tmp_path):
    folder = folder_of(tmp_path / "m", **with_dense())
    tensors = {"linear.weight": torch.zeros(weight), "linear.bias": torch.zeros(bias)}
    torch.save(tensors, folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(DataError, match=message):
        read_modules(folder).params(WIDTH)


def test_old_switches_and_folders_without_modules(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    assert read_modules(tmp_path / "1_Pooling").pooling is None
    for old, new in [
        ("cls_token", "cls"),
        ("mean_tokens", "mean"),
        ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        ("lasttoken", "lasttoken"),
    ]:
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{old}": True}))
        assert read_modules(tmp_path).pooling == new


@pytest.mark.oracle
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_an_export_gives_the_same_vectors_there(pooling, st, base, tmp_path):
    loaded = load_encoder(EncoderSettings(pretrained=str(base), dropout=0.0), None)
    normalize = pooling == "mean"
    model = DualEncoder(
        loaded.model.encoder, pooling, normalize, (Projection(7, "tanh"), Projection(5, "identity", False))
    )
    ids = jnp.ones((1, 4), jnp.int32)
    fresh = jax.jit(model.init)(jax.random.key(0), ids, ids > 0)["params"]
    params = {**fresh, "encoder": loaded.params["encoder"]}
    export_retriever(tmp_path / "out", model, params, loaded.tokenizer, max_tokens=60)
    rows = encode_for_bert(loaded.tokenizer, TEXTS, 60)
    ids, mask = map(jnp.asarray, pad(rows, 64, loaded.tokenizer.pad_id))
    expected = np.asarray(embed(model, params, ids, mask))
    np.testing.assert_allclose(encoded(st, tmp_path / "out"), expected, rtol=1e-5, atol=1e-5)
    again = load_encoder(EncoderSettings(pretrained=str(tmp_path / "out"), dropout=0.0), None)
    np.testing.assert_allclose(vectors(again, rows), expected, rtol=1e-6, atol=1e-6)


def test_the_front_door_embeds_as_the_folder_says(st, base, tmp_path):
    """The default prompt in front, and a long text cut at its end."""
    prompts = {"query": "I: ", "note": "We saw: "}
    theirs = written(st, base, tmp_path, prompts=prompts, default="note", max_seq_length=24, normalize=True)
    texts = [*TEXTS, "a text of very many letters"]
    found = empax.load(tmp_path).embed(texts)
    np.testing.assert_allclose(found, theirs.encode(texts), atol=1e-5)
    assert np.abs(found - theirs.encode(texts, prompt="")).max() > 0.01
    assert empax.load(tmp_path).embed([]).shape == (0, WIDTH)


@pytest.mark.oracle
@pytest.mark.parametrize("side", ["left", "right", None])
def test_the_end_of_a_long_text_that_a_folder_keeps_stays_kept(side, st, base, tmp_path):
    written(st, base, tmp_path / "in", max_seq_length=9)
    file = tmp_path / "in" / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | ({"truncation_side": side} if side else {})
    file.write_text(json.dumps(fields))
    texts = ["We saw a text", "I saw a text of very many letters, and it ended"]
    model, expected = empax.load(tmp_path / "in"), encoded(st, tmp_path / "in", texts)
    np.testing.assert_allclose(model.embed(texts), expected, atol=1e-5)
    model.save(tmp_path / "out")
    np.testing.assert_allclose(empax.load(tmp_path / "out").embed(texts), expected, atol=1e-5)
    np.testing.assert_allclose(encoded(st, tmp_path / "out", texts), expected, atol=1e-5)
    file.write_text(json.dumps(fields | {"truncation_side": "middle"}))
    with pytest.raises(empax.ConfigError, match="truncation_side = 'middle' must be 'left' or 'right'"):
        empax.load(tmp_path / "in")


@pytest.mark.oracle
@pytest.mark.parametrize(
    "pooling",
    ["mean", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cls", "max", "lasttoken", "weightedmean"))],
)
def test_the_front_door_leaves_the_prompt_out_of_the_pooling_where_the_folder_says_so(pooling, st, base, tmp_path):
    options = {"prompts": {"note": "We saw: "}, "default": "note", "pooling_options": {"include_prompt": False}}
    theirs = written(st, base, tmp_path / "in", pooling=pooling, **options)
    model, expected = empax.load(tmp_path / "in"), theirs.encode(TEXTS)
    np.testing.assert_allclose(model.embed(TEXTS), expected, atol=1e-5)
    model.save(tmp_path / "out")
    np.testing.assert_allclose(empax.load(tmp_path / "out").embed(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(encoded(st, tmp_path / "out"), expected, atol=1e-5)
    with_prompt = json.loads((tmp_path / "in" / "1_Pooling" / "config.json").read_text()) | {"include_prompt": True}
    (tmp_path / "in" / "1_Pooling" / "config.json").write_text(json.dumps(with_prompt))
    if pooling != "lasttoken":  # whose token is never one of the prompt
        assert np.abs(empax.load(tmp_path / "in").embed(TEXTS) - expected).max() > 0.01


@pytest.mark.oracle
@pytest.mark.parametrize("default", ["query", "passage", None])
def test_prompts_of_queries_do_not_stop_a_folder_that_pools_no_prompt(default, st, base, tmp_path):
    options = {"prompts": {"query": "We saw: ", "passage": "I: "}, "pooling_options": {"include_prompt": False}}
    theirs = written(st, base, tmp_path, default=default, **options)
    np.testing.assert_allclose(empax.load(tmp_path).embed(TEXTS), theirs.encode(TEXTS), atol=1e-5)


def test_an_index_cannot_leave_prompts_out_of_the_pooling():
    for reading in (Reading("q: "), Reading(prompt="t: ", pools_prompt=False)):
        check_prompts(reading, "m")
    for reading in (Reading("q: ", pools_prompt=False), Reading("", "d: ", pools_prompt=False)):
        with pytest.raises(ConfigError, match=r"but an index pools .* with their text; name another encoder"):
            check_prompts(reading, "m")
