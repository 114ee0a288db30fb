"""T5 from ONNX files: against the `onnx` package, PyTorch, and (loosely) the runtime that the files were made for."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from empax.core.files import DataError
from empax.core.tree import count_params
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.wheels import FLAN_T5
from empax.interop.huggingface import load_config, load_pretrained, resolve
from empax.interop.onnx_files import read_onnx, read_onnx_t5
from empax.interop.readers import open_tensors
from empax.models.transformer import EncoderDecoder

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def wheel():
    if importlib.util.find_spec("traceforge_title_model") is None:
        pytest.skip("the extra empax[t5] is not installed")
    return resolve(FLAN_T5)


def graph(weights, factors=(), quantised=(), **changes):
    """A model of `weights`; `factors` are right factors of a product of the module named; `quantised` have scales."""
    from onnx import helper, numpy_helper

    tensors, nodes = [], []
    for name, array in weights.items():
        tensors.append(numpy_helper.from_array(array, f"{name}_quantized" if name in quantised else name))
        if name in quantised:
            scale, zero_point = quantised[name]
            tensors.append(helper.make_tensor(f"{name}_scale", onnx.TensorProto.FLOAT, [], [scale]))
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensors.append(helper.make_tensor(f"{name}_zero_point", kind, [], [zero_point]))
    for name, module in dict(factors).items():
        kind, stored = ("MatMulInteger", f"{name}_quantized") if name in quantised else ("MatMul", name)
        nodes.append(helper.make_node(kind, ["x", stored], ["y"], name=f"/{module.replace('.', '/')}/{kind}"))
    made = helper.make_model(helper.make_graph(nodes, "g", [], [], tensors))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_initialisers_are_those_that_onnx_reads(tmp_path):
    rng = np.random.default_rng(0)
    weights = {
        "a.layer_norm.weight": rng.normal(size=5).astype(np.float32),
        "half": rng.normal(size=(2, 3)).astype(np.float16),
        "onnx::MatMul_7": rng.normal(size=(4, 6)).astype(np.float32),
        "onnx::MatMul_8": rng.integers(-128, 128, (300, 6)).astype(np.int8),
        "a.shared.weight": rng.integers(0, 256, (7, 2)).astype(np.uint8),
    }
    quantised = {"onnx::MatMul_8": (0.037, -3), "a.shared.weight": (0.5, 131)}
    factors = {"onnx::MatMul_7": "a.block.0.q", "onnx::MatMul_8": "a.lm_head"}
    made = graph(weights, factors, quantised, producer_name="n" * 200, doc_string="é" * 70)
    onnx.save(made, tmp_path / "a.onnx")
    found = read_onnx(tmp_path / "a.onnx")
    assert set(found) == {"a.layer_norm.weight", "half", "a.block.0.q.weight", "a.lm_head.weight", "a.shared.weight"}
    for name in ("a.layer_norm.weight", "half"):
        np.testing.assert_array_equal(found[name], weights[name])
        assert found[name].dtype == weights[name].dtype
    np.testing.assert_array_equal(found["a.block.0.q.weight"], weights["onnx::MatMul_7"].T)
    for name, key in (("a.lm_head.weight", "onnx::MatMul_8"), ("a.shared.weight", "a.shared.weight")):
        scale, zero_point = quantised[key]
        expected = (weights[key].astype(np.float32) - zero_point) * np.float32(scale)
        expected = expected.T if key in factors else expected
        assert found[name].shape == expected.shape
        np.testing.assert_array_equal(found[name], expected)


def test_files_that_are_cut_short_or_no_onnx_are_refused_at_every_length(tmp_path):
    whole = graph({"w": np.ones((3, 40), np.float32)}).SerializeToString()
    file = tmp_path / "a.onnx"
    # Metadata behind the graph may lack; that is no harm.
    behind = whole.index(b"\x3a") + 2 + whole[whole.index(b"\x3a") + 1]
    for length in range(0, len(whole), 7):
        if length < min(behind, len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(DataError, match=r"a\.onnx is (not a whole ONNX file|empty)"):
                read_onnx(file)
    rng = np.random.default_rng(0)
    for _ in range(200):
        file.write_bytes(rng.bytes(60))
        with pytest.raises(DataError, match=r"a\.onnx"):
            read_onnx(file)


def varint(number):
    number &= (1 << 64) - 1
    parts = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(part | 0x80 for part in parts[:-1]) + bytes(parts[-1:])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(*parts, name=b"w", raw=bytes(4)):
    """A graph of one tensor of float32."""
    return field(7, field(5, b"".join([*parts, varint(2 << 3), varint(1), field(8, name), field(9, raw)])))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (varint(2 << 3 | 2) + varint(-11), "a field of -11 bytes"),  # not the graph: read again and again for ever
        (varint(7 << 3 | 2) + varint(-11), "a field of -11 bytes"),  # the graph: more and more of them
        (varint(7 << 3 | 2) + varint(-1), "a field of -1 bytes"),
        (field(7, varint(5 << 3 | 2) + varint(-(2**63))), "a field of -9223372036854775808 bytes"),
        (varint(7 << 3 | 2) + varint(2**62), "reaches beyond byte"),
        (varint(2) + varint(3) + b"abc", "the key of a field 0"),
        (varint(-6), "the key of a field"),
        (b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\x80" * 40, "more than 64 bits"),
        (field(7, field(5, varint(1 << 3) + b"\x81")) + field(3, b""), "a number reaches beyond"),
        (field(7, field(5, field(1, b"\x81"))) + field(3, b""), "a number reaches beyond"),
        (tensor(varint(1 << 3), varint(-1)), "not a tensor"),
        (tensor(varint(1 << 3), varint(2**62), varint(1 << 3), varint(4)), "not a tensor"),
        (tensor(varint(1 << 3), varint(0), varint(1 << 3), varint(2**62), raw=b""), "not a tensor"),
        (tensor(field(1, bytes([1]) * 100_000)), "of 100000 axes"),
        (tensor(varint(1 << 3), varint(2)), r"of shape \[2\] has 4 bytes"),
        (field(7, field(5, field(2, b"1"))), "a message where a number was expected"),
        (tensor(varint(1 << 3), varint(1)) + tensor(varint(1 << 3), varint(1)), "two weights 'w'"),
    ],
)
def test_no_length_or_shape_is_believed(content, said, tmp_path):
    file = tmp_path / "a.onnx"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_onnx(file)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_named(number, tmp_path):
    weights, quantised = {"w": np.ones((2, 3), np.int8)}, {"w": (number, 0)}
    onnx.save(graph(weights, quantised=quantised), tmp_path / "a.onnx")
    with pytest.raises(DataError, match="w_quantized has the scale"):
        read_onnx(tmp_path / "a.onnx")


def test_what_is_read_of_no_onnx_file_is_named(tmp_path):
    weights = {"w": np.ones((2, 3), np.float32)}
    onnx.save(graph(weights, quantised={}), tmp_path / "encoder.onnx")
    onnx.save(graph(weights), tmp_path / "decoder.onnx")
    with pytest.raises(DataError, match="hold no T5"):
        open_tensors(tmp_path)
    onnx.save(graph({"w_quantized": np.ones((2, 3), np.int8)}), tmp_path / "alone.onnx")
    with pytest.raises(DataError, match="w_quantized does not have a single scale"):
        read_onnx(tmp_path / "alone.onnx")
    onnx.save(graph({"w": np.ones((2, 3), np.complex64)}), tmp_path / "complex.onnx")
    with pytest.raises(DataError, match="w is of type 14"):
        read_onnx(tmp_path / "complex.onnx")
    made = graph({"w": np.ones((2, 300), np.float32)})
    onnx.save(made, tmp_path / "outside.onnx", save_as_external_data=True, size_threshold=8, location="outside.bin")
    with pytest.raises(DataError, match="keeps w in another file"):
        read_onnx(tmp_path / "outside.onnx")


def test_the_tokenizer_of_the_wheel_cuts_nothing(wheel):
    tokenizer = load_tokenizer(FLAN_T5)
    assert len(tokenizer.encode("hello there " * 100)) > 150
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id) == (0, 1, 0)
    assert (wheel / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.oracle
def test_the_wheel_fills_a_flan_t5_small_whose_logits_are_those_of_pytorch(wheel):
    fields = load_config(wheel)
    _, config, params = load_pretrained(wheel)  # refuses whatever is missing or surplus
    assert count_params(params) == 76_961_152
    theirs = transformers.T5Config(**{name: value for name, value in fields.items() if name != "model_type"})
    theirs.tie_word_embeddings = False  # the config ties the two in silence, whatever it is told
    model = transformers.T5ForConditionalGeneration(theirs).eval()
    tensors = {name: torch.tensor(np.asarray(tensor)) for name, tensor in read_onnx_t5(wheel).items()}
    model.load_state_dict(tensors | {"decoder.embed_tokens.weight": tensors["shared.weight"]})
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    source, mask, target = example()
    with torch.no_grad():
        output = model(torch.tensor(source), torch.tensor(mask).long(), labels=torch.tensor(target))
    found = logits(config, params, source, mask, target)
    scale = float(output.logits.abs().max())
    np.testing.assert_allclose(found, output.logits.numpy(), rtol=1e-5, atol=3e-6 * scale)


@pytest.mark.slow
@pytest.mark.oracle
def test_the_wheel_says_about_what_its_own_runtime_says(wheel):
    runtime = pytest.importorskip("onnxruntime")
    _, config, params = load_pretrained(wheel)
    source, mask, target = example()
    encoder, decoder = (runtime.InferenceSession(str(wheel / f"{name}.onnx")) for name in ("encoder", "decoder"))
    attended = mask.astype(np.int64)
    states = encoder.run(None, {"input_ids": source.astype(np.int64), "attention_mask": attended})[0]
    shifted = np.concatenate([np.zeros((len(target), 1), np.int64), target[:, :-1]], axis=1)
    inputs = {"input_ids": shifted, "encoder_hidden_states": states, "encoder_attention_mask": attended}
    expected = decoder.run(None, inputs)[0]
    found = logits(config, params, source, mask, target)
    # It rounds activations to eight bits too.
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.85
    assert np.corrcoef(found[:, ::-1].ravel(), expected.ravel())[0, 1] < 0.75  # of other tokens


def example():
    tokenizer = load_tokenizer(FLAN_T5)
    texts = ["I lost my dog yesterday and I am so sad about it.", "We won the game, can you believe it?"]
    answers = ["I am sorry to hear that. What happened?", "Congratulations! You must be so proud of it."]
    rows = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    targets = [[*tokenizer.encode(text), tokenizer.eos_id] for text in answers]
    width, length = max(map(len, rows)), min(map(len, targets))
    source = np.array([row + [0] * (width - len(row)) for row in rows])
    return source, source > 0, np.array([row[:length] for row in targets])


def logits(config, params, *inputs):
    model = EncoderDecoder(config)
    return np.asarray(jax.jit(model.apply)({"params": params}, *map(jnp.asarray, inputs)))
