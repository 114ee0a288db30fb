"""Damaged model files, each at least 300 times: refused by name or read right, whatever is in them."""

import json
import zipfile
from io import BytesIO

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.numpy import save

from empax.data.bpe import train_bpe
from tests.fuzz.model_readers import (
    read_adapter,
    read_gguf_model,
    read_model,
    read_tokenizer,
    read_weights,
    repacked,
    with_header,
)
from tests.fuzz.mutations import check, json_mutations, mutations

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)


def safetensors_file():
    tensors = {"a.weight": RNG.normal(size=(4, 3)), "b": np.arange(6, dtype=np.int64), "c": np.ones((2, 2), np.float16)}
    return save(tensors, metadata={"format": "pt"})


def torch_file():
    base = torch.arange(24.0)
    tensors = {"a": base.reshape(4, 6), "turned": base.reshape(4, 6).T[1:], "h": torch.ones(3, dtype=torch.bfloat16)}
    buffer = BytesIO()
    torch.save({"model": tensors, "step": 3, "opt": {"lr": 1e-3, "betas": (0.9, 0.99)}}, buffer)
    return buffer.getvalue()


def test_safetensors():
    content = safetensors_file()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    edited = json_mutations(header).map(lambda new: with_header(new, content))
    inputs = st.one_of(mutations(content), edited).map(lambda new: ("a.safetensors", new, None))
    check("safetensors", read_weights, inputs)


def test_pytorch_bin():
    content = torch_file()
    inputs = mutations(content).map(lambda new: ("pytorch_model.bin", new, content))
    check("pytorch_model.bin, damaged", read_weights, inputs)


def test_pytorch_bin_with_checksums_made_right():
    content = torch_file()
    with zipfile.ZipFile(BytesIO(content)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        pickled = archive.read(name)
    inputs = mutations(pickled).map(lambda new: ("pytorch_model.bin", repacked(content, {name: new}), None))
    check("pytorch_model.bin, other pickle", read_weights, inputs)


def gguf_file(path, model, tokens):
    """A Llama as llama.cpp's own package writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    c = model.config
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in model.state_dict().items():
        if name in names:
            writer.add_tensor(names[name], tensor.numpy())
    writer.add_tensor("blk.0.attn_q.weight", model.model.layers[0].self_attn.q_proj.weight.detach().numpy())
    quantized = gguf.quantize(RNG.normal(size=(4, 32)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    return transformers.LlamaForCausalLM(config)


def test_gguf(tmp_path):
    tokens = ["<|endoftext|>", *map(chr, range(97, 123)), "Ġ", "ab", *(f"<x{i}>" for i in range(11))]
    content = gguf_file(tmp_path / "a.gguf", tiny_llama(), tokens)
    head = content[: content.index(b"blk.0.attn_q.weight") + 64]  # where all that is not a number of a tensor lies
    edits = mutations(head).map(lambda new: new + content[len(head) :])
    inputs = st.one_of(edits, edits, mutations(content)).map(lambda new: (new,))
    check("GGUF", read_gguf_model, inputs)


def test_tokenizer_folder(tmp_path):
    train_bpe(["I feel sad today", "oh no what happened"], vocab_size=280).save(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>"}, "mask_token": "<mask>"}')
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    parsed = {name: json.loads(content) for name, content in files.items()}
    # Of the long table of the vocabulary the first entries are enough; the rest of the file is what varies.
    damaged = [mutations(files[name]).map(lambda new, name=name: ({**files, name: new},)) for name in files]
    edited = [
        json_mutations(parsed[name]).map(lambda new, name=name: ({**files, name: json.dumps(new).encode()},))
        for name in files
    ]
    check("tokenizer folder", read_tokenizer, st.one_of(*damaged, *edited))


def configs():
    """Fields and weights of a tiny Llama and a tiny BERT."""
    torch.manual_seed(0)
    small = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    bert = transformers.BertModel(transformers.BertConfig(**small, num_attention_heads=2, max_position_embeddings=32))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **sizes))
    for model in (tiny_llama(), bert, t5):
        names = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
        yield model.config.to_dict(), save({name: np.ascontiguousarray(array) for name, array in names.items()})


def test_config_json():
    inputs = []
    for fields, weights in configs():
        content = json.dumps(fields).encode()
        inputs.append(json_mutations(fields).map(lambda new, w=weights: (json.dumps(new).encode(), w)))
        inputs.append(mutations(content).map(lambda new, w=weights: (new, w)))
    check("config.json", read_model, st.one_of(*inputs), seconds=120)


def test_adapter_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of a name that is none, nobody is asked
    tiny_llama().save_pretrained(tmp_path)
    part, shapes = "base_model.model.model.layers.0.self_attn", {"q_proj": 16, "v_proj": 8}
    tensors = {f"{part}.{name}.lora_A.weight": RNG.normal(size=(2, 16)).astype(np.float32) for name in shapes}
    tensors |= {f"{part}.{name}.lora_B.weight": np.ones((size, 2), np.float32) for name, size in shapes.items()}
    tensors["base_model.model.model.norm.weight"] = np.ones(16, np.float32)
    fields = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path), "r": 2, "lora_alpha": 4, "bias": "none"}
    fields |= {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["norm"], "use_rslora": True}
    fields |= {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 8}, "lora_dropout": 0.1, "use_dora": False}
    fields |= {"exclude_modules": None, "layers_to_transform": None, "init_lora_weights": True}
    config, weights = json.dumps(fields).encode(), save(tensors)
    size = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + size])
    inputs = st.one_of(
        json_mutations(fields).map(lambda new: (json.dumps(new).encode(), weights)),
        mutations(config).map(lambda new: (new, weights)),
        json_mutations(header).map(lambda new: (config, with_header(new, weights))),
        mutations(weights).map(lambda new: (config, new)),
    )
    check("adapter", read_adapter, inputs, seconds=120)
